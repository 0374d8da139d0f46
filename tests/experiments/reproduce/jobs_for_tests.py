"""Finished cells made by hand."""

import json

from coca_mindspeed.evaluation.predictions import Prediction, prediction_to_json
from experiments.reproduce.plan import Plan, SettingPlan, jobs_of
from experiments.reproduce.results import collect

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


def _write(path, rows):
    """Plain writing: hundreds of files would wait for the disk otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def finish(output, cell, **metrics):
    """Write a cell's results: two data sets of math whose accuracies differ by 0.2, one of facts."""
    values = {"accuracy": 0.5, "auroc": 0.5, "ece": 0.3, "brier": 0.3, "tokens_to_confidence": 6.0, **metrics}
    directory = cell.directory(output)
    datasets = {
        "sums": {"category": "math", **values, "accuracy": values["accuracy"] - 0.1},
        "products": {"category": "math", **values, "accuracy": values["accuracy"] + 0.1, "auroc": None},
        "facts": {"category": "factual", **values},
    }
    response = "<confidence>0.50</confidence>4"
    said = [Prediction(str(i), "sums", f"{i}+1", response, 0.5, i == 3, 6) for i in range(9)]
    _write(directory / "predictions.jsonl", map(prediction_to_json, said))
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
        _write(directory / "run" / "metrics.jsonl", rows)
    summary = {"setting": cell.setting, "seed": cell.seed, "name": cell.name, "seconds": 60.0}
    _write(directory / "cell.json", [{**summary, "datasets": datasets} if cell.kind != "start" else summary])


def finished(output, seeds=3, **by_method):
    """All cells of :data:`PLAN`; ``by_method[name][seed]`` replaces metrics."""
    cells = jobs_of(PLAN, range(seeds))
    for cell in cells:
        finish(output, cell, **by_method.get(cell.name, [{}] * seeds)[cell.seed])
    return collect(output, cells)
