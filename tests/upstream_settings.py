"""The table of docs/port.md that compares our configuration with MindSpeed-RL's, and the values of both sides."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values

PAGE = Path(__file__).parents[1] / "docs" / "port.md"
HEADING = "## Differences from MindSpeed-RL's own configuration"
RUN, UPSTREAM = "qwen25_7b_910c", "configs/grpo_qwen25_7b_A3.yaml"
NOT_SET = "not set"
#: Names and places that are each user's own, and the section that only we have.
_OWN = ("coca", "model", "defaults")
_PLACES = {"model", "tokenizer_name_or_path", "data_path", "load", "save"}


def ours() -> dict[str, str]:
    """Our keys of MindSpeed-RL, ``section.key`` to value, as MindSpeed-RL is given them."""
    run = compose_run(RUN).run
    return dict(_flat(mindspeed_values(ClusterRun(run), make_plan(run).iterations, StageFiles(Path("runs/x")))))


def theirs(root: Path) -> dict[str, str]:
    """The keys of the YAML that MindSpeed-RL ships for the same model and machine."""
    return dict(_flat(yaml.safe_load((root / UPSTREAM).read_text(encoding="utf-8"))))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if (not prefix and key in _OWN) or (prefix.count(".") == 1 and key in _PLACES):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = float(value)  # YAML reads 1e-6 as text
        except ValueError:
            return value
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows() -> dict[str, tuple[str, str]]:
    """``section.key`` to upstream's value and ours, as the page has them; each row gives a reason."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            key, upstream, own, reason = (cell.strip() for cell in line.strip("|").split("|"))
            assert reason, line
            found[key.strip("`")] = (upstream.strip("`"), own.strip("`"))
    return found
