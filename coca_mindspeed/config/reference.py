"""The reference of all keys, made from the schema so that it cannot lag behind it."""

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.utils.markdown import markdown_table

_HEADER = ("key", "type and range", "default", "meaning")


def reference_markdown() -> str:
    """A Markdown table for each section of a run: key, type and range, default, meaning."""
    sections = []
    for name, field in RunConfig.model_fields.items():
        if _is_section(field.annotation):
            about = inspect.cleandoc(field.annotation.__doc__ or "")
            sections.append(f"### {name}\n\n{about}\n\n{section_table(name, field.annotation)}")
        else:
            sections.append(f"### {name}\n\n{_table([_row(name, field)])}")
    return "\n".join(sections).rstrip()


def section_table(name: str, section: type[BaseModel]) -> str:
    """The Markdown table of one section, and of the sections in it."""
    return _table(_rows(name, section))


def _table(rows: Iterable[Sequence[object]]) -> str:
    return markdown_table(_HEADER, rows, padded=False)


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _rows(name: str, section: type[BaseModel]) -> Iterator[Sequence[object]]:
    for key, field in section.model_fields.items():
        if not _is_section(field.annotation):
            yield _row(f"{name}.{key}", field)
        for inner in (field.annotation, *get_args(field.annotation)):  # a section that may be null
            if _is_section(inner):
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
    if any(map(_is_section, get_args(annotation))):
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
