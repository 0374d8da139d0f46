"""Responses of a model on this machine to a collection's questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from coca_mindspeed.config.prompt_form import PromptForm
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.prompts import encode_prompts, form_digest, instruction_suffix
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import ConfigError, Problem, raise_problems
from coca_mindspeed.evaluation.collection import Add, Key
from coca_mindspeed.local.inverse_cdf import NoDistributionError
from coca_mindspeed.local.model_files import load_model_tokenizer, read_model_config, weight_shapes
from coca_mindspeed.local.plan import MARGIN, estimate_memory, free_bytes
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.prompt_checks import LengthLimits, check_prompts
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.schedule import generator
from coca_mindspeed.scoring.rollout import number_or_none
from coca_mindspeed.utils.process import GIB


def in_form(records: Sequence[Record], form: PromptForm) -> list[Record]:
    """The records with the instructions of a ``form`` as their own."""
    return [replace(r, metadata={**r.metadata, "instruction": instruction_suffix(r, form)}) for r in records]


@dataclass(frozen=True)
class LocalAnswers:
    """Samples responses, ``at_once`` together; a chunk's seed is of its first question, so that it can be resumed."""

    policy: Policy
    config: RunConfig  # method, longest response, temperature and seed
    form: PromptForm
    at_once: int

    def answer(self, questions: Mapping[Key, Record], add: Add) -> None:
        """Answer the questions; ConfigError if the model's probabilities are not finite."""
        left = iter(questions.items())
        while chunk := list(islice(left, self.at_once)):
            self._answer(chunk, add)

    def _answer(self, chunk: Sequence[tuple[Key, Record]], add: Add) -> None:
        policy, config, form = self.policy, self.config, self.form
        records = in_form([record for _, record in chunk], form)
        sampling = config.rollout.model_copy(update={"batch_responses": None})
        draw = generator(policy.device, config.seed, "collect", *chunk[0][0])
        try:
            rollout = respond(policy, records, form.system_prompt, sampling, draw, group_size=1)
        except NoDistributionError as error:
            raise ConfigError(f"MODEL={config.model.path}: {error}") from error
        parsed = rollout.read(policy.text, config.method, in_training=False)
        after = parsed.stated_after
        for row, (key, record) in enumerate(chunk):
            stated = number_or_none(parsed.stated[row])
            second = {} if after is None else {"confidence_after": number_or_none(after[row])}
            reply = {
                "response": parsed.texts[row],
                "confidence": stated,
                **second,
                "tokens_to_confidence": None if stated is None else int(parsed.confidence_lengths[row]),
                "tokens": int(rollout.lengths[row]),
                "finish_reason": "stop" if rollout.finished[row] else "length",
                "form": form_digest(record, form.system_prompt, form),
            }
            add(key, reply)


def plan_collection(
    config: RunConfig, records: Sequence[Record], form: PromptForm, at_once: int, device: torch.device
) -> str:
    """Check prompts and memory before the weights are read; return the memory in words.

    Raises ConfigError for a prompt that does not fit into the context, or ``at_once`` responses that do not fit into
    memory.
    """
    path, longest = Path(str(config.model.path)), config.rollout.max_new_tokens
    records, limits = in_form(records, form), LengthLimits(2**31, longest, "--data", "--max-tokens")
    tokenizer = load_model_tokenizer(path, config.model, where="MODEL")
    check_prompts(
        tokenizer, path, config.model, records, form.system_prompt, limits, where="MODEL", thinking=form.thinking
    )
    prompt = max(map(len, encode_prompts(tokenizer, records, form.system_prompt)))
    sampled = {"prompts": at_once, "group_size": 1, "batch_responses": at_once, "max_prompt_tokens": prompt}
    without = {"interval": 0, "final_questions": 0}
    changes = {
        "rollout": config.rollout.model_copy(update=sampled),
        "evaluation": config.evaluation.model_copy(update=without),
    }
    architecture = read_model_config(path, config.model, where="MODEL")
    need = estimate_memory(config.model_copy(update=changes), architecture, weight_shapes(path), device)
    total, room = need.weights + need.logits + need.cache, free_bytes(device)
    text = (
        f"up to {total / GIB:.1f} GiB (weights {need.weights / GIB:.1f}, KV cache {need.cache / GIB:.1f}) for "
        f"{at_once} responses at once of {prompt} + {longest} tokens, the longest; {room / GIB:.1f} GiB are free"
    )
    if total > MARGIN * room:
        fix = "lower it, or --max-tokens; or use a smaller model"
        raise_problems([Problem("memory-rollout", "--concurrency", at_once, f"sampling needs {text}", fix)])
    return text
