"""Rollouts from the actor's current Megatron weights, in place of vLLM-Ascend and the weight resharding.

Each rank is a rollout engine of its own (tensor parallelism 1): before every rollout the shards of its
model-parallel group are gathered and joined into a transformers model, which samples with a key-value cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.stages.rollout_engine import next_seed
from tests.support.mindspeed_host import rollout_groups
from tests.support.mindspeed_host.weights import Layout, local_shard

# Bounds of what is sampled at once: transformers keeps the scores of all tokens until the last is drawn.
_MOST_RESPONSES = 512
_MOST_BYTES_OF_SCORES = 2**30


class HostRolloutEngine:
    """Stands where MindSpeed-RL's ``VLLMInferEngine`` would; the arguments are that class's."""

    def __init__(self, tokenizer_name_or_path: str, sampling_config: dict[str, Any], **others: Any) -> None:
        for kind in ("tensor", "pipeline", "expert"):
            key = f"infer_{kind}_parallel_size"
            if (size := others.get(key, 1)) != 1:
                raise ConfigError(f"generate_config.{key}: must be 1, found {size}: the host samples on one rank")
        self.hf_config = AutoConfig.from_pretrained(tokenizer_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name_or_path)
        # vLLM also stops at what the generation config names, for Qwen2.5 the pad token.
        named = GenerationConfig.from_pretrained(tokenizer_name_or_path).eos_token_id
        self.eos_ids = sorted({tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None})
        self.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.sampling = dict(sampling_config)
        if float(self.sampling.get("min_p", 0.0)):
            raise ConfigError("generate_config.sampling_config.min_p: the host platform supports 0 only")
        self.model: Any = AutoModelForCausalLM.from_config(self.hf_config).eval()
        self.rank = torch.distributed.get_rank()
        self._generator = torch.Generator()
        rollout_groups.initialize()

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the actor's weights (a whole Hugging Face state dict)."""
        dtype = next(iter(state.values())).dtype
        self.model.to(dtype=dtype)
        self.model.load_state_dict(state)

    @torch.no_grad()
    def generate_sequences(self, prompts: Sequence[Sequence[int]], **changes: Any) -> tuple[Tensor, Tensor]:
        """Sample ``num_completions`` responses to each prompt; ``changes`` are sampling settings for this call.

        Returns:
            token ids int64 ``[prompts * n, tokens]``, the end of text included and padded with the pad token, and
            the log-probability of each under the tempered distribution, float32 of the same shape.
        """
        self.init_cache_engine()
        settings = {**self.sampling, **changes}
        count = int(settings.get("n", settings.get("num_completions", 1)))
        rows = [list(prompt) for prompt in prompts for _ in range(count)]
        ids: list[Tensor] = []
        log_probs: list[Tensor] = []
        at_once = responses_at_once(self.hf_config.vocab_size, int(settings["max_tokens"]))
        for start in range(0, len(rows), at_once):
            sampled, scores = self._sample(rows[start : start + at_once], settings)
            ids.extend(sampled)
            log_probs.extend(scores)
        return (
            pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            pad_sequence(log_probs, batch_first=True),
        )

    def _sample(self, rows: list[list[int]], settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        width = max(map(len, rows))
        device = self.model.device
        ids = torch.tensor([[self.pad_token_id] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        # transformers samples from torch's global generator: lend it ours, so that a rank's rollouts are its own.
        state = torch.get_rng_state()
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=self._generator)))
        try:
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=float(settings.get("temperature", 1.0)),
                top_p=float(settings.get("top_p", 1.0)),
                top_k=max(0, int(settings.get("top_k", 0))),
                max_new_tokens=int(settings["max_tokens"]),
                eos_token_id=self.eos_ids,
                pad_token_id=self.pad_token_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
        finally:
            torch.set_rng_state(state)
        sampled = output.sequences[:, width:]
        scores = torch.stack(
            [
                step.float().log_softmax(-1).gather(1, sampled[:, position : position + 1]).squeeze(1)
                for position, step in enumerate(output.scores)
            ],
            dim=1,
        )
        ended = torch.isin(sampled, torch.tensor(self.eos_ids, device=device))
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, sampled.shape[1]).tolist()
        return (
            [row[:length].cpu() for row, length in zip(sampled, lengths, strict=True)],
            [row[:length].cpu() for row, length in zip(scores, lengths, strict=True)],
        )

    def init_cache_engine(self) -> None:
        """Seed the noise, which is all that begins a rollout here."""
        self._generator.manual_seed(next_seed(self, self.rank))

    def free_cache_engine(self) -> None:
        """Nothing is kept between rollouts."""

    offload_model_weights = free_cache_engine


def responses_at_once(vocabulary: int, max_tokens: int) -> int:
    """How many responses are sampled together, so that their scores, float32, stay within a GiB; at least one."""
    return max(1, min(_MOST_RESPONSES, _MOST_BYTES_OF_SCORES // (4 * vocabulary * max_tokens)))


class HostShardingManager:
    """Stands where MindSpeed-RL's ``MegatronShardingManager`` would: weights go to the rollout engine, all of them."""

    def __init__(
        self, inference_engine: HostRolloutEngine, megatron_model: Any, parallel_state: Any, **_others: Any
    ) -> None:
        self.engine = inference_engine
        self.chunks = megatron_model
        self.parallel_state = parallel_state

    def enter_infer_mode(self) -> None:
        """Give the rollout engine the weights as they are now."""
        parallel = self.parallel_state
        layout = Layout.of(self.engine.hf_config, parallel.get_tensor_model_parallel_world_size())
        shard = local_shard(self.chunks, parallel.get_tensor_model_parallel_rank())
        group = parallel.get_model_parallel_group()
        shards: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(shards, shard, group=group)
        self.engine.load(layout.join(shards))

    def exit_infer_mode(self) -> None:
        """Nothing moves on the host: the weights never leave its memory."""

    enter_forward_mode = exit_infer_mode
    exit_forward_mode = exit_infer_mode
    enter_train_mode = exit_infer_mode
    exit_train_mode = exit_infer_mode
