"""Time of a training step, by running one."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.data.records import Record
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.verdict import MeasuredGrader
from coca_mindspeed.local.optimizer import build_optimizer
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import respond_and_grade
from coca_mindspeed.local.sampler import NoDistributionError
from coca_mindspeed.local.schedule import generator, records_of_step
from coca_mindspeed.local.update import NotFiniteError, update_policy
from coca_mindspeed.scoring.responses import credit_rule


class StepTime(NamedTuple):
    """Time of a step that was run.

    Attributes:
        clock: of ``rollout`` and ``update``: processor time on a CPU, else wall time.
        rollout: seconds of sampling and grading.
        update: seconds of the update.
        wall: seconds of wall time.
        load: processes that ran or waited for a CPU, a mean of one minute.
    """

    clock: Literal["processor", "wall"]
    rollout: float
    update: float
    wall: float
    load: float

    @property
    def seconds(self) -> float:
        return self.rollout + self.update


class _TimeLimitError(Exception):
    pass


def run_step(
    policy: Policy, config: RunConfig, train: Sequence[Record], grader: MeasuredGrader, limit: float
) -> StepTime | None:
    """Run the first training step on ``policy``; None if it takes longer than ``limit`` seconds of wall time.

    Nothing is written.  Raises TrainingError if the step fails.
    """
    device = policy.device
    optimizer, rollout = build_optimizer(policy, config.optimizer), config.rollout
    records = records_of_step(train, 0, rollout.prompts, config.seed)
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    wall, started = time.perf_counter(), clock()
    try:
        with _time_limit(limit):
            draw = generator(device, config.seed, "rollout", 0)
            graded = respond_and_grade(policy, records, grader, config.method, rollout, draw, rollout.group_size)
            graded.give_credit(credit_rule(config.method, 0))
            sampled = clock()
            update_policy(policy, graded, optimizer, config.optimizer.lr, config)
    except _TimeLimitError:
        return None
    except (NoDistributionError, NotFiniteError) as error:
        raise TrainingError(f"step 1: {error}") from error
    rates = sampled - started, clock() - sampled
    return StepTime("processor" if on_cpu else "wall", *rates, time.perf_counter() - wall, os.getloadavg()[0])


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeLimitError in the block after so much wall time."""

    def stop(*_: object) -> None:
        raise _TimeLimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
