"""Every number of the schema: never infinite or NaN, and at the edges of its range."""

import json
import math
import operator
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import ValidationError

from coca_mindspeed.config.compose import PATH_KEYS
from coca_mindspeed.config.schema import ArchitectureConfig, RunConfig, Section
from tests.tables import read_table

RUN = RunConfig()
SHAPE = {n: True if f.annotation is bool else 1 for n, f in ArchitectureConfig.model_fields.items() if f.is_required()}


def numbers(model: type[Section] = RunConfig, above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        sections = [t for t in inner if issubclass(t, Section)]
        for section in sections:
            yield from numbers(section, f"{above}{name}.")
        if not sections and (float in inner or get_origin(field.annotation) is tuple):
            yield f"{above}{name}"


def with_value(key: str, value: Any) -> RunConfig:
    """A configuration in which one key has another value, everything else valid."""
    values: dict[str, Any] = {"model": {"architecture": dict(SHAPE)}}
    *sections, name = key.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_is_infinite_or_none(value):
    for key in numbers():
        with pytest.raises(ValidationError, match=key.replace(".", r"\.")):
            with_value(key, [0.9, value] if key == "optimizer.betas" else value)


@pytest.mark.parametrize("key", ["mindspeed_rl.actor_config.lr", "data.grader_options.math.seconds"])
@pytest.mark.parametrize("value", [math.inf, [1.0, [math.nan]], {"a": -math.inf}])
def test_neither_are_those_of_free_sections(key, value):
    with pytest.raises(ValidationError, match="finite"):
        with_value(key, value)


@pytest.mark.parametrize(("key", "allowed", "refused"), read_table(__file__, "ranges.tsv"))
def test_edges_of_ranges(key, allowed, refused):
    for value in json.loads(allowed):
        with_value(key, value)
    for value in json.loads(refused):
        with pytest.raises(ValidationError):
            with_value(key, value)


def test_a_path_is_not_empty_and_is_a_key():
    for key in PATH_KEYS:
        assert operator.attrgetter(key)(RUN) is None
        with pytest.raises(ValidationError, match="at least 1 character"):
            with_value(key, "")
