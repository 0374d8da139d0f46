"""Rollout by vLLM, in a process of its own, given the policy's weights before it samples from them.

A process of its own, because vLLM changes what it finds in a process (threads, default dtypes, PyTorch's compiler) and
a run is to be the same bytes with or without it; because its end, by the kernel or by a bug, is then an error and not
the end of the trainer; and because its environment may be another, with the transformers that vLLM asks for.  Weights
go over a socket, one tensor at a time: a copy in memory or on disk is never whole, and nothing is left by a kill.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coca_mindspeed.algorithm.importance import engine_gap
from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.config.schema import RolloutConfig, RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.engine_process import EngineProcess
from coca_mindspeed.local.log_probs import response_log_probs
from coca_mindspeed.local.lora import plain_weights
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Samples
from coca_mindspeed.local.sampling_engine import RolloutError
from coca_mindspeed.local.vllm_check import dtype_of_vllm

_MODULE = "coca_mindspeed.local.vllm_process"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, whose end is the engine's
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the trainer's threads run on the same cores while vLLM waits
_PROBES, _PROBE_TOKENS = 8, 8  # prompts that are tried at the start, and their length and their responses'
_OTHER_MODEL = 0.3  # nats; bfloat16 makes hundredths, a model with a part that was not handed over half a nat and more
_OVERRIDING = ("VLLM_CPU_KVCACHE_SPACE",)  # what would have its way with a key of ours


class VllmRollout:
    """Samples by vLLM from a policy's weights; they are handed over when they have changed and are needed."""

    def __init__(self, policy: Policy, process: EngineProcess, dtype: torch.dtype) -> None:
        """Take over a process that has been started.

        Args:
            policy: whose weights are sampled from.
            process: holds a vLLM of the policy's architecture.
            dtype: that vLLM computes in.
        """
        self._policy, self._process, self._dtype = policy, process, dtype
        self._up_to_date = False
        self._handing_over = 0.0

    @property
    def pid(self) -> int:
        """Of vLLM's process."""
        return self._process.pid

    def weights_changed(self) -> None:
        """Have the next sample wait for the policy's new weights."""
        self._up_to_date = False

    def timing(self) -> dict[str, float]:
        """Seconds that handing over weights has taken, within calls of :meth:`sample`."""
        seconds, self._handing_over = self._handing_over, 0.0
        return {"seconds/weights_to_vllm": seconds}

    def close(self) -> None:
        """End vLLM's process."""
        self._process.close()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        rollout: RolloutConfig,
        *,
        group_size: int,
        generator: torch.Generator,
    ) -> Samples:
        """See :meth:`.sampling_engine.Rollout.sample`; every response is drawn by a seed of its own from ``generator``.

        So it does not depend on which others vLLM computes beside it, but for the rounding of its probabilities.
        How many it computes at once was said when it was started.
        """
        if not self._up_to_date:
            self._hand_over()
        policy, rows = self._policy, len(prompts) * group_size
        seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator, device=generator.device)
        tokens, log_probs, lengths = self._process.ask(
            {
                "order": "sample",
                "max_tokens": rollout.max_new_tokens,
                "temperature": rollout.temperature,
                "stop": list(policy.eos_ids),
                "never": None if policy.pad_id in policy.eos_ids else policy.pad_id,
            },
            [
                torch.tensor([token for prompt in prompts for token in prompt]),
                torch.tensor([len(prompt) for prompt in prompts]),
                seeds,
            ],
        )
        _check_answer(policy, tokens, log_probs, lengths, rows, rollout.max_new_tokens)
        width = int(lengths.max())
        inside = torch.arange(width) < lengths[:, None]
        token_ids = torch.full((rows, width), policy.pad_id).masked_scatter_(inside, tokens)
        of_engine = torch.zeros(rows, width).masked_scatter_(inside, log_probs)
        ended = torch.isin(token_ids.gather(1, lengths[:, None] - 1)[:, 0], torch.tensor(policy.eos_ids))
        unknown = torch.full((rows, width), torch.nan)
        return Samples(
            prompts=[list(prompt) for prompt in prompts],
            token_ids=token_ids.to(policy.device),
            lengths=lengths.to(policy.device),
            log_probs=unknown.to(policy.device),
            finished=ended.to(policy.device),
            entropy=unknown[:, 0].to(policy.device),
            engine_log_probs=of_engine.to(policy.device),
        )

    def _hand_over(self) -> None:
        started = time.perf_counter()
        with torch.no_grad():
            self._process.ask({"order": "load"}, following=self._weights())
        self._up_to_date = True
        self._handing_over += time.perf_counter() - started

    def _weights(self) -> Iterator[tuple[Mapping[str, Any], Sequence[Tensor]]]:
        sent: set[int] = set()  # by address: tied weights go once, under their first name, as in a checkpoint
        for name, value, added in plain_weights(self._policy):
            if added is None and value.data_ptr() in sent:
                continue
            sent.add(value.data_ptr())
            plain = value if added is None else value.float() + added
            yield {"name": name}, [plain.to(self._dtype)]
        yield {"name": None}, []


def start_vllm(config: RunConfig, policy: Policy, directory: Path, max_tokens: int, log: Path) -> VllmRollout:
    """Start a vLLM for a policy, and hand it the policy's weights.

    Args:
        config: the run's.
        policy: what is sampled from.
        directory: holds the policy's ``config.json``; weights in it are not read.
        max_tokens: the longest sequence, prompt and response together.
        log: where vLLM's output goes.

    Raises:
        ConfigError: vLLM does not start with this model and these settings, or does not know its weights.
    """
    vllm = config.rollout.vllm
    dtype = dtype_of_vllm(config)
    print(f"starting vLLM; its output goes to {log}", file=sys.stderr, flush=True)
    try:
        process = EngineProcess(vllm.python or sys.executable, _MODULE, log, _environment(policy.device))
        rollout = VllmRollout(policy, process, getattr(torch, dtype))
        try:
            process.ask(
                {
                    "model": str(directory),
                    "trust_remote_code": config.model.trust_remote_code,
                    "dtype": dtype,
                    "max_model_len": max_tokens,
                    "kv_cache_bytes": int(vllm.kv_cache_gib * GIB),
                    "max_num_seqs": config.rollout.batch_responses,
                    "eager": vllm.eager,
                }
            )
            _refuse_another_model(rollout, policy, config)
        except BaseException:
            rollout.close()
            raise
    except RolloutError as error:
        raise ConfigError(f"rollout.engine=vllm: {error}") from error
    return rollout


def _refuse_another_model(rollout: VllmRollout, policy: Policy, config: RunConfig) -> None:
    """Sample a little from random prompts, and refuse a vLLM that does not compute what the policy computes.

    It started with other weights, so whatever the first hand-over has not reached (a packed copy, a weight under
    another name) shows here, where a stale part after an update would not: that differs by one step alone.
    """
    draw = torch.Generator().manual_seed(0)
    length = min(_PROBE_TOKENS, config.rollout.max_prompt_tokens)
    prompts = torch.randint(0, policy.model.config.get_text_config().vocab_size, (_PROBES, length), generator=draw)
    short = config.rollout.model_copy(
        update={"max_new_tokens": min(_PROBE_TOKENS, config.rollout.max_new_tokens), "temperature": 1.0}
    )
    samples = rollout.sample(prompts.tolist(), short, group_size=1, generator=draw)
    with torch.no_grad():
        expected = response_log_probs(policy, samples.prompts, samples.token_ids, temperature=1.0)
    assert samples.engine_log_probs is not None
    gap = engine_gap(expected, samples.engine_log_probs, samples.inside)
    if not gap.mean <= _OTHER_MODEL:
        raise RolloutError(
            f"vLLM's log-probs differ from the policy's by {gap.mean:.3g} nats in the mean and {gap.largest:.3g} at "
            f"most, on {_PROBES} random prompts, where rounding makes a hundredth: this vLLM does not compute "
            "this model; take rollout.engine=local"
        )


def _environment(device: torch.device) -> dict[str, str]:
    """The process's environment: the trainer's device and threads, and nothing sent or fetched over a network."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OVERRIDING}
    chosen = {**_DEFAULTS, **inherited, **_ENVIRONMENT}
    if device.type == "cuda":
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        index = device.index or 0
        chosen["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    else:
        chosen["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return chosen


def _check_answer(
    policy: Policy, tokens: Tensor, log_probs: Tensor, lengths: Tensor, rows: int, max_new_tokens: int
) -> None:
    """Refuse what no engine that does what it is asked would answer; a wrong token would become a wrong reward."""
    if len(lengths) != rows:
        raise RolloutError(f"vLLM has answered with {len(lengths)} responses where {rows} were asked for")
    if int(lengths.min()) < 1 or int(lengths.max()) > max_new_tokens:
        raise RolloutError(
            f"vLLM has answered with responses of {int(lengths.min())} to {int(lengths.max())} tokens; "
            f"1 to {max_new_tokens} were asked for"
        )
    vocabulary = policy.model.config.get_text_config().vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise RolloutError(f"vLLM has sampled a token that the policy's vocabulary of {vocabulary} does not have")
    if not bool(torch.isfinite(log_probs).all()):
        at = int((~torch.isfinite(log_probs)).nonzero()[0])
        raise RolloutError(f"vLLM says that the log-prob of a token that it has sampled is {float(log_probs[at])}")
