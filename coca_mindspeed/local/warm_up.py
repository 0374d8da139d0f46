"""Supervised warm-up: a model learns the format of a response, and to be sure of everything.

The confidence that it is shown does not depend on the question, so nothing about calibration is taught here.  The
built-in tiny model learns to answer here as well; a model of one's own (:mod:`.format_warm_up`) can already.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from coca_mindspeed.algorithm.rewards import TrainingMethod
from coca_mindspeed.config.schema import WarmUpConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.imitation import Imitation, Layout, Lesson, encode_responses
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.schedule import derived_seed


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
