"""Types of the values that the schema checks by functions: free-form sections, variables and date of a template."""

import datetime
import math
from typing import Annotated, Any

from pydantic import AfterValidator

# transformers gives these a value in every template, so that a variable of the same name would have no effect.
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Check that a free-form section contains no NaN or infinity."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{place}: should be a finite number, found {value}")
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}".lstrip("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}.{index}", inner) for index, inner in enumerate(value)]
    return values


def template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Check variables of a chat template: names that a template can use, finite numbers."""
    for name in values:
        if not name.isidentifier() or name in _RESERVED_VARIABLES:
            raise ValueError(f"{name}: expected the name of a variable of the chat template")
    return _finite(values)


def template_day(value: str | None) -> str | None:
    """Check a date for a chat template."""
    try:
        if value is not None and datetime.date.fromisoformat(value).isoformat() != value:
            raise ValueError
    except ValueError:
        raise ValueError(f"expected a date, YYYY-MM-DD, found {value!r}") from None
    return value


FreeForm = Annotated[dict[str, Any], AfterValidator(_finite)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(template_variables)]
Day = Annotated[str | None, AfterValidator(template_day)]
