"""``coca-mindspeed config``: what can be configured, and what a run resolves to."""

import argparse
import json
import sys
from typing import Any

from coca_mindspeed.config.compose import ready_made_runs
from coca_mindspeed.config.reference import reference_markdown, section_table
from coca_mindspeed.errors import UsageError, did_you_mean
from coca_mindspeed.mindspeed.upstream_layout import compose_any_layout
from coca_mindspeed.utils.console import print_text
from coca_mindspeed.utils.markdown import print_markdown


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN", help="a ready-made run (coca-mindspeed config list) or a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="override a key (rollout.prompts=64) or choose from a group (method=joint)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print a run's resolved YAML", description="Print a run's resolved YAML.")
    add_run_arguments(show)
    get = actions.add_parser(
        "get",
        help="print one value",
        description="Print one value of a run, for scripts: text as it is, the rest as JSON.",
    )
    get.add_argument("run_name", metavar="RUN", help="as in show")
    get.add_argument("key", metavar="KEY", help="of a value or a section: rollout.prompts, rollout")
    get.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as in show")
    actions.add_parser("list", help="list the ready-made runs", description="List the ready-made runs.")
    summary = "list every key with its type, range, default and meaning"
    keys = actions.add_parser("keys", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    keys.add_argument(
        "of",
        nargs="?",
        choices=("run", "coca", "verl"),
        default="run",
        help="run (default); the section coca in YAML files of MindSpeed-RL's (coca) or of verl's (verl)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "show":
        composed = compose_any_layout(arguments.run_name, arguments.overrides, allow_missing=True)
        sys.stdout.write(composed.to_yaml())
    elif arguments.action == "get":
        composed = compose_any_layout(arguments.run_name, arguments.overrides)
        print(_value(composed.run.model_dump(mode="json"), arguments.key))
    elif arguments.action == "list":
        print_text("\n".join(ready_made_runs()))
    elif arguments.of == "run":
        print_markdown(reference_markdown())
    elif arguments.of == "verl":
        from coca_mindspeed.verl.settings import VerlSettings

        print_markdown(section_table("coca", VerlSettings))
    else:
        from coca_mindspeed.mindspeed.start.settings import CocaSettings

        print_markdown(section_table("coca", CocaSettings))
    return 0


def _value(values: Any, key: str) -> str:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            near = did_you_mean(part, values) if isinstance(values, dict) else ""
            raise UsageError(f"{key}: no such key{near}; coca-mindspeed config show prints all keys")
        values = values[part]
    return json.dumps(values) if not isinstance(values, str) else values
