"""Supervised warm-up: a model learns the format of a response, and to be sure of everything.

The confidence that it is shown does not depend on the question, so nothing about calibration is taught here.  The
built-in tiny model learns to answer here as well; a model of one's own (:mod:`.format_warm_up`) can already.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from coca_mindspeed.algorithm.rewards import TrainingMethod
from coca_mindspeed.config.schema import RunConfig, WarmUpConfig
from coca_mindspeed.data.records import Record, read_records
from coca_mindspeed.errors import DataError
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.schedule import derived_seed
from coca_mindspeed.local.sft import Imitation, Layout, Lesson, encode_responses, learned_once, tokens_of_a_pass


def warm_up(
    policy: Policy,
    records: Sequence[Record],
    method: TrainingMethod,
    config: WarmUpConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train the tiny ``policy`` in place to imitate over-confident responses, which it writes without spaces.

    Args:
        policy: the model to teach.
        records: questions with their answers.
        method: says where the confidence stands.
        config: see :class:`WarmUpConfig`.
        seed: draws questions, wrong digits and confidences.
        progress: called after each step with the steps done and the loss in nats a token.
    """
    lessons = overconfident_lessons(policy, records, method, Layout(method.confidence_position), config)
    lessons.run(policy, warm_up_random(seed), progress)


def warm_up_random(seed: int) -> np.random.Generator:
    """What draws a warm-up's lessons."""
    return np.random.default_rng(derived_seed(seed, "warm-up"))


def overconfident_lessons(
    policy: Policy,
    records: Sequence[Record],
    method: TrainingMethod,
    layout: Layout,
    config: WarmUpConfig,
    optimizer_name: Literal["adamw", "adamw_8bit"] = "adamw",
    microbatch_tokens: int | None = None,
) -> Imitation:
    """The warm-up, as a stage of supervised training; its last arguments are those of :class:`Imitation`."""

    def lessons(random: np.random.Generator) -> list[Lesson]:
        chosen = [records[i] for i in random.integers(len(records), size=config.batch)]
        texts = [_overconfident_response(record.answer, layout, config, random) for record in chosen]
        return list(map(Lesson, chosen, encode_responses(policy, texts)))

    return Imitation(
        lessons,
        method.system_prompt,
        config.steps,
        config.lr,
        config.question_weight,
        optimizer_name=optimizer_name,
        microbatch_tokens=microbatch_tokens,
    )


def _overconfident_response(answer: str, layout: Layout, config: WarmUpConfig, random: np.random.Generator) -> str:
    if random.random() < config.wrong_answers:
        places = [i for i, character in enumerate(answer) if character.isdecimal()]
        place = places[int(random.integers(len(places)))]
        wrong = (int(answer[place]) + int(random.integers(1, 10))) % 10
        answer = f"{answer[:place]}{wrong}{answer[place + 1 :]}"
    confidence = random.uniform(0.9, 1.0) if random.random() < config.overconfident else random.random()
    return layout.response(confidence, answer)


WARMED_UP, CHECKPOINTS = "warm_start", "warm_up"  # within a run's directory
_DECIMALS = 2  # where the method asks for no number of them


def read_warm_up_records(config: RunConfig) -> list[Record]:
    """The records of ``warm_up.records``; none where it is not set.

    Raises:
        DataError: the file cannot be read or holds none, or an answer cannot be shown as a response.
    """
    if config.warm_up.records is None:
        return []
    records = list(read_records(Path(config.warm_up.records)))
    if not records:
        raise DataError(f"warm_up.records={config.warm_up.records}: holds no records")
    for record in records:
        where = f"warm_up.records={config.warm_up.records}: record {record.id!r} of {record.dataset}"
        if not record.answer.strip():
            raise DataError(f"{where} has no answer to show")
        if config.warm_up.wrong_answers and not any(character.isdecimal() for character in record.answer):
            raise DataError(
                f"{where}: warm_up.wrong_answers={config.warm_up.wrong_answers:g} changes a digit, and its answer "
                f"{record.answer!r:.80} has none; set warm_up.wrong_answers=0"
            )
    return records


def teach_format(
    policy: Policy, records: Sequence[Record], config: RunConfig, output: Path, *, show_progress: bool
) -> Policy:
    """The policy after the warm-up, which is also exported to ``output/warm_start``.

    Where adapters are trained, they learn the format too; see :func:`.imitation.learned_once`.

    Args:
        policy: as loaded from ``model.path``, with adapters where they are what is trained; it is trained in place.
        records: from :func:`read_warm_up_records`.
        config: the run's.
        output: the run's directory; it may hold this warm-up, finished or stopped.
        show_progress: draw a progress bar.

    Raises:
        DataError: an answer is longer than ``rollout.max_new_tokens``.
        InterruptedRunError: Ctrl-C or SIGTERM; the warm-up is saved as far as it came.
    """
    checkpoints = output / CHECKPOINTS

    def learn() -> None:
        method = config.method.training_method
        layout = Layout(method.confidence_position, config.method.confidence_decimals or _DECIMALS, spaced=True)
        _check_lengths(policy, records, layout, config.rollout.max_new_tokens)
        lessons = overconfident_lessons(
            policy, records, method, layout, config.warm_up, config.optimizer.name, tokens_of_a_pass(config)
        )
        lessons.run_resumably(
            policy,
            warm_up_random(config.seed),
            checkpoints,
            config.model,
            config.checkpoint.interval,
            stage="warm-up",
            show_progress=show_progress,
        )

    return learned_once(policy, learn, output / WARMED_UP, checkpoints, config.model, where="warm start")


def _check_lengths(policy: Policy, records: Sequence[Record], layout: Layout, most: int) -> None:
    responses = encode_responses(policy, [layout.response(0.0, record.answer) for record in records])
    for record, response in zip(records, responses, strict=True):
        if len(response) > most:
            raise DataError(
                f"record {record.id!r} of {record.dataset}: its answer with a confidence has {len(response)} tokens, "
                f"and rollout.max_new_tokens={most} would cut it off; the warm-up must not teach what cannot be said"
            )
