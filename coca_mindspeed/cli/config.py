"""``coca-mindspeed config``: list runs and keys, print the resolved YAML of a run."""

import argparse
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coca_mindspeed.cli.options import subcommand
from coca_mindspeed.config.compose import (
    ComposedConfig,
    compose_run,
    describe_run,
    is_mindspeed_rls,
    near_key,
    ready_made_runs,
)
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import Section, fields_of, is_section
from coca_mindspeed.errors import UsageError
from coca_mindspeed.utils.console import markdown_table, print_markdown, print_text


def add_run_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    named = "a ready-made run (coca-mindspeed config list) or a YAML file"
    parser.add_argument("run_name", nargs=None if required else "?", metavar="RUN", help=named)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else argparse counts it among what is required
        metavar="KEY=VALUE",
        help="override a key (rollout.prompts=64) or choose from a group (method=joint)",
    )


def compose_typed(name: str, overrides: Sequence[str], *, allow_missing: bool = False) -> ComposedConfig:
    """:func:`~coca_mindspeed.config.compose.compose_run`, with errors that know MindSpeed-RL's keys."""
    return compose_run(name, overrides, allow_missing=allow_missing, upstream=_written_as)


def compose_engine_run(name: str, overrides: Sequence[str]) -> ComposedConfig:
    """:func:`compose_typed`, also of a file in MindSpeed-RL's layout."""
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file() or not is_mindspeed_rls(path):
        return compose_typed(name, overrides)
    from coca_mindspeed.mindspeed.native import compose_cluster_run

    return compose_cluster_run(name, overrides)


def _written_as(key: str, value: object, sections: Mapping[str, Any]) -> Sequence[str]:
    from coca_mindspeed.mindspeed.keys import written_as  # a run without errors does not need it

    return written_as(key, value, sections)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_run_arguments(subcommand(actions, "show", "print a run's resolved YAML"))
    get = subcommand(actions, "get", "print one value of a run, for scripts: text as it is, the rest as JSON")
    get.add_argument("run_name", metavar="RUN", help="as in show")
    get.add_argument("key", metavar="KEY", help="key of a value or a section: rollout.prompts, rollout")
    get.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="as in show")
    subcommand(actions, "list", "list the ready-made runs, with model, data and hardware of each")
    keys = subcommand(actions, "keys", "list every key with its type, range, default and meaning")
    keys.add_argument(
        "of",
        nargs="?",
        choices=("run", "coca", "verl"),
        default="run",
        help="run (default); the section coca in YAML files of MindSpeed-RL's (coca) or of verl's (verl)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "show":
        composed = compose_typed(arguments.run_name, arguments.overrides, allow_missing=True)
        sys.stdout.write(composed.to_yaml())
    elif arguments.action == "get":
        composed = compose_typed(arguments.run_name, arguments.overrides)
        print(_value(composed.run.model_dump(mode="json"), arguments.key))
    elif arguments.action == "list":
        names = ready_made_runs()
        width = max(map(len, names))
        print_text("\n".join(f"{name:{width}}  {describe_run(name)}" for name in names))
    elif arguments.of == "run":
        print_markdown(reference_markdown())
    elif arguments.of == "verl":
        from coca_mindspeed.verl.settings import VerlSettings

        print_markdown(section_table("coca", VerlSettings))
    else:
        from coca_mindspeed.mindspeed.start.process import CocaSettings

        print_markdown(section_table("coca", CocaSettings))
    return 0


def _value(values: Any, key: str) -> str:
    parts = key.split(".")
    for number, part in enumerate(parts):
        if not isinstance(values, dict) or part not in values:
            near = near_key(".".join(parts[:number]), part) if isinstance(values, dict) else ""
            raise UsageError(f"{key}: no such key{near}; coca-mindspeed config show prints all keys")
        values = values[part]
    return json.dumps(values) if not isinstance(values, str) else values


_HEADER = ("key", "type and range", "default", "meaning")


def reference_markdown() -> str:
    """A Markdown table for each section of a run: key, type and range, default, meaning."""
    sections = []
    for name, field in RunConfig.model_fields.items():
        if is_section(field.annotation):
            about = field.description or inspect.cleandoc(field.annotation.__doc__ or "")
            sections.append(f"### {name}\n\n{about}\n\n{section_table(name, field.annotation)}")
        else:
            sections.append(f"### {name}\n\n{_table([_row(name, field)])}")
    return "\n".join(sections).rstrip()


def section_table(name: str, section: Section) -> str:
    """The Markdown table of one section, and of the sections in it."""
    return _table(_rows(name, section))


def _table(rows: Iterable[Sequence[object]]) -> str:
    return markdown_table(_HEADER, rows, padded=False)


def _rows(name: str, section: Section) -> Iterator[Sequence[object]]:
    for key, field in fields_of(section).items():
        if not is_section(field.annotation):
            yield _row(f"{name}.{key}", field)
        for inner in (field.annotation, *get_args(field.annotation)):  # a section that may be null
            if is_section(inner):
                yield from _rows(f"{name}.{key}", inner)


def _row(key: str, field: FieldInfo) -> Sequence[object]:
    default = field.get_default(call_default_factory=True)
    shown = "" if default is PydanticUndefined else f"`{json.dumps(default)}`"
    ranges = [_range(constraint) for constraint in [*field.metadata, *_inner_constraints(field.annotation)]]
    type_and_range = " ".join(filter(None, [_type_name(field.annotation), *ranges]))
    return f"`{key}`", type_and_range, shown, field.description or ""


def _inner_constraints(annotation: Any) -> list[Any]:
    """Constraints of a tuple's elements, which are the same for all."""
    first: Any = next(iter(get_args(annotation)), None)
    if get_origin(first) is not Annotated:
        return []
    return [constraint for field in first.__metadata__ for constraint in field.metadata]


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is tuple:
        names = (inner.__origin__ if get_origin(inner) is Annotated else inner for inner in get_args(annotation))
        return f"tuple[{', '.join(_type_name(name) for name in names)}]"
    if isinstance(annotation, type) and not getattr(annotation, "__args__", None):
        return annotation.__name__
    if any(map(is_section, get_args(annotation))):
        return "section or null"
    if choices := [inner for inner in get_args(annotation) if get_origin(inner) is Literal]:
        return ", ".join((*get_args(choices[0]), "null"))
    text = str(annotation).replace("typing.", "").replace("NoneType", "null").replace("None", "null")
    return text.removeprefix("Literal[").removesuffix("]").replace("'", "") if text.startswith("Literal[") else text


def _range(constraint: Any) -> str:
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if (bound := getattr(constraint, attribute, None)) is not None:
            return f"{sign} {bound}"
    return ""
