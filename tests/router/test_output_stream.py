"""Text in chunks: any cut of a response gives the parser's result; stop strings."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.algorithm.parsing import ParsedResponse, ResponseParser
from coca_router.output_stream import ConfidenceReader, StopStrings

# Parts of which responses and nearly right responses are made.
_PARTS = (
    *("<confidence>", "</confidence>", "<confidence", ">", "</", "<", " ", "\n", "\t", "0", "1", ".", "85", "0.5"),
    *("1.0", "%", "-", "e", "answer", "é", "🙂", "\u00a0", "٣", "<confidence>0.25</confidence>"),
)
_NEAR = st.lists(st.sampled_from(_PARTS), max_size=12).map("".join)
_RIGHT = st.builds(
    lambda space, number, gap, answer: f"{space}<confidence>{gap}{number}{gap}</confidence>{answer}",
    st.text(" \t\r\n\f\v", max_size=3),
    st.one_of(st.sampled_from(["0", "1", "1.0", ".5", "0.85", "1.5", "2", "0.", "1.00"]), st.decimals(0, 1, places=2)),
    st.text(" \n", max_size=2),
    st.text(max_size=8),
)


def cut(text, places):
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def read_whole(pieces):
    reader = ConfidenceReader()
    answer = "".join([*map(reader.feed, pieces), reader.finish()])
    return ParsedResponse(reader.confidence, answer)


@settings(deadline=None)
@given(st.one_of(_NEAR, _RIGHT), st.lists(st.integers(0, 200), max_size=8))
def test_any_cut_equals_the_parser_on_the_whole_text(text, places):
    assert read_whole(cut(text, places)) == read_whole(list(text)) == ResponseParser()(text)


@pytest.mark.parametrize(
    ("text", "decided_by", "state"),
    [
        ("the answer", "t", "invalid"),
        (" \n<confidence>0.5</confidence>4", " \n<confidence>0.5</confidence>", "valid"),
        ("<confidence>0.5 </confidence>\n4", "<confidence>0.5 </confidence>", "valid"),
        ("<confidence>85%</confidence>", "<confidence>8", "invalid"),
        ("<confidence>1.5</confidence>", "<confidence>1.5", "invalid"),
        ("<confidence>0.5 0.6</confidence>", "<confidence>0.5 0", "invalid"),
        ("<confidence>0.5<confidence>", "<confidence>0.5<c", "invalid"),
        ("<think>hm</think><confidence>0.5</confidence>", "<t", "invalid"),
    ],
)
def test_it_is_decided_at_the_first_character_that_decides_it(text, decided_by, state):
    reader = ConfidenceReader()
    for character in decided_by[:-1]:
        assert reader.feed(character) == ""
        assert reader.state == "reading"
    reader.feed(decided_by[-1])
    assert reader.state == state


def test_an_endless_confidence_is_invalid_and_returned_as_text():
    reader = ConfidenceReader()
    endless = "<confidence>0." + "3" * 600
    given_back = "".join(map(reader.feed, endless))
    assert (reader.state, given_back) == ("invalid", endless)
    # The limit holds also where all of it comes at once.
    reader = ConfidenceReader()
    assert reader.feed(endless + "</confidence>x") == endless + "</confidence>x"
    assert reader.confidence is None


@settings(deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.integers(1, 4))
def test_any_cut_stops_where_the_first_stop_text_is_whole(text, stops, size):
    flow = StopStrings(stops)
    given_ = "".join([*(flow.feed(text[i : i + size]) for i in range(0, len(text), size)), flow.finish()])
    ends = [(end, -len(stop)) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        assert given_ == text
        assert not flow.stopped
        return
    end, length = min(ends)
    assert given_ == text[: end + length]
    assert flow.stopped
