"""Write the report: README.md with all tables, a CSV file per table, and plots."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from coca_mindspeed import __version__
from coca_mindspeed.evaluation.plots import save_figure, training_curves
from coca_mindspeed.utils.console import markdown_table, one_line
from coca_mindspeed.utils.files import write_atomically
from experiments.reproduce.claims import LAST_STEPS, claims, claims_table, sequential_phases
from experiments.reproduce.discrimination import discrimination_tables, learning_curves
from experiments.reproduce.plan import Plan
from experiments.reproduce.provenance import source_commit
from experiments.reproduce.questions import how_often_asked
from experiments.reproduce.results import Results, spread
from experiments.reproduce.tables import (
    Table,
    comparison_table,
    comparisons,
    dot_chart,
    entries,
    interval_table,
    paired_tests_table,
)

_SAMPLES = 6  # questions per data set
_MAX_SAMPLE = 48  # characters of a response
_SEQUENTIAL = {
    "reward/confidence": "confidence reward",
    "reward/answer": "accuracy",
    "response/length": "response length in tokens",
    "response/answer_length": "answer length in tokens",
    "rollout/invalid_share": "share of invalid responses",
}


def write_report(results: Results, plan: Plan, directory: Path, command: str) -> list[Table]:
    """Write ``README.md``, ``TABLE.csv`` and plots; unfinished jobs are listed.

    Args:
        results: finished jobs.
        plan: the plan.
        directory: of the report.
        command: the command line, for the report.

    Returns:
        The tables.
    """
    found: list[tuple[Table, Figure | None]] = []
    if own := claims(results, plan):
        found.append((claims_table(own), None))
    for name in plan.settings:
        for comparison in comparisons(plan, name):
            if numbers := entries(results, name, comparison):
                make = interval_table if comparison.intervals else comparison_table
                found.append((make(comparison, numbers), dot_chart(numbers)))
        found += [(table, None) for table in discrimination_tables(results, plan, name)]
        if (curves := learning_curves(results, plan, name)) is not None:
            found.append(curves)
        if (tests := paired_tests_table(results, plan, name)) is not None:
            found.append((tests, None))
        if seeds := results.seeds(name, "sequential"):
            rows = {f"seed {seed}": results.training_rows(name, "sequential", seed) for seed in seeds}
            found.append((sequential_table(results, plan, name, seeds), training_curves(rows)))
        if (samples := samples_table(results, plan, name)) is not None:
            found.append((samples, None))
    sections = [f"# {plan.title}\n", _provenance(results, plan, command)]
    for table, figure in found:
        write_atomically(directory / f"{table.name}.csv", table.csv())
        plot = ""
        if figure is not None:
            save_figure(figure, directory / f"{table.name}.png")
            plot = f"![{table.title}]({table.name}.png)\n\n"
        text = markdown_table(table.header, table.rows)
        link = f"Full values: [{table.name}.csv]({table.name}.csv).\n"
        sections.append(f"## {table.title}\n\n{table.note}\n\n{text}\n{plot}{link}")
    write_atomically(directory / "README.md", "\n".join(sections))
    return [table for table, _ in found]


def sequential_table(results: Results, plan: Plan, setting: str, seeds: Sequence[int]) -> Table:
    """Training metrics of ``sequential`` at the ends of its stages."""
    phases = [sequential_phases(results, setting, seed) for seed in seeds]
    rows: list[tuple[str, ...]] = []
    csv_rows: list[tuple[str | float, ...]] = []
    for key, label in _SEQUENTIAL.items():
        over_seeds = [spread(phase[i][key] for phase in phases) for i in range(3)]
        rows.append((label, *(f"{s.mean:.3f} ± {s.deviation:.3f}" for s in over_seeds)))
        csv_rows.append((key, *(value for s in over_seeds for value in (s.mean, s.deviation))))
    names = [f"{phase}_{part}" for phase in ("start", "accuracy", "confidence") for part in ("mean", "deviation")]
    return Table(
        f"{setting}_sequential_curves",
        f"{plan.settings[setting].title}: sequential training",
        f"Means over {LAST_STEPS} training steps; mean ± deviation over seeds.",
        ("", "start", "after the accuracy stage", "after the confidence stage"),
        rows,
        ("metric", *names),
        csv_rows,
    )


def samples_table(results: Results, plan: Plan, setting: str) -> Table | None:
    """Responses of the methods to the same questions, at the first common seed."""
    methods = [m for m in ("instruct", "rlvr", "sequential", "joint", "coca") if results.seeds(setting, m)]
    seeds = results.seeds(setting, *methods) if methods else []
    if not seeds:
        return None
    predictions = {
        m: {p.key: p for p in results.jobs[setting, m, seeds[0]].predictions(results.output)} for m in methods
    }
    by_dataset: dict[str, list[tuple[str, str, int]]] = {}
    for key in predictions[methods[0]]:
        by_dataset.setdefault(key[0], []).append(key)
    keys = [keys[i * len(keys) // _SAMPLES] for keys in by_dataset.values() for i in range(min(_SAMPLES, len(keys)))]
    shown = [(m, predictions[m][key]) for key in keys for m in methods]
    return Table(
        f"{setting}_samples",
        f"{plan.settings[setting].title}: sample responses",
        f"Evenly spaced held-out questions, seed {seeds[0]}; not selected by hand.",
        ("question", "method", "response", "answer"),
        [(f"`{one_line(p.question)}`", m, f"`{_shorten(p.response)}`", p.outcome) for m, p in shown],
    )


def _shorten(text: str) -> str:
    shown = one_line(text).replace("`", "'")
    return shown if len(shown) <= _MAX_SAMPLE else f"{shown[:_MAX_SAMPLE]}… ({len(text)} characters)"


def _provenance(results: Results, plan: Plan, command: str) -> str:
    summaries = results.summaries.values()
    seeds = sorted({seed for _, _, seed in results.summaries})
    minutes = sum(summary["seconds"] for summary in summaries) / 60
    commits, machines = (
        sorted({each for summary in summaries for each in summary.get(key, ["unknown"])})
        for key in ("sources", "machines")
    )
    plus = " (`+`: with uncommitted changes)" if any(commit.endswith("+") for commit in commits) else ""
    lines = [
        f"Made by `{command}` at commit `{source_commit()}` (version {__version__}).",
        f"Jobs were run at {', '.join(f'`{commit}`' for commit in commits) or 'no commit yet'}{plus}.",
        f"Seeds {', '.join(map(str, seeds)) or 'none'}; {len(summaries)} jobs, {minutes:.0f} minutes of work in all"
        f"{''.join(f'; {each}' for each in machines)}.",
        "Figures are mean ± sample deviation over seeds, `(n = 4)` if only four seeds have one; ↑: higher is better, "
        "↓: lower is better; `--`: undefined. *ECE if calibrated* is the ECE under perfect calibration with the same "
        "confidences and number of questions; an ECE near it does not differ from calibration.",
        *(
            f"{setting.title}: the SFT warm-up taught `instruct` confidences that are mostly high and independent of "
            "the question (docs/troubleshooting.md). Its over-confidence is not a finding about the model."
            for setting in plan.settings.values()
            if setting.real_world is not None
        ),
    ]
    if asked := how_often_asked(plan, results.output):
        lines.append("\n".join(["Built-in questions:", "", *(f"- {each}" for each in asked)]))
    if results.unfinished:
        lines.append(f"**Not finished, and not in the tables:** {'; '.join(map(str, results.unfinished))}.")
    return "\n\n".join(lines) + "\n"
