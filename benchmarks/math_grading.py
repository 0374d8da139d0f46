"""Throughput and accuracy of math grading, next to MindSpeed-RL's own graders in the same run.

``python -m benchmarks.math_grading [--answers 768] [--bombs 10000] [--output FILE]``

MindSpeed-RL's graders are measured where ``MINDSPEED_RL_HOME`` names a checkout and what they import is installed
(``mathruler``, ``latex2sympy2==1.5.4``, ``word2number``); nothing of that checkout is copied or changed.  Only its
grading modules are loaded: the logger and the profiler that they import, which need an NPU, are stood in for.
"""

import argparse
import importlib
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grading_answers import Item, make_items
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.math.equal import compare
from coca_mindspeed.grading.math.extract import final_answer
from coca_mindspeed.grading.math.grader import MathGrader
from coca_mindspeed.grading.math.normalise import read_answer
from coca_mindspeed.grading.math.plain import verdict_without_algebra
from coca_mindspeed.utils.json_files import write_json

_SHOWN_ALONE = 10  # answers that one grader alone accepts


def records_of(items: Sequence[Item]) -> list[Record]:
    return [Record(str(n), "benchmark", "math", "?", item.gold) for n, item in enumerate(items)]


def measure(name: str, grade: Callable[[Sequence[Item]], list[bool]], items: Sequence[Item]) -> dict[str, Any]:
    grade(items[:8])  # start workers and caches
    started = time.perf_counter()
    verdicts = grade(items)
    seconds = time.perf_counter() - started
    return {
        "grader": name,
        "answers": len(items),
        "milliseconds_per_answer": round(1e3 * seconds / len(items), 3),
        "right_verdicts": sum(found is item.right for found, item in zip(verdicts, items, strict=True)),
        "false_accepts": sum(found and not item.right for found, item in zip(verdicts, items, strict=True)),
        "false_rejects": sum(bool(item.right) and not found for found, item in zip(verdicts, items, strict=True)),
        "accepted": [place for place, accepted in enumerate(verdicts) if accepted],
    }


def accepted_alone(rows: Sequence[dict[str, Any]], items: Sequence[Item]) -> dict[str, list[Item]]:
    """The items that a grader accepts and no other grader does, by the grader's name."""
    accepted = {row["grader"]: {*row["accepted"]} for row in rows}
    return {
        name: [items[n] for n in sorted(places.difference(*(accepted[other] for other in accepted if other != name)))]
        for name, places in accepted.items()
    }


def processor_milliseconds(items: Sequence[Item]) -> dict[str, list[float]]:
    """Processor time of each answer, in this process, by whether it takes algebra."""
    compare((r"x^2+\frac{1}{2}", r"\sqrt{2}"))  # imports
    found: dict[str, list[float]] = {"without algebra": [], "algebra": []}
    for item in items:
        started = time.process_time()
        gold, answer = read_answer(item.gold), read_answer(final_answer(item.response) or "")
        kind = "without algebra" if verdict_without_algebra(gold, answer) else "algebra"
        if kind == "algebra":
            compare((gold.body, answer.body))
        found[kind].append(1e3 * (time.process_time() - started))
    return found


def ours(items: Sequence[Item], grader: MathGrader) -> list[bool]:
    verdicts = grader.grade(records_of(items), [item.response for item in items])
    return [verdict.correct for verdict in verdicts]


def load_mindspeed_rl(home: Path) -> Any:
    """MindSpeed-RL's ``rule_verifier`` module, without the rest of the package, which needs an NPU."""
    sys.path.insert(0, str(home))
    for name in ("mindspeed_rl", "mindspeed_rl.models", "mindspeed_rl.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(home / name.replace(".", "/"))]
        sys.modules[name] = package
    loggers = types.ModuleType("mindspeed_rl.utils.loggers")
    loggers.Loggers = _Silent  # type: ignore[attr-defined]
    profiler = types.ModuleType("mindspeed_rl.utils.utils")
    profiler.mstx_timer_decorator = lambda function: function  # type: ignore[attr-defined]
    sys.modules |= {loggers.__name__: loggers, profiler.__name__: profiler}
    return importlib.import_module("mindspeed_rl.models.rule_verifier")


class _Silent:
    def __init__(self, *_: object) -> None:
        pass

    def info(self, *_: object) -> None:
        pass


def mindspeed_rl_graders() -> dict[str, Callable[[Sequence[Item]], list[bool]]] | str:
    """Their graders by name, or why there are none."""
    home = os.environ.get("MINDSPEED_RL_HOME")
    if not home:
        return "MINDSPEED_RL_HOME is not set"
    try:
        module = load_mindspeed_rl(Path(home))
    except ImportError as error:
        return f"MindSpeed-RL's graders cannot be imported: {error}"

    def grade(function: Any, tagged: bool) -> Callable[[Sequence[Item]], list[bool]]:
        def run(items: Sequence[Item]) -> list[bool]:
            scores = function([i.tagged if tagged else i.response for i in items], [i.gold for i in items])
            return [score > 0 for score in scores]

        return run

    return {
        "MindSpeed-RL accuracy_reward": grade(module.accuracy_reward, tagged=False),
        "MindSpeed-RL math_17k_acc": grade(module.math_17k_accuracy_reward, tagged=False),
        "MindSpeed-RL math_verify, tagged": grade(module.math_verify_accuracy_reward, tagged=True),
        "MindSpeed-RL math_verify": grade(module.math_verify_accuracy_reward, tagged=False),
    }


def resident_mib() -> float:
    """Resident memory of this process and its children."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(process.name) == os.getpid() or int(fields[1]) == os.getpid():
                total += int((process / "statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def endure(count: int, seed: int, seconds: float) -> dict[str, Any]:
    """Grade ``count`` answers, one in a hundred a bomb, and watch order and memory."""
    items = make_items(count, seed, bomb_share=0.01)
    grader = MathGrader(seconds=seconds)
    memory = []
    wrong = 0
    started = time.perf_counter()
    batch = max(1, count // 20)
    for start in range(0, count, batch):
        part = items[start : start + batch]
        wrong += sum(found is not bool(item.right) for found, item in zip(ours(part, grader), part, strict=True))
        memory.append(round(resident_mib()))
    total = time.perf_counter() - started
    metrics = grader.metrics()
    grader.close()
    return {
        "answers": count,
        "bombs": sum(item.right is None for item in items),
        "limit_seconds": seconds,
        "seconds": round(total, 1),
        "verdicts_out_of_place": wrong,
        "timeouts": metrics["timeouts"],
        "restarts": metrics["restarts"],
        "resident_mib_after_each_twentieth": memory,
    }


def compare_graders(items: Sequence[Item]) -> tuple[list[dict[str, Any]], str]:
    """One row for each grader, and why MindSpeed-RL's are missing or ``""``."""
    grader = MathGrader()
    rows = [measure("coca_mindspeed", lambda part: ours(part, grader), items)]
    grader.close()
    others = mindspeed_rl_graders()
    if isinstance(others, str):
        return rows, others
    return rows + [measure(name, grade, items) for name, grade in others.items()], ""


def run(rounds: int) -> dict[str, float]:
    """For ``make bench``: milliseconds an answer, and the share of right verdicts, of each grader."""
    rows, _ = compare_graders(make_items(76 * rounds, seed=0))
    return {
        f"{row['grader']}: {what}": value
        for row in rows
        for what, value in (
            ("ms an answer", row["milliseconds_per_answer"]),
            ("right verdicts", row["right_verdicts"] / row["answers"]),
        )
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=768)
    parser.add_argument("--bombs", type=int, default=0, metavar="N", help="also grade N answers, 1%% of them bombs")
    parser.add_argument("--seconds", type=float, default=5.0, help="limit for one answer in the run with bombs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    items = make_items(options.answers, options.seed)
    for kind, milliseconds in processor_milliseconds(items).items():
        median = statistics.median(milliseconds)
        print(f"{kind}: {len(milliseconds)} answers, median {median:.3f} ms of processor time")
    rows, missing = compare_graders(items)
    if missing:
        print(f"not measured: MindSpeed-RL's own graders ({missing})")
    for row in rows:
        print(
            f"{row['grader']:34} {row['milliseconds_per_answer']:8.3f} ms an answer, {row['right_verdicts']} of "
            f"{row['answers']} right, {row['false_accepts']} false accepts, {row['false_rejects']} false rejects"
        )
    for name, alone in accepted_alone(rows, items).items() if len(rows) > 1 else ():
        wrong = [item for item in alone if not item.right]
        print(f"{name}: accepts {len(alone)} alone, {len(wrong)} of them wrong")
        for item in (wrong + [item for item in alone if item.right])[:_SHOWN_ALONE]:
            print(f"    {'right' if item.right else 'wrong'}: gold {item.gold}, answer {final_answer(item.response)}")
    result: dict[str, Any] = {"seed": options.seed, "graders": rows}
    if options.bombs:
        result["with_bombs"] = endure(options.bombs, options.seed, options.seconds)
        print(result["with_bombs"])
    if options.output:
        write_json(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
