"""Streaming a JSON array gives what json.loads gives, wherever the chunks end."""

import io
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.sources import formats as json_stream
from coca_mindspeed.data.sources.formats import wrapped_elements
from coca_mindspeed.errors import DataError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class SmallReads(io.StringIO):
    """Three characters a read, so that every element is cut somewhere; the beginning arrives in one piece."""

    def read(self, size=-1):
        return super().read(12 if self.tell() == 0 else 3)


@settings(max_examples=60, deadline=None)
@example([1e15, 1e-7, -0.5, 12], None, False)
@given(st.lists(JSON, max_size=6), st.sampled_from([None, 1]), st.booleans())
def test_equals_json_loads_wherever_chunks_end(values, indent, wrapped):
    text = json.dumps({"Data": values, "Version": 1} if wrapped else values, indent=indent)
    elements = wrapped_elements(SmallReads(text), "x.json")
    assert elements is not None
    assert list(elements) == json.loads(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "x.json: element 3 of the array is not JSON"),
        ("[1 2]", "x.json: expected ',' or ']' after element 1, found '2'"),
        ("[1,]", "x.json: element 2 of the array is not JSON"),
        ("[,1]", "x.json: element 1 of the array is not JSON"),
        ('[{"a": }]', "x.json: element 1 of the array is not JSON"),
    ],
)
def test_broken_arrays_name_the_element(text, message):
    with pytest.raises(DataError, match=message.replace("[", r"\[")):
        list(wrapped_elements(io.StringIO(text), "x.json"))


@pytest.mark.parametrize("text", ['{"question": "q"}', "", "3", '{"rows_by": [1]}'])
def test_other_files_are_left_to_the_caller(text):
    assert wrapped_elements(io.StringIO(text), "x.json") is None


def test_a_runaway_element_stops_instead_of_filling_memory(monkeypatch):
    monkeypatch.setattr(json_stream, "LONGEST_LINE", 100)
    file = io.StringIO('["' + "a" * 5_000_000)
    with pytest.raises(DataError, match="element 1 of the array"):
        list(wrapped_elements(file, "x.json"))
    assert file.tell() < 5_000_000


def test_an_element_above_the_bound_is_refused_even_where_it_arrives_whole(monkeypatch):
    monkeypatch.setattr(json_stream, "LONGEST_LINE", 100)
    elements = wrapped_elements(io.StringIO(json.dumps(["a" * 50, "b" * 200, "c" * 50])), "x.json")
    assert next(elements) == "a" * 50
    with pytest.raises(DataError, match=r"x\.json: element 2 is longer than the 100"):
        next(elements)
