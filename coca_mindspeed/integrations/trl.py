"""CoCA in TRL: a ``GRPOTrainer`` with an advantage for each token; see docs/frameworks.md.

    from coca_mindspeed.integrations.trl import CocaTrainer

    trainer = CocaTrainer(model="Qwen/Qwen2.5-1.5B-Instruct", args=GRPOConfig(...), train_dataset=dataset)

Sampling, loss, logging and checkpoints are TRL's.  :class:`CocaTrainer` reads the confidences from the sampled token
ids, whatever engine sampled them, and replaces the advantages.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.requirements import Requirement, View
from coca_mindspeed.data.prompts import TemplateKeys, check_chat, check_end, write_into_template
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.integrations.settings import (
    ONE_WEIGHT,
    RowGrader,
    check_held_out,
    check_options,
    check_prompt,
    check_sources,
    integration_settings,
    option_rows,
    rows_of_process,
)
from coca_mindspeed.scoring.health import HealthWarnings
from coca_mindspeed.scoring.metrics import (
    HELD_OUT,
    TIMES_ASKED,
    cut_off,
    gap_metrics,
    rollout_metrics,
    sight_metrics,
    values,
)
from coca_mindspeed.scoring.rollout import Credited, Sampled, Scored, confidence_log_probs
from coca_mindspeed.scoring.settings import ScoringSettings
from coca_mindspeed.utils.tokenization import token_text

logger = logging.getLogger(__name__)
Reward = Callable[..., Any]
_PLAIN = "rendered"
_MAX_CHATS = 1000  # rendered for the checks
_END = 40  # characters that may open a thought at the end of a rendered prompt

_KEYS = TemplateKeys(
    variables="chat_template_kwargs",
    thinking="coca.method.thinking",
    day="give the template's own variable a date by chat_template_kwargs (Llama 3.1: date_string), or write the date "
    "into the template",
)


_REQUIREMENTS: tuple[Requirement[View], ...] = (
    *option_rows("trl"),
    Requirement(
        "segments",
        "vllm_importance_sampling_mode",
        ("token_truncate", "token_mask"),
        ONE_WEIGHT,
        when=lambda args: args.value("use_vllm") and args.value("vllm_importance_sampling_correction"),
    ),
    Requirement(
        "segments", "loss_type", lambda loss, _: loss != "vespo", f"must have a ratio for each token: {ONE_WEIGHT}"
    ),
    Requirement(
        "groups", "num_generations_eval", lambda group, _: group != 1, "must be at least 2, since GESR needs a group"
    ),
)


def _parts(datasets: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The data sets by name; an evaluation may have several."""
    for name, given in datasets.items():
        if given is not None:
            yield from given.items() if isinstance(given, dict) else [(name, given)]


def _as_chat(prompt: Any) -> list[dict[str, str]]:
    """The texts of a prompt's messages; a prompt that is rendered already is one message of the role ``_PLAIN``."""
    if isinstance(prompt, str):
        return [{"role": _PLAIN, "content": prompt}]
    return [{"role": each["role"], "content": _text(each["content"])} for each in prompt]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


class CocaTrainer(GRPOTrainer):
    """A ``GRPOTrainer`` whose segments have advantages of their own.

    TRL's metric ``rewards/.../mean`` is the accuracy; CoCA's metrics have the names of docs/troubleshooting.md.  The
    table of ``log_completions`` gets the columns ``confidence``, ``confidence_advantage`` and ``answer_advantage``; its
    column ``advantage`` is TRL's own.
    """

    _tag_names = [*GRPOTrainer._tag_names, "coca"]  # noqa: RUF012  as of GRPOTrainer
    _scored: Scored  # this process's part of the newest rollout
    _cut_off: torch.Tensor  # bool, which of these responses were cut off

    def __init__(
        self,
        model: Any,
        reward_funcs: Reward | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        coca: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the trainer.

        Args:
            model, args, train_dataset, eval_dataset: of ``GRPOTrainer``.
            reward_funcs: one reward function of TRL that returns 1 for a right answer, 0 for a wrong one and None for
                one that it could not grade; it is given the completions without their confidences.  None: the graders
                of docs/grading.md, by the column ``record`` of rows by ``coca-mindspeed data export trl``.
            coca: the section ``coca`` of docs/verl.md, such as ``{"method": {"advantage_scale": "batch"}}``.
            **kwargs: of ``GRPOTrainer``; tools and environments are not supported.

        Raises CocaError: a TRL of other sources than those that were tested, an invalid key, options that contradict
        each other, or a row that cannot be graded.
        """
        check_sources("trl")
        section = dict(coca or {})
        self._settings = integration_settings(section, "trl")
        if args is not None:
            check_options(_REQUIREMENTS, args, "options of GRPOConfig:")
        for name in ("tools", "environment_factory"):
            if kwargs.get(name):
                raise ConfigError(f"{name}: not supported; its output would be taken for the model's own response")
        datasets = dict(_parts({"train_dataset": train_dataset, "eval_dataset": eval_dataset}))
        if reward_funcs is None:
            reward_funcs = self._custom_reward(datasets, args)
        elif ignored := (ScoringSettings.model_fields.keys() - {"method"}) & section.keys():
            raise ConfigError(f"coca.{sorted(ignored)[0]}: has no effect with reward_funcs; remove one of them")
        elif not callable(reward_funcs):
            raise ConfigError(f"reward_funcs: expected one function of correctness, found {reward_funcs!r:.80}")
        chats = self._chats(datasets) if args is None or args.process_index == 0 else {}
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **kwargs)
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        self._check_template(tokenizer, chats)
        self._text = token_text(tokenizer, self.model.config.get_text_config().vocab_size)
        self._health = HealthWarnings()
        self._evaluated: list[torch.Tensor] = []  # [2, P, G] each: correctness and confidences of this evaluation
        self._held_out: dict[str, float] = {}  # metrics of an evaluation since the last training step

    def _custom_reward(self, datasets: Mapping[str, Any], args: GRPOConfig | None) -> Reward:
        """The grader as a reward function; the first process checks the rows of data sets that are not streamed."""
        grader = RowGrader(self._settings)
        if args is None or args.process_index == 0:
            for part, dataset in datasets.items():
                if hasattr(dataset, "__len__"):
                    if "record" not in dataset.column_names:
                        raise DataError(
                            f"{part}: no column 'record'; make the file with coca-mindspeed data export trl, or "
                            "pass reward_funcs"
                        )
                    grader.check(part, dataset["record"])

        def correct(completions: Sequence[Any], record: Sequence[Any] = (), **_: Any) -> list[bool | None]:
            answers = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
            return grader.grade(record or [None] * len(answers), answers)

        return correct

    def _chats(self, datasets: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
        """Check that each prompt asks for the confidence, and that evaluations ask others than the training.

        Returns a chat for each system message, by its row.  Of a data set that is streamed, the first row is checked.
        """
        check_held_out(datasets)
        chats: dict[str, tuple[str, list[dict[str, str]]]] = {}
        for part, dataset in datasets.items():
            prompts = dataset["prompt"] if hasattr(dataset, "__len__") else [row["prompt"] for row in dataset.take(1)]
            for number, prompt in enumerate(prompts, start=1):
                chat, where = _as_chat(prompt), f"{part}: row {number}"
                check_prompt(chat, self._settings.method, where)
                system = chat[0]["content"] if chat[0]["role"] == "system" else chat[0]["role"]
                if len(chats) < _MAX_CHATS:
                    chats.setdefault(system, (where, chat))
        return dict(chats.values())

    def _check_template(self, tokenizer: Any, chats: Mapping[str, list[dict[str, str]]]) -> None:
        """Refuse a chat template as the other engines do; see ``check_chat``."""
        thinking, model = self._settings.method.thinking, f"model={tokenizer.name_or_path}"
        if any(chat[0]["role"] != _PLAIN for chat in chats.values()):
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = self.processing_class.chat_template
            write_into_template(tokenizer, self.chat_template_kwargs)
        for where, chat in chats.items():
            if chat[0]["role"] != _PLAIN:
                check_chat(tokenizer, chat, where, model, _KEYS, thinking=thinking)
            else:
                check_end(chat[0]["content"][-_END:], where, _KEYS, thinking)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Sequence[Any], completion_ids_list: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Grade the answers without their confidences."""
        sampled = Sampled.of_responses(completion_ids_list)
        parsed = sampled.read(self._text, self._settings.method)
        answers: Sequence[Any] = parsed.answers
        if not isinstance(completions[0], str):
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        verdicts: torch.Tensor = super()._calculate_rewards(inputs, prompts, answers, completion_ids_list)
        correct = verdicts[:, 0].double().cpu()
        if not bool(((correct == 0) | (correct == 1) | correct.isnan()).all()):
            found = correct.unique().tolist()
            raise ConfigError(f"{self.reward_func_names[0]}: expected rewards of 1, 0 or None, found {found}")
        rows = rows_of_process(len(completion_ids_list), self.accelerator.process_index)
        self._scored = parsed.scored(correct[rows])
        self._cut_off = cut_off(sampled.token_ids, sampled.lengths, self.max_completion_length, self.eos_token_ids)
        return verdicts

    def _give_credit(self, output: Mapping[str, Any]) -> Credited:
        """Give credit to the responses of all processes, in each of them: a group may be split over processes.

        ``output`` is that of TRL's ``_generate_and_score_completions``, after the rewards: it has the log-probs.
        """
        stage = self._settings.stage_at(self.state.global_step, self.state.max_steps)
        rule, own = CreditRule(self._settings.method, stage), self._scored
        sampled = self._log_probs(own.lengths, output) if rule.settings.reads_log_probs else None
        of_own = confidence_log_probs(rule, sampled, own.segment_ends)
        parts = gather_object([(own, of_own)])
        log_probs = None if of_own is None else torch.cat([of_part for _, of_part in parts])
        scored = Scored.joined([part for part, _ in parts])
        return scored.give_credit(rule, self._group_size(), log_probs=log_probs)

    def _log_probs(self, lengths: torch.Tensor, output: Mapping[str, Any]) -> torch.Tensor:
        """Log-probs of the sampled tokens, float ``[B, T]`` on the CPU, under the weights that sampled them.

        They are TRL's old log-probs.  Where these are absent, because one step samples and updates, or of masked
        prompts, because TRL masks truncated responses, its own function computes them in one pass without gradient.
        """
        if "old_per_token_logps" in output and not self.mask_truncated_completions:
            log_probs: torch.Tensor = output["old_per_token_logps"]
            return log_probs.cpu()
        ids = output["completion_ids"]
        inside = (torch.arange(ids.shape[1]) < lengths[:, None]).to(output["prompt_mask"])
        of_images = inspect.signature(self._get_per_token_logps_and_entropies).parameters.keys() & output.keys()
        args = self.args
        batch = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with torch.no_grad(), disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            log_probs, *_ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], ids], dim=1),
                torch.cat([output["prompt_mask"], inside], dim=1),
                ids.shape[1],
                batch_size=batch,
                **{name: output[name] for name in of_images},
            )
        return log_probs.cpu()

    def _log_columns(self, credited: Credited) -> None:
        """Add our columns to TRL's table of completions; TRL has added those of the rewards."""
        advantages = credited.credit.values_by_segment()
        columns = {
            "confidence": credited.scored.stated,
            **{f"{name}_advantage": each for name, each in advantages.items()},
        }
        for name, column in columns.items():
            self._logs["extra"][name].extend(column.flatten().tolist())

    def _group_size(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Replace TRL's advantages, ``[B]``, by token advantages, ``[B, T]``; TRL's loss takes both."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if "tool_mask" in output:
            raise ConfigError("rollout_func: env_mask is not supported; return the model's own tokens alone")
        ids, credited = output["completion_ids"], self._give_credit(output)
        scored = credited.scored
        self._log_columns(credited)
        advantages = credited.token_advantages[rows_of_process(len(ids), self.accelerator.process_index)].to(ids.device)
        output["advantages"] = pad(advantages, (0, ids.shape[1] - advantages.shape[1]))
        logged = values(rollout_metrics(credited))
        flags = torch.cat(gather_object([self._cut_off]))
        logged["response/cut_off_share"] = float(flags.double().mean())
        if not self.model.training:
            self._held_out = self._held_out_metrics(scored)
            self._metrics["eval"] |= {name: [value] for name, value in self._held_out.items()}
        else:
            logged |= self._sight_metrics(scored)
        for name, value in logged.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        if self.model.training:
            warning = self._health.after_step(self.state.global_step + 1, logged | self._held_out)
            self._held_out = {}
            if warning and self.args.process_index == 0:
                logger.warning(warning)
        return output

    def _sight_metrics(self, scored: Scored) -> dict[str, float]:
        """TRL draws each question once in an epoch, so those behind the first epoch were asked before."""
        epoch = self.state.epoch or 0.0
        seen = [epoch >= 1] * (len(scored.stated) // self._group_size())
        return values(sight_metrics(scored, seen)) | {TIMES_ASKED: max(1.0, epoch)}

    def _held_out_metrics(self, scored: Scored) -> dict[str, float]:
        """Of all questions of this evaluation so far: the mean of its batches' errors would not be their error."""
        if f"{HELD_OUT}/accuracy" not in self._metrics["eval"]:  # TRL empties them after each evaluation
            self._evaluated = []
        self._evaluated.append(torch.stack([scored.correct, scored.stated]).view(2, -1, self._group_size()))
        return values(gap_metrics(HELD_OUT, *torch.cat(self._evaluated, dim=1)))
