"""Finished cells made by hand."""

from pathlib import Path

from coca_mindspeed.evaluation.predictions import Prediction, write_predictions
from coca_mindspeed.files import write_json, write_json_lines
from coca_mindspeed.reproduce.cells import Cell, cells_of
from coca_mindspeed.reproduce.plan import Plan, SettingPlan
from coca_mindspeed.reproduce.results import Results, collect

PLAN = Plan(
    title="By hand",
    settings={
        "short": SettingPlan(
            title="Short answers",
            run="demo",
            trained={
                "rlvr": ["method=rlvr"],
                "coca": ["method=coca"],
                "joint": ["method=joint"],
                "sequential": ["method=sequential"],
                "rlcr": ["method=rlcr"],
            },
            baselines=["instruct", "majority_voting"],
        )
    },
)


def finish(output: Path, cell: Cell, **metrics: float | None) -> None:
    """Write a cell's results: two data sets of math whose accuracies differ by 0.2, one of facts."""
    values = {"accuracy": 0.5, "auroc": 0.5, "ece": 0.3, "brier": 0.3, "tokens_to_confidence": 6.0, **metrics}
    directory = cell.directory(output)
    datasets = {
        "sums": {"category": "math", **values, "accuracy": values["accuracy"] - 0.1},
        "products": {"category": "math", **values, "accuracy": values["accuracy"] + 0.1, "auroc": None},
        "facts": {"category": "factual", **values},
    }
    write_predictions(
        directory / "predictions.jsonl",
        [
            Prediction(str(i), "sums", f"{i}+1", f"<confidence>0.50</confidence>{i}", 0.5, i % 2 == 0, 6)
            for i in range(9)
        ],
    )
    if cell.name == "sequential":
        rows = []
        for step in range(1, 61):
            second = step > 30
            rows.append(
                {
                    "step": step,
                    "stage": float(second),
                    "reward/confidence": -0.1 if second else -0.4,
                    "reward/answer": 0.2 if second else 0.6,
                    "response/length": 5.0 if second else 10.0,
                    "response/answer_length": 1.0 if second else 4.0,
                    "rollout/invalid_share": 0.0,
                }
            )
        write_json_lines(directory / "run" / "metrics.jsonl", rows)
    summary = {"setting": cell.setting, "seed": cell.seed, "name": cell.name, "seconds": 60.0}
    write_json(directory / "cell.json", {**summary, "datasets": datasets} if cell.kind != "start" else summary)


def finished(output: Path, seeds: int = 3, **by_method: list[dict[str, float | None]]) -> Results:
    """All cells of :data:`PLAN`; ``by_method[name][seed]`` replaces metrics."""
    cells = cells_of(PLAN, range(seeds))
    for cell in cells:
        finish(output, cell, **by_method.get(cell.name, [{}] * seeds)[cell.seed])
    return collect(output, cells)
