"""The reference of all keys, made from the schema so that it cannot lag behind it."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coca_mindspeed.config.schema import RunConfig, Section


def reference_markdown() -> str:
    """A Markdown table for each section: key, type, default, range and meaning."""
    lines = ["| key | type | default | range | meaning |", "| --- | --- | --- | --- | --- |"]
    sections = []
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            rows = list(_rows(name, field.annotation))
            sections.append("\n".join([f"### {name}", "", (field.annotation.__doc__ or "").strip(), "", *lines, *rows]))
        else:
            lines_of_run = _row(name, field)
            sections.append("\n".join([f"### {name}", "", *lines, lines_of_run]))
    return "\n\n".join(sections)


def _rows(name: str, section: type[Section]) -> Iterator[str]:
    for key, field in section.model_fields.items():
        yield _row(f"{name}.{key}", field)
        for inner in get_args(field.annotation):  # a section that may be null
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from _rows(f"{name}.{key}", inner)


def _row(key: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "" if default is PydanticUndefined else json.dumps(default)
    ranges = [_range(constraint) for constraint in [*field.metadata, *_inner_constraints(field.annotation)]]
    cells = [f"`{key}`", _type_name(field.annotation), f"`{shown}`", " ".join(filter(None, ranges)), field.description]
    return "| " + " | ".join(str(cell or "").replace("|", "\\|") for cell in cells) + " |"


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
    if any(isinstance(inner, type) and issubclass(inner, Section) for inner in get_args(annotation)):
        return "section or null"
    text = str(annotation).replace("typing.", "").replace("NoneType", "null").replace("None", "null")
    return text.removeprefix("Literal[").removesuffix("]").replace("'", "") if text.startswith("Literal[") else text


def _range(constraint: Any) -> str:
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if (bound := getattr(constraint, attribute, None)) is not None:
            return f"{sign} {bound}"
    return ""
