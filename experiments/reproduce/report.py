"""The report: every table as Markdown, CSV and, but for texts, picture, and a page with all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coca_mindspeed import __version__
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.evaluation.reports.plots import training_curves
from coca_mindspeed.utils.console import one_line
from coca_mindspeed.utils.files import write_atomically
from experiments.reproduce.by_question import by_question_table
from experiments.reproduce.claims import claims, claims_table, sequential_phases
from experiments.reproduce.comparisons import STARTED, comparison_table, comparisons, entries
from experiments.reproduce.pictures import dot_chart
from experiments.reproduce.plan import Plan
from experiments.reproduce.provenance import source_commit
from experiments.reproduce.results import Results, spread
from experiments.reproduce.table import Table, printed_table, write_table

_SAMPLES = 6  # questions of each data set that are shown
_LONGEST = 48  # characters of a response that are shown
_NOT_WRITTEN_DOWN = "a machine that was not written down"


def write_report(results: Results, plan: Plan, directory: Path, command: str) -> list[Table]:
    """Write all tables and ``README.md``, which includes them.

    Args:
        results: finished cells; what is not finished is named in the report.
        plan: the reproduction's.
        directory: of the report.
        command: the command line that made it.

    Returns:
        The tables.
    """
    tables = []
    if found := claims(results, plan):
        tables.append(claims_table(found))
    if started := claims(results, plan, STARTED):
        tables.append(claims_table(started, "claims_started", "The same, asked of a supervised start of ours and coca"))
    sections = [write_table(table, directory) for table in tables]
    for name in plan.settings:
        for comparison in comparisons(plan, name):
            numbers = entries(results, name, comparison)
            if numbers:
                tables.append(comparison_table(comparison, numbers))
                sections.append(write_table(tables[-1], directory, dot_chart(numbers)))
        if (pairs := by_question_table(results, plan, name)) is not None:
            tables.append(pairs)
            sections.append(write_table(pairs, directory))
        if seeds := results.seeds(name, "sequential"):
            tables.append(sequential_table(results, plan, name, seeds))
            curves = training_curves(
                {f"seed {seed}": results.training_rows(name, "sequential", seed) for seed in seeds}
            )
            sections.append(write_table(tables[-1], directory, curves))
        if (sample := samples_table(results, plan, name)) is not None:
            tables.append(sample)
            sections.append(write_table(sample, directory))
    head = f"# {plan.title}\n\n{_provenance(results, command)}\n{_taught(plan)}"
    write_atomically(directory / "README.md", "\n".join([head, *sections]))
    return tables


def sequential_table(results: Results, plan: Plan, setting: str, seeds: Sequence[int]) -> Table:
    """Training metrics of ``sequential`` at the ends of its stages."""
    phases = [sequential_phases(results, setting, seed) for seed in seeds]
    header = ("", "start", "after the accuracy stage", "after the confidence stage")
    labels = {
        "reward/confidence": "confidence reward",
        "reward/answer": "accuracy",
        "response/length": "response length in tokens",
        "response/answer_length": "answer length in tokens",
        "rollout/invalid_share": "share of invalid responses",
    }
    rows: list[tuple[str, ...]] = []
    csv_rows: list[tuple[str | float, ...]] = []
    for key, label in labels.items():
        over_seeds = [spread([phase[i][key] for phase in phases]) for i in range(3)]
        rows.append((label, *(f"{s.mean:.3f} ± {s.deviation:.3f}" for s in over_seeds)))
        csv_rows.append((key, *(value for s in over_seeds for value in (s.mean, s.deviation))))
    names = [f"{phase}_{what}" for phase in ("start", "accuracy", "confidence") for what in ("mean", "deviation")]
    return Table(
        f"{setting}_sequential_curves",
        f"{plan.settings[setting].title}: what sequential training does",
        "Means over ten training steps; mean and deviation over seeds. The curves show one stage after the other.",
        header,
        rows,
        ("metric", *names),
        csv_rows,
    )


def samples_table(results: Results, plan: Plan, setting: str) -> Table | None:
    """What the methods say to the same questions, at the first seed; degenerate outputs show here."""
    methods = [m for m in ("instruct", "rlvr", "sequential", "joint", "coca", STARTED) if results.seeds(setting, m)]
    seeds = results.seeds(setting, *methods) if methods else []
    if not seeds:
        return None
    said: dict[str, Mapping[tuple[str, str, int], Prediction]] = {
        m: {p.key: p for p in results.cells[setting, m, seeds[0]].predictions(results.output)} for m in methods
    }
    by_dataset: dict[str, list[tuple[str, str, int]]] = {}
    for key in said[methods[0]]:
        by_dataset.setdefault(key[0], []).append(key)
    keys = [keys[i * len(keys) // _SAMPLES] for keys in by_dataset.values() for i in range(min(_SAMPLES, len(keys)))]
    rows = [
        (
            one_line(said[m][key].question),
            m,
            _shortened(said[m][key].response),
            said[m][key].outcome,
        )
        for key in keys
        for m in methods
    ]
    return printed_table(
        f"{setting}_samples",
        f"{plan.settings[setting].title}: what the methods say",
        f"Evenly spaced held-out questions, seed {seeds[0]}; nothing was picked by hand.",
        ("question", "method", "response", "answer"),
        [tuple(f"`{cell}`" if i in (0, 2) else cell for i, cell in enumerate(row)) for row in rows],
        text=True,
    )


def _taught(plan: Plan) -> str:
    """What a reader would otherwise take for a property of the model."""
    return "".join(
        f"{setting.title}: what `instruct` states was taught by the format warm-up, independent of the question and "
        "mostly high (docs/training.md), so its over-confidence is no finding about the model.\n\n"
        for setting in plan.settings.values()
        if setting.real_world is not None
    )


def _shortened(text: str) -> str:
    shown = one_line(text).replace("`", "'")
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}… ({len(text)} characters)"


def _provenance(results: Results, command: str) -> str:
    summaries = results.summaries.values()
    seeds = sorted({seed for _, _, seed in results.summaries})
    minutes = sum(summary["seconds"] for summary in summaries) / 60
    sources = sorted({commit for summary in summaries for commit in summary.get("sources", ["unknown"])})
    machines = sorted({each for summary in summaries for each in summary.get("machines", [_NOT_WRITTEN_DOWN])})
    lines = [
        f"Made by `{command}` at commit `{source_commit()}` (version {__version__}).",
        f"Cells were run at {', '.join(f'`{commit}`' for commit in sources) or 'no commit yet'}"
        f"{' (`+`: with changes that were not committed)' if any(each.endswith('+') for each in sources) else ''}.",
        f"Seeds {', '.join(map(str, seeds)) or 'none'}; {len(summaries)} cells, {minutes:.0f} minutes of work in all"
        f"{''.join(f'; {each}' for each in machines)}.",
        "Figures are mean ± sample deviation over seeds, `(n = 4)` where fewer of the seeds have one; ↑: higher is "
        "better, ↓: lower is better; `--` is undefined. *ECE if calibrated* is what a calibrated model with the same "
        "confidences would show on as many questions: ECE near it cannot be told from calibration. The paper's figures "
        "have its own two decimals.",
    ]
    if results.unfinished:
        names = "; ".join(map(str, results.unfinished))
        lines.append(f"**Not finished yet, and so not in the tables:** {names}.")
    return "\n\n".join(lines) + "\n"
