"""The paper's claims, each as a number for each seed and a bound that its mean has to be above."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coca_mindspeed.evaluation.catalogue import metric_info
from coca_mindspeed.reproduce.plan import Plan
from coca_mindspeed.reproduce.results import Results, mean_interval, spread
from coca_mindspeed.reproduce.table import Table

# Rows of metrics.jsonl that are averaged at the end of a stage: single steps are noisy.
LAST_STEPS = 10


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        text: what is claimed, and what the values are.
        values: one for each seed, larger is better for the claim; NaN where undefined.
        bound: the claim holds where the mean is above it.
    """

    text: str
    values: Sequence[float]
    bound: float = 0.0

    def verdict(self, level: float = 0.95) -> str:
        """``holds`` or ``does not hold`` where the whole interval says so, otherwise ``not decided``."""
        if not spread(self.values).values:
            return "no figures"
        interval = mean_interval(self.values, level)
        if interval.low > self.bound:
            return "holds"
        return "does not hold" if interval.high < self.bound else "not decided"


def claims(results: Results, plan: Plan) -> list[Claim]:
    """Every claim of the paper that the finished cells speak of, held or not."""
    found: list[Claim] = []
    for setting, own in plan.settings.items():
        present = {*own.trained, *own.baselines}
        paired = _Paired(results, setting)
        where = own.title.lower()
        if "coca" not in present:
            continue
        for category in results.categories(setting):
            for rival in ("instruct", "rlvr", "joint"):
                for metric in ("ece", "brier", "auroc") if rival != "joint" else ("ece",):
                    if rival in present:
                        found.append(paired.better("coca", rival, metric, category, where))
            if "rlvr" in present:
                accuracy = paired.differences("coca", "rlvr", "accuracy", category)
                text = f"{where}, {category}: coca keeps accuracy within 2 points of rlvr (difference)"
                found.append(Claim(text, accuracy, -0.02))
        for rival in ("majority_voting", "rlcr"):
            if rival in present:
                ratio = paired.over_seeds(
                    "coca", rival, "tokens_to_confidence", "math", lambda ours, its: 1 - ours / its
                )
                found.append(Claim(f"{where}: coca's TTC is at least 92% below {rival}'s (share saved)", ratio, 0.92))
        if "sequential" in present:
            found += sequential_claims(results, setting, where)
    return found


def sequential_claims(results: Results, setting: str, where: str) -> list[Claim]:
    """Reward hacking: in the second stage the confidence reward rises while accuracy is lost."""
    phases = [sequential_phases(results, setting, seed) for seed in results.seeds(setting, "sequential")]
    lost = [1 - after["reward/answer"] / before["reward/answer"] for _, before, after in phases]
    gained = [after["reward/confidence"] - before["reward/confidence"] for _, before, after in phases]
    shorter = [1 - after["response/length"] / before["response/length"] for _, before, after in phases]
    return [
        Claim(f"{where}: sequential loses at least half its accuracy in its second stage (share lost)", lost, 0.5),
        Claim(f"{where}: sequential's confidence reward rises in its second stage (difference)", gained),
        Claim(f"{where}: sequential's responses get shorter in its second stage (share of the length)", shorter),
    ]


def sequential_phases(results: Results, setting: str, seed: int) -> list[dict[str, float]]:
    """Means of the training metrics at the start, at the end of the first stage and at the end of the second."""
    rows = results.training_rows(setting, "sequential", seed)
    stages = [[row for row in rows if row["stage"] == stage] for stage in (0, 1)]
    parts = [stages[0][:LAST_STEPS], stages[0][-LAST_STEPS:], stages[1][-LAST_STEPS:]]
    names = ("reward/confidence", "reward/answer", "response/length", "response/answer_length", "rollout/invalid_share")
    return [{name: spread([row[name] for row in part]).mean for name in names} for part in parts]


def claims_table(found: Sequence[Claim]) -> Table:
    """Claims with their intervals and verdicts."""
    rows, csv_rows = [], []
    for claim in found:
        interval = mean_interval(claim.values)
        n = len(spread(claim.values).values)
        bounds = "--" if math.isnan(interval.low) else f"{interval.low:+.3f} to {interval.high:+.3f}"
        mean = "--" if math.isnan(interval.estimate) else f"{interval.estimate:+.3f}"
        rows.append((claim.text, mean, bounds, f"{claim.bound:+.2f}", str(n), claim.verdict()))
        numbers = (interval.estimate, interval.low, interval.high, claim.bound, float(n))
        csv_rows.append((claim.text, *numbers, claim.verdict()))
    header = ("claim", "mean", "95% interval", "has to be above", "seeds", "verdict")
    note = (
        "Paired over seeds: each value compares two methods that share weights, warm-up and questions; the interval is "
        "Student's t. A claim is *not decided* where the interval holds its bound."
    )
    csv_header = ("claim", "mean", "low", "high", "bound", "seeds", "verdict")
    return Table("claims", "The paper's claims", note, header, rows, csv_header, csv_rows)


@dataclass(frozen=True)
class _Paired:
    results: Results
    setting: str

    def over_seeds(
        self, method: str, rival: str, metric: str, category: str, of: Callable[[float, float], float]
    ) -> list[float]:
        seeds = self.results.seeds(self.setting, method, rival)
        pairs = [
            [self.results.value(self.setting, m, seed, category, metric) for m in (method, rival)] for seed in seeds
        ]
        return [of(ours, its) for ours, its in pairs]

    def differences(self, method: str, rival: str, metric: str, category: str) -> list[float]:
        return self.over_seeds(method, rival, metric, category, lambda ours, its: ours - its)

    def better(self, method: str, rival: str, metric: str, category: str, where: str) -> Claim:
        info = metric_info(metric)
        word = "higher" if info.better > 0 else "lower"
        values = [info.better * d for d in self.differences(method, rival, metric, category)]
        return Claim(f"{where}, {category}: {method} has a {word} {info.label} than {rival} (by)", values)
