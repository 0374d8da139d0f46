"""``coca-router route``: replay routing from the tiers' predictions."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from coca_mindspeed.cli.options import at_least, place, within
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.metrics.calibration import calibration_metrics
from coca_mindspeed.evaluation.predictions import Prediction, read_predictions
from coca_mindspeed.evaluation.reports.plots import save_figure
from coca_mindspeed.evaluation.tokens import TokenCounter
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.files import write_atomically, write_json
from coca_mindspeed.utils.markdown import print_markdown
from coca_router import route_report
from coca_router.config import read_serving_config, tier_policies
from coca_router.decision import Budget
from coca_router.replay import (
    PolicyOutcome,
    Setting,
    Tiers,
    compare_routers,
    join_tiers,
    oracle_curve,
    replay_policy,
    setting_of_share,
    single_curve,
    threshold_curve,
    tier_name,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "predictions", nargs="+", type=Path, metavar="PREDICTIONS", help="one file a tier, from the cheapest"
    )
    parser.add_argument("--prices", metavar="P,P", help="of a generated token, one a tier (default: 1, 10, 100, ...)")
    parser.add_argument(
        "--answer-first", type=Path, metavar="FILE", help="an answer-first model (RLCR) in the first tier's place"
    )
    parser.add_argument(
        "--log-probs", type=Path, metavar="DIR", help="the first tier's model: add a router by its answers' log-probs"
    )
    parser.add_argument("--instruction", default="", help="--log-probs: that followed each question")
    parser.add_argument(
        "--share", type=within(0, 1), metavar="S", help="print the policy that sends this share to the last tier"
    )
    parser.add_argument("--policy", type=Path, metavar="CONFIG", help="replay this file of `serve` too")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="counts tokens where the predictions do not say")
    parser.add_argument("--output", type=place, default=Path("route"), help="directory to write (default: %(default)s)")
    parser.add_argument("--replicates", type=at_least(1), default=500, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the bootstrap (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    files: list[Path] = arguments.predictions
    names = [tier_name(path) for path in files]
    if len(set(names)) < len(names):
        names = [str(path) for path in files]
    if len(files) < 2 or len(set(names)) < len(files):
        raise UsageError(f"name two different files of predictions or more, found {', '.join(map(str, files))}")
    prices = _prices(arguments.prices, len(files))
    counter = None if arguments.tokenizer is None else TokenCounter(arguments.tokenizer)
    count = None if counter is None else lambda text: counter.before(text, len(text))
    needs = ("dataset",) if counter is None else ("dataset", "response")
    said = {name: read_predictions(path, needs) for name, path in zip(names, files, strict=True)}
    tiers = join_tiers(said, prices, count)
    curves = {
        "confidence first": threshold_curve(tiers),
        "answer first, the same decisions": threshold_curve(tiers, answer_first=True),
        "random (single models)": single_curve(tiers),
        "oracle": oracle_curve(tiers),
    }
    if arguments.answer_first is not None:
        other = {**said, names[0]: read_predictions(arguments.answer_first, needs)}
        curves["answer first, its own model"] = threshold_curve(join_tiers(other, prices, count), answer_first=True)
    aurocs = {}
    if arguments.log_probs is not None:
        by_log_prob = _by_log_prob(arguments, tiers, said[names[0]])
        curves["mean log-prob of the first tier's answer"] = threshold_curve(by_log_prob, answer_first=True)
        aurocs = {"stated confidence": _auroc(tiers), "mean log-prob of the answer": _auroc(by_log_prob)}
    routers = compare_routers(tiers, curves, replicates=arguments.replicates, seed=arguments.seed)
    best = max(range(len(names)), key=lambda i: float(tiers.correct[i].mean()))
    text = f"{route_report.tier_table(tiers)}\nBest single model: {names[best]}.\n\n"
    text += f"{route_report.routing_table(routers)}\n{route_report.NOTE}\n"
    if aurocs:
        shown = ", ".join(f"{name} {auroc:.3f}" for name, auroc in aurocs.items())
        text += f"\nAUROC of the first tier: {shown}.\n"
    policy: PolicyOutcome | None = None
    if arguments.policy is not None:
        policy = _replay(arguments.policy, tiers)
        text += f"\n{route_report.policy_sentence(arguments.policy.name, policy)}\n"
    setting: Setting | None = None
    if arguments.share is not None:
        setting = setting_of_share(tiers, arguments.share)
        text += f"\n{route_report.share_sentence(setting)}\n\n```yaml\n{route_report.policy_yaml(tiers, setting)}```\n"
    output: Path = arguments.output
    save_figure(route_report.routing_figure(tiers, routers, policy), output / "route.png")
    write_atomically(output / "route.md", f"# Routing\n\n{text}\n![Cost against quality](route.png)\n")
    write_json(
        output / "route.json",
        {
            "tiers": {name: float(tiers.correct[i].mean()) for i, name in enumerate(names)},
            "prices": prices,
            "questions": int(tiers.question.max()) + 1,
            "best_single": names[best],
            "routers": {
                router.name: {
                    "scores": {name: interval.as_dict() for name, interval in router.intervals.items()},
                    "quality": router.quality.tolist(),
                    "cost": router.cost.tolist(),
                }
                for router in routers
            },
            "auroc": aurocs or None,
            "share": None if setting is None else asdict(setting),
            "policy": None if policy is None else {k: None if v != v else v for k, v in asdict(policy).items()},
        },
    )
    print_markdown(f"{text}\n{output / 'route.md'}")
    return 0


def _by_log_prob(arguments: argparse.Namespace, tiers: Tiers, predictions: Sequence[Prediction]) -> Tiers:
    """The tiers with the probability of the first one's answer in place of its confidence, which it need not state."""
    if len(tiers.names) != 2:
        raise UsageError(f"--log-probs compares two tiers, found {len(tiers.names)}")
    from coca_mindspeed.baselines.probabilities import mean_answer_log_probs
    from coca_mindspeed.config.schema import ModelConfig
    from coca_mindspeed.local.policy import choose_device, load_policy

    policy = load_policy(arguments.log_probs, ModelConfig(), choose_device("auto"), where="--log-probs")
    by_key = {p.key: p for p in predictions}
    asked = [by_key[key] for key in tiers.keys]
    found = np.exp(mean_answer_log_probs(policy, asked, instruction=arguments.instruction))
    whole = np.stack([tiers.whole[0] - np.where(np.isnan(tiers.confidence[0]), 0, tiers.opening[0]), tiers.whole[1]])
    return replace(tiers, confidence=np.stack([found, tiers.confidence[1]]), whole=whole)


def _auroc(tiers: Tiers) -> float:
    return calibration_metrics(tiers.confidence[0], tiers.correct[0]).values["auroc"]


def _prices(text: str | None, tiers: int) -> list[float]:
    if text is None:
        return [10.0**index for index in range(tiers)]
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--prices: expected numbers between commas, found {text!r}") from error
    if len(prices) != tiers or not all(0 <= price < float("inf") for price in prices):
        raise UsageError(f"--prices: expected {tiers} numbers of 0 or more, found {text!r}")
    return prices


def _replay(path: Path, tiers: Tiers) -> PolicyOutcome:
    config = read_serving_config(path)
    if len(config.tiers) != len(tiers.names):
        raise UsageError(f"--policy {path}: has {len(config.tiers)} tiers, found predictions of {len(tiers.names)}")
    rules = [policy.rule for policy in tier_policies(config)]
    caps = config.caps
    unread = {
        "calibration": any(tier.calibration is not None for tier in config.tiers),
        "confidence.source": any(tier.confidence.source != "stated" for tier in config.tiers),
        "caps.tokens": caps.tokens is not None,
    }
    if left_out := [name for name, there in unread.items() if there]:
        print_text(
            f"--policy {path}: {', '.join(left_out)} cannot be replayed from stored predictions; confidences count as "
            "they were stated",
            sys.stderr,
        )
    return replay_policy(tiers, rules, Budget(caps.escalations, None, caps.exhausted))
