"""A step of this project on verl against one of verl's own GRPO: `python -m benchmarks.verl_step_against_grpo MODEL`.

Both are runs of the real verl without an accelerator, in turn: same weights, questions, group, updates and stand-ins.
verl's has its reward manager `naive` with a comparison of strings, and no KL term.  It runs in verl's environment.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.loops_in_turn import WARM_UP_STEPS, Figures, in_turn, medians, options, processor_seconds_a_step, table
from tests.integration.verl import loop, tiny

STAGES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")
VERLS_OWN: dict[str, Any] = {
    "trainer__v1": {"trainer_mode": "sync"},
    "algorithm__adv_estimator": "grpo",
    "reward__reward_manager__name": "naive",
    "reward__custom_reward_function": {"path": str(Path(__file__).absolute()), "name": "exact_answer"},
}


def exact_answer(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """The reward function that verl's run is given: what follows the confidence is the answer, or is not."""
    return float(solution_str.rpartition("</confidence>")[2].strip() == ground_truth)


def main() -> None:
    arguments = options(str(__doc__), Path("runs/bench/verl_step_against_grpo.json"))
    steps = arguments.steps + WARM_UP_STEPS
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tiny.widen_model(arguments.model.absolute(), directory / "model")
        tiny.write_questions(directory, "coca", train=32 * steps, evaluate=16)
        ways = {"ours": {}, "verl's": VERLS_OWN}
        least = in_turn(
            {name: partial(measure, directory, name[0], steps, changes) for name, changes in ways.items()},
            arguments.rounds,
            arguments.output,
        )
    print("\n".join(table(least, "ours")))


def measure(directory: Path, name: str, steps: int, changes: dict[str, Any], number: int) -> Figures:
    """Median seconds of a run's stages, and processor seconds of a step over all its processes."""
    run = directory / f"{name}{number}"
    config = tiny.configuration(
        directory,
        run,
        data__train_batch_size=32,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=128,
        actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=256,
        trainer__total_training_steps=steps,
        trainer__rollout_data_dir=None,
        trainer__validation_data_dir=None,
        **changes,
    )
    started = loop.start(config)
    processor = processor_seconds_a_step(
        started.processor_seconds, lambda: _steps_done(run), lambda: started.running, steps
    )
    if started.wait():
        raise RuntimeError(loop.log_of(run)[-4000:])
    rows = [{key.removeprefix("timing_s/"): value for key, value in row.items()} for row in loop.metrics(run).values()]
    parts = [key for key in ("seconds/advantage",) if key in rows[-1]]  # of the stage adv
    return {**medians(rows, [*STAGES, *parts]), "processor": processor}


def _steps_done(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.is_file() else 0


if __name__ == "__main__":
    main()
