"""The report of ``coca-router route``: tables, the policy as YAML, and a plot of cost against quality."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coca_mindspeed.evaluation.intervals.bounds import Interval
from coca_mindspeed.evaluation.reports.plots import line_style, new_figure, plot_text, tidy
from coca_mindspeed.utils.console import one_line
from coca_mindspeed.utils.markdown import markdown_table
from coca_router.config import bands_from, tiers_yaml
from coca_router.replay import GAPS, PolicyOutcome, Routed, Setting, Tiers, upper_hull

NOTE = (
    "AIQ: mean share of right answers over the costs from the cheapest tier's to the most expensive's. Calls: share of "
    "questions sent to the last tier to close the given part of the gap between the first tier and the last. Cost: of "
    "closing it, as a share of the last tier's cost. In brackets: 95% bootstrap intervals over questions."
)


def routing_table(routers: Sequence[Routed]) -> str:
    """The scores of each router, in Markdown."""
    header = ["router", "AIQ", *(f"{name}, {gap:.0%} of the gap" for name in ("calls", "cost") for gap in GAPS)]
    return markdown_table(header, [[r.name, *map(_shown, r.intervals.values())] for r in routers])


def tier_table(tiers: Tiers) -> str:
    """Each tier alone, in Markdown."""
    rows = [
        [name, f"{tiers.correct[i].mean():.3f}", f"{tiers.whole[i].mean():.4g}", f"{tiers.opening[i].mean():.4g}"]
        for i, name in enumerate(tiers.names)
    ]
    return markdown_table(["tier", "right", "cost of an answer", "cost of a confidence"], rows)


def policy_sentence(name: str, outcome: PolicyOutcome) -> str:
    error = "" if math.isnan(outcome.error) else f", of which {outcome.error:.1%} wrong"
    ended = ", ".join(f"{tier} {share:.1%}" for tier, share in outcome.stopped_at.items())
    return (
        f"{name}: {outcome.answered:.1%} answered{error}; {outcome.quality:.1%} of all right at a mean cost of "
        f"{outcome.cost:.4g}; ended at {ended}."
    )


def share_sentence(setting: Setting) -> str:
    at = f"{setting.threshold:.6g}"
    return (
        f"Answer from confidence {at} on: {setting.share:.1%} of the questions (95% interval {setting.low:.1%} to "
        f"{setting.high:.1%}) reach the last tier; {setting.quality:.1%} of all right at a mean cost of "
        f"{setting.cost:.4g}. Clients may choose this threshold by the model name coca@{at}."
    )


def policy_yaml(tiers: Tiers, setting: Setting) -> str:
    """A configuration of `serve` with the setting; addresses and names of models are placeholders."""
    names = ["small", "large"] if len(tiers.names) == 2 else [f"tier{i + 1}" for i in range(len(tiers.names))]
    notes = "".join(f"# {name}: {one_line(file)}\n" for name, file in zip(names, tiers.names, strict=True))
    notes += "# replace url and model by those of the servers; dialect: vllm for vLLM and serve --model\n"
    urls = {name: {"url": f"http://127.0.0.1:{8001 + i}/v1", "model": name} for i, name in enumerate(names)}
    keys: dict[str, dict[str, Any]] = {name: bands_from(setting.threshold, "escalate") for name in names}
    keys[names[-1]] = {"bands": [{"at_least": 0.0, "action": "answer"}], "invalid": "answer"}
    if np.isnan(tiers.confidence[-1]).all():
        keys[names[-1]] = {"states_confidence": False}
    return notes + tiers_yaml(keys, backends=urls)


def _shown(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return "--"
    return f"{interval.estimate:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def routing_figure(tiers: Tiers, routers: Sequence[Routed], policy: PolicyOutcome | None = None) -> Figure:
    """Share of right answers against mean cost; lines mix two settings at random."""
    figure, [[axes]] = new_figure(1, 1, (7.5, 5.0))
    quality, cost = tiers.correct.mean(axis=1), tiers.whole.mean(axis=1)
    for index, router in enumerate(routers):
        x, y = upper_hull(router.cost, router.quality)
        style = {**line_style(index), "markevery": max(1, len(x) // 8), "markersize": 5}
        axes.plot(x, y, **style, label=plot_text(router.name))
    for name, q, c in zip(tiers.names, quality, cost, strict=True):
        axes.annotate(plot_text(name), (c, q), (4, -10), textcoords="offset points", fontsize=8)
    if policy is not None:
        axes.plot(
            [policy.cost], [policy.quality], marker="*", markersize=12, color="black", linestyle="none", label="policy"
        )
    tidy(axes, xlabel="mean cost of a question", ylabel="share of right answers")
    axes.legend(fontsize=8)
    return figure
