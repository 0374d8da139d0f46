"""A step of this project on verl against one of verl's own GRPO: `python -m benchmarks.verl_step_against_grpo MODEL`.

Both are runs of the real verl without an accelerator, in turn: same weights, questions, group, updates and stand-ins.
verl's has its reward manager `naive` with a comparison of strings, and no KL term.  It runs in verl's environment.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from coca_mindspeed.files import write_json
from tests.integration.verl import loop, tiny

WARM_UP_STEPS = 3
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a warmed-up tiny model, such as runs/demo/warm_start")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/verl_step_against_grpo.json"))
    arguments = parser.parse_args()
    steps = arguments.steps + WARM_UP_STEPS
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "verl's": []}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tiny.widen_model(arguments.model.absolute(), directory / "model")
        tiny.write_questions(directory, "coca", train=32 * steps, evaluate=16)
        for number in range(arguments.rounds):
            for name, changes in (("ours", {}), ("verl's", VERLS_OWN)):
                runs[name].append(measure(directory, directory / f"{name[0]}{number}", steps, changes))
                print(name, json.dumps(runs[name][-1]), flush=True)
    best = {name: {key: min(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    write_json(arguments.output, {"runs": runs, "least": best})
    for key in best["verl's"]:
        ours, theirs = (best[name][key] for name in ("ours", "verl's"))
        print(f"| {key} | {ours:.3f} | {theirs:.3f} | {ours / theirs:.2f} |")
    print(f"coca/advantage_seconds, of adv: {best['ours']['coca/advantage_seconds']:.3f}")


def measure(directory: Path, run: Path, steps: int, changes: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a run's stages, processor seconds of a step over all its processes, and the machine's load."""
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
    processor = {done: _processor_seconds_after(started, run, done) for done in (WARM_UP_STEPS, steps - 1)}
    if started.wait():
        raise RuntimeError(loop.log_of(run)[-4000:])
    timed = [values for step, values in loop.metrics(run).items() if step > WARM_UP_STEPS]
    result = {stage: median(values[f"timing_s/{stage}"] for values in timed) for stage in STAGES}
    result["processor"] = (processor[steps - 1] - processor[WARM_UP_STEPS]) / (steps - 1 - WARM_UP_STEPS)
    if "coca/advantage_seconds" in timed[0]:
        result["coca/advantage_seconds"] = median(values["coca/advantage_seconds"] for values in timed)
    return {**result, "load": os.getloadavg()[0]}


def _processor_seconds_after(started: loop.Loop, run: Path, steps: int) -> float:
    """Of all processes of the run, when so many steps are done."""
    log = run / "metrics.jsonl"
    while started.running and (not log.is_file() or log.read_text().count("\n") < steps):
        time.sleep(0.02)
    return started.processor_seconds()


if __name__ == "__main__":
    main()
