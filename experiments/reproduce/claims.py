"""The paper's claims, each as a value per seed and a bound for its mean."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from coca_mindspeed.evaluation.intervals import Interval
from coca_mindspeed.evaluation.metrics import METRIC_SPECS, UNDEFINED
from experiments.reproduce.plan import Plan
from experiments.reproduce.results import Results, holm, mean_differs, mean_interval, spread
from experiments.reproduce.tables import Table

_MIN_SEEDS = 4  # with fewer, Student's t decides hardly any claim after the correction
LAST_STEPS = 10  # rows of metrics.jsonl that are averaged at the end of a stage


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        text: the claim and the meaning of its values.
        values: one per seed, larger is better; NaN where undefined.
        bound: the claim holds if the mean is above it.
        most: the largest possible value.
        exact: equal values are no coincidence; see :func:`mean_interval`.
    """

    text: str
    values: Sequence[float]
    bound: float = 0.0
    most: float = math.inf
    exact: bool = False

    def interval(self, level: float = 0.95) -> Interval:
        """Student's t interval of the mean, up to the largest possible value."""
        found = mean_interval(self.values, level, exact=self.exact)
        return found if math.isnan(found.high) else replace(found, high=min(found.high, self.most))

    @property
    def p(self) -> float:
        """Two-sided p that the mean is the bound."""
        return mean_differs(self.values, self.bound, exact=self.exact)

    def verdict(self, p: float | None = None, threshold: float = 0.05) -> str:
        """``holds``, ``does not hold``, ``not decided`` or ``no figures``, by the corrected ``p`` or its own."""
        p, of = self.p if p is None else p, spread(self.values)
        if not of.values:
            return "no figures"
        if math.isnan(p) or p >= threshold:
            return "not decided"
        return "holds" if of.mean > self.bound else "does not hold"


def claims(results: Results, plan: Plan) -> list[Claim]:
    """All claims of the paper about which there are finished jobs."""
    found: list[Claim] = []
    for setting, own in plan.settings.items():
        present = {*own.trained, *own.baselines}
        where = own.title.lower()
        if "coca" in present:
            found += _claims_of(present, _Paired(results, setting), results.categories(setting), where)
        if "sequential" in present:
            found += sequential_claims(results, setting, where)
    return found


def _claims_of(present: Collection[str], paired: "_Paired", categories: Sequence[str], where: str) -> list[Claim]:
    found: list[Claim] = []
    for category in categories:
        for rival in ("instruct", "rlvr", "joint"):
            for metric in ("ece", "brier", "auroc") if rival != "joint" else ("ece",):
                if rival in present:
                    info = METRIC_SPECS[metric]
                    values = [info.better * d for d in paired.differences("coca", rival, metric, category)]
                    word = "higher" if info.better > 0 else "lower"
                    text = f"{where}, {category}: coca has a {word} {info.label} than {rival} (by)"
                    found.append(Claim(text, values))
        if "rlvr" in present:
            accuracy = paired.differences("coca", "rlvr", "accuracy", category)
            text = f"{where}, {category}: coca keeps accuracy within 2 points of rlvr (difference)"
            found.append(Claim(text, accuracy, -0.02))
    for rival in ("majority_voting", "rlcr"):
        for category in categories[:1] if rival in present else ():  # the trained category
            saved = paired.over_seeds(
                "coca", rival, "tokens_to_confidence", category, lambda ours, its: _share_lost(its, ours)
            )
            text = f"{where}: coca's TTC is at least 92% below {rival}'s (share saved)"
            found.append(Claim(text, saved, 0.92, most=1.0, exact=True))
    return found


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


def sequential_claims(results: Results, setting: str, where: str) -> list[Claim]:
    """Reward hacking: in the second stage the confidence reward rises and accuracy falls."""
    phases = [sequential_phases(results, setting, seed) for seed in results.seeds(setting, "sequential")]
    lost = [_share_lost(before["reward/answer"], after["reward/answer"]) for _, before, after in phases]
    gained = [after["reward/confidence"] - before["reward/confidence"] for _, before, after in phases]
    shorter = [_share_lost(before["response/length"], after["response/length"]) for _, before, after in phases]
    text = f"{where}: sequential's responses get shorter in its second stage (share of the length)"
    return [
        Claim(f"{where}: sequential loses at least half its accuracy in its second stage (share lost)", lost, 0.5, 1.0),
        Claim(f"{where}: sequential's confidence reward rises in its second stage (difference)", gained),
        Claim(text, shorter, most=1.0),
    ]


def _share_lost(before: float, after: float) -> float:
    return 1 - after / before if before else math.nan


def sequential_phases(results: Results, setting: str, seed: int) -> list[dict[str, float]]:
    """Mean training metrics at the start, at the end of the first stage and at the end of the second."""
    rows = results.training_rows(setting, "sequential", seed)
    stages = [[row for row in rows if row["stage"] == stage] for stage in (0, 1)]
    parts = [stages[0][:LAST_STEPS], stages[0][-LAST_STEPS:], stages[1][-LAST_STEPS:]]
    names = ("reward/confidence", "reward/answer", "response/length", "response/answer_length", "rollout/invalid_share")
    # NaN is null in JSON.
    return [
        {name: spread(math.nan if row[name] is None else row[name] for row in p).mean for name in names} for p in parts
    ]


def claims_table(found: Sequence[Claim]) -> Table:
    """Claims with intervals and verdicts, alone and corrected for their number (Holm)."""
    alone = [claim.p for claim in found]
    rows, csv_rows = [], []
    for claim, p, p_holm in zip(found, alone, holm(alone), strict=True):
        interval, values = claim.interval(), spread(claim.values).values
        bounds = UNDEFINED if math.isnan(interval.low) else f"{interval.low:+.3f} to {interval.high:+.3f}"
        mean = UNDEFINED if math.isnan(interval.estimate) else f"{interval.estimate:+.3f}"
        above = sum(value > claim.bound for value in values)
        verdicts = (claim.verdict(p), claim.verdict(p_holm))
        shown = (f"{claim.bound:+.2f}", f"{above} of {len(values)}", _show_p(p), _show_p(p_holm))
        rows.append((claim.text, mean, bounds, *shown, *verdicts))
        numbers = (interval.estimate, interval.low, interval.high, claim.bound, float(above), float(len(values)))
        csv_rows.append((claim.text, *numbers, p, p_holm, *verdicts))
    counted = sum(not math.isnan(p) for p in alone)
    note = (
        "Each value compares two methods of one seed, which share weights and questions (and the SFT warm-up, if they "
        "state the confidence in the same place), over the data sets on which both have the metric. Interval and "
        "two-sided p are Student's t. A claim is *not decided* if p is .05 or more, or undefined (one seed, or equal "
        f"values that may be a coincidence). The column *corrected* adjusts for the {counted} claims of this table "
        "(Holm): at most one in twenty reproductions has any wrong verdict there. This holds for a number of seeds "
        "fixed beforehand and for these held-out questions. ECE has a floor that differs between methods (*ECE if "
        "calibrated*), Brier has none."
    )
    seeds = max((len(spread(claim.values).values) for claim in found), default=0)
    if seeds < _MIN_SEEDS:
        note += f" **With {seeds} of at least {_MIN_SEEDS} seeds hardly any claim is decided**; see the paired tests."
    header = ("claim", "mean", "95% interval", "has to be above", "seeds above", "p", "p (Holm)", "alone", "corrected")
    csv_header = ("claim", "mean", "low", "high", "bound", "seeds_above", "seeds", "p", "p_holm", "alone", "corrected")
    return Table("claims", "The paper's claims", note, header, rows, csv_header, csv_rows)


def _show_p(p: float) -> str:
    if math.isnan(p):
        return UNDEFINED
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"
