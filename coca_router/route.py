"""``coca-router route``: replay routing from the tiers' predictions."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from coca_mindspeed.cli.options import place, within
from coca_mindspeed.errors import UsageError
from coca_mindspeed.evaluation.predictions import read_predictions
from coca_mindspeed.utils.console import markdown_table, one_line, print_markdown
from coca_mindspeed.utils.files import write_json
from coca_mindspeed.utils.tokenization import TokenCounter
from coca_router.config import bands_from, tiers_yaml
from coca_router.replay import Setting, Tiers, join_tiers, setting_of_share

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
    needs = ("dataset",) if counter is None else ("dataset", "response")
    tiers = join_tiers(
        {name: read_predictions(path, needs) for name, path in zip(names, files, strict=True)}, prices, count
    )
    settings = list(dict.fromkeys(setting_of_share(tiers, share) for share in _SHARES))
    setting = None if arguments.share is None else setting_of_share(tiers, arguments.share)
    header = ["tier", "right", "cost of an answer", "cost of a confidence"]
    means = zip(tiers.names, *(each.mean(axis=1) for each in (tiers.correct, tiers.whole, tiers.opening)), strict=True)
    text = markdown_table(header, [[n, f"{r:.3f}", f"{whole:.4g}", f"{opening:.4g}"] for n, r, whole, opening in means])
    header = ["answer from", "to the last tier", "right", "cost of a question", "if decided after the answer"]
    rows = [
        [f"{s.threshold:.6g}", f"{s.share:.1%}", f"{s.quality:.3f}", f"{s.cost:.4g}", f"{s.answer_first_cost:.4g}"]
        for s in settings
    ]
    text += f"\n{markdown_table(header, rows)}"
    if setting is not None:
        at = f"{setting.threshold:.6g}"
        text += (
            f"\nAnswer from confidence {at} on: {setting.share:.1%} of the questions (95% interval {setting.low:.1%} "
            f"to {setting.high:.1%}) reach the last tier; {setting.quality:.1%} of all right at a mean cost of "
            f"{setting.cost:.4g}. Clients may choose this threshold by the model name coca@{at}.\n\n"
            f"```yaml\n{_policy_yaml(tiers, setting)}```\n"
        )
    if arguments.output is not None:
        content = {
            "tiers": {name: float(tiers.correct[i].mean()) for i, name in enumerate(names)},
            "prices": prices,
            "questions": int(tiers.question.max()) + 1,
            "settings": [asdict(each) for each in settings],
            "share": None if setting is None else asdict(setting),
        }
        write_json(arguments.output, content)
    print_markdown(text)
    return 0


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


def _policy_yaml(tiers: Tiers, setting: Setting) -> str:
    """A configuration of `serve` with the setting; addresses and names of models are placeholders."""
    names = ["small", "large"] if len(tiers.names) == 2 else [f"tier{i + 1}" for i in range(len(tiers.names))]
    notes = "".join(f"# {name}: {one_line(file)}\n" for name, file in zip(names, tiers.names, strict=True))
    notes += "# set url and model of each server; dialect: vllm for vLLM and serve --model\n"
    urls = {name: {"url": f"http://127.0.0.1:{8001 + i}/v1", "model": name} for i, name in enumerate(names)}
    keys: dict[str, dict[str, Any]] = {name: bands_from(setting.threshold, "escalate") for name in names}
    keys[names[-1]] = {**bands_from(0), "invalid": "answer"}
    if np.isnan(tiers.confidence[-1]).all():
        keys[names[-1]] = {"states_confidence": False}
    return notes + tiers_yaml(keys, backends=urls)
