"""The paper's claims, each as a number for each seed and a bound that its mean has to be above."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from coca_mindspeed.evaluation.intervals.bounds import Interval
from coca_mindspeed.evaluation.metrics.specs import UNDEFINED, metric_spec
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.results import Results, holm, mean_differs, mean_interval, spread
from coca_mindspeed.reproduce.table import Table

# Student's t of fewer has tails in which no difference of this size is seen once dozens of claims share the error.
_SEEDS_TO_DECIDE = 4
# Rows of metrics.jsonl that are averaged at the end of a stage: single steps are noisy.
LAST_STEPS = 10


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        text: what is claimed, and what the values are.
        values: one for each seed, larger is better for the claim; NaN where undefined.
        bound: the claim holds where the mean is above it.
        most: the largest possible value; an interval ends there.
        exact: whether seeds that agree do so because they cannot differ, as a count of tokens may, and not by chance.
    """

    text: str
    values: Sequence[float]
    bound: float = 0.0
    most: float = math.inf
    exact: bool = False

    def interval(self, level: float = 0.95) -> Interval:
        """Student's t interval of the mean, within what is possible."""
        found = mean_interval(self.values, level, exact=self.exact)
        return found if math.isnan(found.high) else replace(found, high=min(found.high, self.most))

    @property
    def p(self) -> float:
        """Two-sided p of the mean being the bound."""
        return mean_differs(self.values, self.bound, exact=self.exact)

    def verdict(self, p: float | None = None, threshold: float = 0.05) -> str:
        """``holds`` or ``does not hold`` where p tells the mean from the bound, otherwise ``not decided``.

        Args:
            p: corrected for the number of claims; the claim's own by default.
            threshold: of p.
        """
        p, of = self.p if p is None else p, spread(self.values)
        if not of.values:
            return "no figures"
        if math.isnan(p) or p >= threshold:
            return "not decided"
        return "holds" if of.mean > self.bound else "does not hold"


def claims(results: Results, plan: Plan, of: str = "coca") -> list[Claim]:
    """Every claim of the paper that the finished cells speak of, held or not.

    Args:
        results: finished cells.
        plan: the reproduction's.
        of: the method that is the paper's; another, of which the same is asked.
    """
    found: list[Claim] = []
    for setting, own in plan.settings.items():
        present = {*own.trained, *own.baselines}
        paired = _Paired(results, setting)
        where = own.title.lower()
        if of in present:
            found += _claims_of(of, present, paired, results.categories(setting), where)
        if of == "coca" and "sequential" in present:
            found += sequential_claims(results, setting, where)
    return found


def _claims_of(
    method: str, present: Collection[str], paired: "_Paired", categories: Sequence[str], where: str
) -> list[Claim]:
    found: list[Claim] = []
    for category in categories:
        for rival in ("instruct", "rlvr", "joint"):
            for metric in ("ece", "brier", "auroc") if rival != "joint" else ("ece",):
                if rival in present:
                    found.append(paired.better(method, rival, metric, category, where))
        if "rlvr" in present:
            accuracy = paired.differences(method, "rlvr", "accuracy", category)
            text = f"{where}, {category}: {method} keeps accuracy within 2 points of rlvr (difference)"
            found.append(Claim(text, accuracy, -0.02))
    for rival in ("majority_voting", "rlcr"):
        for category in categories[:1] if rival in present else ():  # the trained one
            saved = paired.over_seeds(
                method, rival, "tokens_to_confidence", category, lambda ours, its: _share_lost(its, ours)
            )
            text = f"{where}: {method}'s TTC is at least 92% below {rival}'s (share saved)"
            found.append(Claim(text, saved, 0.92, most=1.0, exact=True))
    return found


def sequential_claims(results: Results, setting: str, where: str) -> list[Claim]:
    """Reward hacking: in the second stage the confidence reward rises while accuracy is lost."""
    phases = [sequential_phases(results, setting, seed) for seed in results.seeds(setting, "sequential")]
    lost = [_share_lost(before["reward/answer"], after["reward/answer"]) for _, before, after in phases]
    gained = [after["reward/confidence"] - before["reward/confidence"] for _, before, after in phases]
    shorter = [_share_lost(before["response/length"], after["response/length"]) for _, before, after in phases]
    return [
        Claim(f"{where}: sequential loses at least half its accuracy in its second stage (share lost)", lost, 0.5, 1.0),
        Claim(f"{where}: sequential's confidence reward rises in its second stage (difference)", gained),
        Claim(
            f"{where}: sequential's responses get shorter in its second stage (share of the length)", shorter, most=1.0
        ),
    ]


def _share_lost(before: float, after: float) -> float:
    """By what share ``before`` fell; NaN where there was nothing to lose."""
    return 1 - after / before if before else math.nan


def sequential_phases(results: Results, setting: str, seed: int) -> list[dict[str, float]]:
    """Means of the training metrics at the start, at the end of the first stage and at the end of the second."""
    rows = results.training_rows(setting, "sequential", seed)
    stages = [[row for row in rows if row["stage"] == stage] for stage in (0, 1)]
    parts = [stages[0][:LAST_STEPS], stages[0][-LAST_STEPS:], stages[1][-LAST_STEPS:]]
    names = ("reward/confidence", "reward/answer", "response/length", "response/answer_length", "rollout/invalid_share")
    return [{name: spread([_defined(row[name]) for row in part]).mean for name in names} for part in parts]


def _defined(value: float | None) -> float:
    """NaN is null in JSON."""
    return math.nan if value is None else value


def claims_table(found: Sequence[Claim], name: str = "claims", title: str = "The paper's claims") -> Table:
    """Claims with their intervals and verdicts, alone and corrected for their number."""
    alone = [claim.p for claim in found]
    corrected = holm(alone)
    rows, csv_rows = [], []
    for claim, p, p_holm in zip(found, alone, corrected, strict=True):
        interval, values = claim.interval(), spread(claim.values).values
        bounds = UNDEFINED if math.isnan(interval.low) else f"{interval.low:+.3f} to {interval.high:+.3f}"
        mean = UNDEFINED if math.isnan(interval.estimate) else f"{interval.estimate:+.3f}"
        above = sum(value > claim.bound for value in values)
        verdicts = (claim.verdict(p), claim.verdict(p_holm))
        shown = (f"{claim.bound:+.2f}", f"{above} of {len(values)}", _shown_p(p), _shown_p(p_holm))
        rows.append((claim.text, mean, bounds, *shown, *verdicts))
        numbers = (interval.estimate, interval.low, interval.high, claim.bound, float(above), float(len(values)))
        csv_rows.append((claim.text, *numbers, p, p_holm, *verdicts))
    counted = sum(not math.isnan(p) for p in alone)
    note = (
        "Paired over seeds: each value compares two methods that share weights and questions, and the warm-up where "
        "they state their confidence in the same place, over the data sets on which both have the metric; interval and "
        "p are Student's t, p two-sided for a mean that is the bound. A claim is *not decided* where p is .05 or more, "
        "or undefined: with one seed, or with seeds that all agree where that can be chance. "
        f"The last column corrects for the {counted} claims of this table (Holm): of verdicts that are decided there, "
        "one or more is wrong at most once in twenty reproductions. Read that column; the one before it is each claim "
        "taken alone. That holds for a number of seeds fixed beforehand, and for these held-out questions, which all "
        "seeds share. ECE has a floor that differs between methods (*ECE if calibrated*), which Brier has not."
    )
    seeds = max((len(spread(claim.values).values) for claim in found), default=0)
    if seeds < _SEEDS_TO_DECIDE:
        note += (
            f" **With {seeds} {'seed' if seeds == 1 else 'seeds'} the corrected column can hardly decide anything**; "
            "what such a number can tell, the tables question by question say."
        )
    header = ("claim", "mean", "95% interval", "has to be above", "seeds above", "p", "p (Holm)", "alone", "corrected")
    csv_header = ("claim", "mean", "low", "high", "bound", "seeds_above", "seeds", "p", "p_holm", "alone", "corrected")
    return Table(name, title, note, header, rows, csv_header, csv_rows)


def _shown_p(p: float) -> str:
    if math.isnan(p):
        return UNDEFINED
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


@dataclass(frozen=True)
class _Paired:
    results: Results
    setting: str

    def over_seeds(
        self, method: str, rival: str, metric: str, category: str, of: Callable[[float, float], float]
    ) -> list[float]:
        seeds = self.results.seeds(self.setting, method, rival)
        return [of(*self.results.pair(self.setting, method, rival, seed, category, metric)) for seed in seeds]

    def differences(self, method: str, rival: str, metric: str, category: str) -> list[float]:
        return self.over_seeds(method, rival, metric, category, lambda ours, its: ours - its)

    def better(self, method: str, rival: str, metric: str, category: str, where: str) -> Claim:
        info = metric_spec(metric)
        word = "higher" if info.better > 0 else "lower"
        values = [info.better * d for d in self.differences(method, rival, metric, category)]
        return Claim(f"{where}, {category}: {method} has a {word} {info.label} than {rival} (by)", values)
