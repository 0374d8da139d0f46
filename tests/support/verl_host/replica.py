"""A rollout engine of verl's made of transformers' ``generate``, in an actor that takes the trained weights."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

_GATHER_SECONDS = 0.05  # in which requests that belong together arrive
_ABORT_SECONDS = 10.0  # in which requests of the next step arrive, if there is one
_AT_ONCE = 256


def actor_name(rank: int) -> str:
    """Of the actor that samples for one training rank."""
    return f"coca_host_rollout_{rank}"


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: list[int]
    temperature: float
    limit: int  # tokens of the response, or of the rest of an aborted one
    answer: "asyncio.Future[TokenOutput]"


class HostServer:
    """The actor: gathers requests for a moment, and samples them together.

    Attributes:
        model: the policy.
        step: of the weights that it has; None before those of training have come.
    """

    def __init__(self, path: str, max_new_tokens: int, seed: int) -> None:
        """Load the model in a Hugging Face directory; the weights of training come later."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        self._pad, self._eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self._max_new_tokens = max_new_tokens
        self.step: int | None = None
        self._waiting: list[_Request] = []
        self._asked = asyncio.Event()  # a request waits
        self._open = asyncio.Event()  # closed by an abort, until generation goes on
        self._open.set()
        self._sampling: asyncio.Task[None] | None = None

    async def load(self, weights: Mapping[str, torch.Tensor], step: int | None) -> None:
        """Take the weights of a step."""
        result = self.model.load_state_dict(dict(weights), strict=False)  # tied weights come once
        if result.unexpected_keys:
            raise ValueError(f"weights of another model: {result.unexpected_keys[:3]}")
        self.step = step

    async def generate(
        self, request_id: str, prompt_ids: Iterable[int], sampling_params: Mapping[str, Any], **_others: Any
    ) -> TokenOutput:
        """Sample one response."""
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        limit = int(sampling_params.get("max_tokens", self._max_new_tokens))
        self._waiting.append(_Request(list(prompt_ids), float(sampling_params.get("temperature", 1.0)), limit, answer))
        self._asked.set()
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._sample_waiting())
        return await answer

    async def _sample_waiting(self) -> None:
        while self._waiting:
            await self._open.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            self._answer_waiting()

    def _answer_waiting(self, *, aborted: bool = False) -> None:
        """Sample a batch; of an aborted one return the first half of each response."""
        if not self._waiting:
            return
        temperature = self._waiting[0].temperature
        batch = [request for request in self._waiting if request.temperature == temperature][:_AT_ONCE]
        self._waiting = [request for request in self._waiting if request not in batch]
        if not self._waiting:
            self._asked.clear()
        try:
            outputs = self.sample([request.prompt for request in batch], temperature)
        except Exception as failure:  # noqa: BLE001  whoever asked is told
            for request in batch:
                request.answer.set_exception(failure)
            return
        for request, output in zip(batch, outputs, strict=True):
            length = min(request.limit, len(output.token_ids) // 2 if aborted else len(output.token_ids))
            output.token_ids, output.log_probs = output.token_ids[:length], output.log_probs[:length]
            output.stop_reason = "aborted" if aborted else output.stop_reason
            request.answer.set_result(output)

    async def abort_all_requests(self, **_options: Any) -> None:
        """Interrupt responses, and hold requests.

        Those of the next step are dispatched by now, so a moment of waiting has some to interrupt in every run.
        """
        self._open.clear()
        if not self._waiting:
            with suppress(asyncio.TimeoutError):  # the run ends with this step
                await asyncio.wait_for(self._asked.wait(), _ABORT_SECONDS)
                await asyncio.sleep(_GATHER_SECONDS)
        self._answer_waiting(aborted=True)

    async def resume_generation(self) -> None:
        """Serve requests again."""
        self._open.set()

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], temperature: float) -> list[TokenOutput]:
        width = max(map(len, prompts))
        result = self.model.generate(
            input_ids=torch.tensor([[self._pad] * (width - len(p)) + p for p in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._max_new_tokens,
            pad_token_id=self._pad,
            eos_token_id=self._eos,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = result.sequences[:, width:]
        log_probs = torch.stack(result.logits, dim=1).float().div(temperature).log_softmax(dim=-1)
        chosen = log_probs.gather(-1, tokens[..., None])[..., 0]
        return [
            TokenOutput(
                token_ids=row[:length],
                log_probs=values[:length],
                stop_reason="completed",
                extra_fields={"global_steps": self.step},
            )
            for row, values in zip(tokens.tolist(), chosen.tolist(), strict=True)
            for length in [row.index(self._eos) + 1 if self._eos in row else len(row)]
        ]

    async def nothing(self, *_arguments: Any, **_options: Any) -> None:
        """What an engine with device memory, caches or a profiler would do here."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = nothing


class HostReplica(RolloutReplica):
    """One actor for each training rank."""

    async def launch_servers(self) -> None:
        """Start it, in the way that verl's engines do."""
        model = self.model_config
        path = model["path"] if isinstance(model, Mapping) else model.path
        name = actor_name(self.replica_rank)
        server = (
            ray.remote(HostServer)
            .options(name=name, num_cpus=0, max_concurrency=1000)
            .remote(path, self.config.response_length, self.config.seed + self.replica_rank)
        )
        self.servers = [server]
        self._server_handle, self._server_address = server, name


class HostAdapter(BaseRollout):
    """The training rank's side: sends its weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *others: Any, **options: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank = int(os.environ["RANK"])

    async def resume(self, tags: Any) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_options: Any) -> None:
        """Hand the weights of a step to the actor; under FSDP each is gathered whole."""
        whole = {
            name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().cpu().clone()
            for name, weight in weights
        }
        await ray.get_actor(actor_name(self._rank)).load.remote(whole, global_steps)
