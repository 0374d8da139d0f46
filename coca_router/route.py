"""``coca-router route``: replay routing from the tiers' predictions."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coca_mindspeed.cli.options import place, within
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.metrics import UNDEFINED, calibration_metrics, show
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.utils.console import markdown_table, one_line, print_markdown
from coca_mindspeed.utils.json_files import write_json
from coca_mindspeed.utils.tokenization import TokenCounter
from coca_router.config import bands_from, form_keys, source_keys, tiers_yaml
from coca_router.replay import (
    Reference,
    Setting,
    Tiers,
    best_single,
    by_answer,
    join_tiers,
    oracle,
    random_mix,
    setting_of_share,
)

_SHARES = [tenth / 10 for tenth in range(11)]  # of the rows of the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("predictions", nargs="+", type=Path, metavar="PREDICTIONS", help="a file for each tier, from the cheapest")
    option("--prices", metavar="P,P", help="price of a generated token for each tier (default: 1, 10, 100, ...)")
    option("--share", type=within(0, 1), metavar="S", help="print the policy that sends this share to the last tier")
    option("--tokenizer", type=Path, metavar="DIR", help="tokenizer for predictions without token counts")
    option("--output", type=place, metavar="FILE", help="also write the figures to this file (JSON)")


def run(arguments: argparse.Namespace) -> int:
    files: list[Path] = arguments.predictions
    names = [path.resolve().parent.name if path.stem == "predictions" else path.stem for path in files]
    if len(set(names)) < len(names):
        names = [str(path) for path in files]
    if len(files) < 2 or len(set(names)) < len(files):
        raise UsageError(f"name two different files of predictions or more, found {', '.join(map(str, files))}")
    prices = _prices(arguments.prices, len(files))
    counter = None if arguments.tokenizer is None else TokenCounter(arguments.tokenizer)
    count = None if counter is None else lambda text: counter.before(text, len(text))
    needs = () if counter is None else ("response",)
    read = {name: read_predictions(path, needs) for name, path in zip(names, files, strict=True)}
    deciding = [p for name in names[:-1] for p in read[name]]
    sources = {"stated": read}
    if any(p.answer_probability is not None for p in deciding):
        sources["answer_logprob"] = {name: [by_answer(p, count) for p in rows] for name, rows in read.items()}
        if all(p.confidence is None for p in deciding):
            del sources["stated"]
    text, found = "", {}
    for source, rows in sources.items():
        tiers = join_tiers(rows, prices, count)
        plain = [all(p.confidence is None for p in stated) for stated in read.values()]
        forms = [form_keys(path, rows) for path, rows in zip(files, read.values(), strict=True)]
        added, found[source] = _compare(tiers, source, plain, forms, arguments.share)
        text += added
    if arguments.output is not None:
        right = {name: float(tiers.correct[i].mean()) for i, name in enumerate(names)}
        content = {"tiers": right, "prices": prices, "questions": int(tiers.question.max()) + 1, **found}
        write_json(arguments.output, content)
    print_markdown(text)
    return 0


def _compare(
    tiers: Tiers, source: str, plain: Sequence[bool], forms: Sequence[Mapping[str, Any]], share: float | None
) -> tuple[str, dict[str, Any]]:
    """Tables of tiers and thresholds by one source of confidences, with the policy of ``share``, and its figures."""
    settings = list(dict.fromkeys(setting_of_share(tiers, share) for share in _SHARES))
    setting = None if share is None else setting_of_share(tiers, share)
    header = [f"tier ({source})", "right", "AUROC", "cost of an answer", "cost of a confidence"]
    table = zip(tiers.names, tiers.correct, tiers.confidence, tiers.whole, tiers.opening, strict=True)
    rows = [
        [
            n,
            f"{r.mean():.3f}",
            show("auroc", calibration_metrics(c, r).values["auroc"]),
            f"{w.mean():.4g}",
            f"{o.mean():.4g}",
        ]
        for n, r, c, w, o in table
    ]
    text = markdown_table(header, rows)
    best, limit = best_single(tiers), oracle(tiers)
    compared = [_compared(s, tiers, best, limit) for s in settings]
    header = ["answer from", "last tier", "right", "mix", "gain", "gap", "cost", "if decided after"]
    rows = [
        [
            f"{s.threshold:.6g}",
            f"{s.share:.1%}",
            f"{s.quality:.3f}",
            UNDEFINED if math.isnan(c["random_mix"]) else f"{c['random_mix']:.3f}",
            *(UNDEFINED if math.isnan(c[name]) else f"{c[name]:+.1%}" for name in ("gain", "gap")),
            f"{s.cost:.4g}",
            f"{s.answer_first_cost:.4g}",
        ]
        for s, c in zip(settings, compared, strict=True)
    ]
    text += f"\n{markdown_table(header, rows)}\n"
    text += (
        f"Best single tier: {one_line(best.name)}, {best.quality:.3f} right at a cost of {best.cost:.4g}. Oracle, the "
        f"cheapest right answer: {limit.quality:.3f} at {limit.cost:.4g}.\n"
        "mix: right answers of a mix of tiers by chance at this cost. gain: right answers relative to the best single "
        "tier, gap: that are missing relative to the oracle (arXiv 2601.07206). The last column: the cost "
        "if the same were decided after the answer.\n\n"
    )
    if setting is not None:
        at = f"{setting.threshold:.6g}"
        text += (
            f"Answer from confidence {at} on: {setting.share:.1%} of the questions (95% interval {setting.low:.1%} "
            f"to {setting.high:.1%}) reach the last tier; {setting.quality:.1%} of all right at a mean cost of "
            f"{setting.cost:.4g}. Clients may choose this threshold by the model name coca@{at}.\n\n"
            f"```yaml\n{_policy_yaml(tiers, setting, source, plain, forms)}```\n\n"
        )
    rows_of = [{**asdict(s), **_none_for_nan(c)} for s, c in zip(settings, compared, strict=True)]
    figures = {"best_single": best._asdict(), "oracle": limit._asdict(), "settings": rows_of}
    return text, {**figures, "share": setting and asdict(setting)}


def _compared(setting: Setting, tiers: Tiers, best: Reference, limit: Reference) -> dict[str, float]:
    """A random mix of the same cost, and LLMRouterBench's Gain@B and Gap@O; NaN where undefined."""
    return {
        "random_mix": random_mix(tiers, setting.cost),
        "gain": setting.quality / best.quality - 1 if best.quality else math.nan,
        "gap": 1 - setting.quality / limit.quality if limit.quality else math.nan,
    }


def _none_for_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


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


def _policy_yaml(
    tiers: Tiers, setting: Setting, source: str, plain: Sequence[bool], forms: Sequence[Mapping[str, Any]]
) -> str:
    """A configuration of `serve` with the setting; addresses and names of models are placeholders."""
    names = ["small", "large"] if len(tiers.names) == 2 else [f"tier{i + 1}" for i in range(len(tiers.names))]
    notes = "".join(f"# {name}: {one_line(file)}\n" for name, file in zip(names, tiers.names, strict=True))
    notes += "# set url and model of each server; dialect: vllm for vLLM and serve --model\n"
    urls = {name: {"url": f"http://127.0.0.1:{8001 + i}/v1", "model": name} for i, name in enumerate(names)}
    keys: dict[str, dict[str, Any]] = {name: bands_from(setting.threshold, "escalate") for name in names}
    if source == "answer_logprob":
        keys = {name: source_keys(each) | keys[name] for name, each in zip(names, plain, strict=True)}
    keys[names[-1]] = {"states_confidence": False} if plain[-1] else {**bands_from(0), "invalid": "answer"}
    keys = {name: {**form, **keys[name]} for name, form in zip(names, forms, strict=True)}
    return notes + tiers_yaml(keys, backends=urls)
