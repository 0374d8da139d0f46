"""The boundary of the confidence segment, against brute force over prefixes, for every kind of tokenizer."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.algorithm.boundary import TokenText, confidence_segment_lengths, segment_ends
from coca_mindspeed.algorithm.parsing import ResponseParser
from coca_mindspeed.utils.tokenization import token_text
from tests import tokenizers_for_tests as kinds
from tests.processor import within
from tests.real_model import needs_smollm2, smollm2_tokenizer

_NUMBERS = ["0.85", "1", ".5", "0.123", "1.0", "7", "85%", ""]
_AFTER = ["\n42", "\n\nLet me think", " x > 3", "答案是三", "🙂", "", ">\n", "</confidence>"]
_BEFORE = ["", " ", "\n", "    \n", "no: ", "🙂"]


def brute_force(ids, table, parser, max_tokens):
    """Decode every prefix of the ids: the segment ends with the first prefix that holds the whole closing tag."""
    text = b"".join(table[i] for i in ids)
    if parser(text.decode("utf-8", "replace")).confidence is None:
        return min(len(ids), max_tokens)
    tag = b"</confidence>"
    prefixes = [b"".join(table[i] for i in ids[:n]) for n in range(len(ids) + 1)]
    if parser.position == "first":
        return next(n for n, prefix in enumerate(prefixes) if tag in prefix)
    return next(n for n, prefix in enumerate(prefixes) if prefix.count(tag) == text.count(tag))


_TABLES: dict[int, tuple[TokenText, list[bytes]]] = {}


def tables_of(tokenizer):
    """The table of a tokenizer, and the bytes of each id, read back from it."""
    if id(tokenizer) not in _TABLES:
        table = token_text(tokenizer, len(tokenizer))
        _TABLES[id(tokenizer)] = table, [table.bytes_of(i) for i in range(len(tokenizer))]
    return _TABLES[id(tokenizer)]


def check(tokenizer, responses, position="first", max_tokens=16, pad=0):
    text, table = tables_of(tokenizer)
    parser = ResponseParser(position=position)
    lengths = torch.tensor([len(r) for r in responses])
    ids = torch.full((len(responses), max([1, *map(len, responses)])), pad)
    for row, response in zip(ids, responses, strict=True):
        row[: len(response)] = torch.tensor(response, dtype=torch.int64)
    texts = text.decode(ids, lengths)
    assert texts == [b"".join(table[i] for i in r).decode("utf-8", "replace") for r in responses]
    valid = torch.tensor([parser(t).confidence is not None for t in texts])
    found = confidence_segment_lengths(ids, lengths, text, valid, max_confidence_tokens=max_tokens, position=position)
    assert found.tolist() == [brute_force(r, table, parser, max_tokens) for r in responses]
    return found


@pytest.mark.parametrize("name", kinds.ALL)
def test_table_agrees_with_the_tokenizers_own_decoder(name):
    tokenizer = kinds.ALL[name]()
    for text in ["<confidence> 0.85 </confidence>\nLet me", "x > 3\n", "</confidence>\n\n", "0.123 0.99"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded = token_text(tokenizer, len(tokenizer)).decode(torch.tensor([ids]), torch.tensor([len(ids)]))
        assert decoded == [text]


@pytest.mark.parametrize("name", kinds.ALL)
def test_tokenized_text_matches_brute_force(name):
    tokenizer = kinds.ALL[name]()
    texts = [f"{a}<confidence> {number} </confidence>{b}" for a in _BEFORE for number in _NUMBERS for b in _AFTER]
    check(tokenizer, [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts])


@needs_smollm2
@pytest.mark.published
@pytest.mark.parametrize("position", ["first", "last"])
def test_tokens_of_smollm2(position):
    random, tokenizer = np.random.default_rng(0), smollm2_tokenizer()
    pieces = [
        "<confidence>",
        " 0.83 ",
        "0.5",
        "</confidence>",
        " ",
        "\n",
        " The answer is 42.",
        "数学",
        "🙂",
        ">\n",
        "</",
    ]
    texts = ["".join(random.choice(pieces, size=random.integers(8))) for _ in range(250)]
    texts += [f"<confidence>{a}0.5 </confidence>{b}" for a in ("", " ", "\n") for b in ("", " ", "\n", "7", "数")]
    check(tokenizer, tokenizer(texts, add_special_tokens=False)["input_ids"], position)


@pytest.mark.parametrize("name", kinds.ALL)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_way_of_sampling_the_same_text_matches_brute_force(name, data):
    """A policy does not sample canonical tokenizations: cut the text anywhere, drop in control tokens, cut it short."""
    tokenizer = kinds.ALL[name]()
    special = list(tokenizer.all_special_ids)
    responses = []
    for _ in range(data.draw(st.integers(1, 6))):
        text = data.draw(st.sampled_from(_BEFORE)) + "<confidence>" + data.draw(st.sampled_from([" ", "", "\n"]))
        text += data.draw(st.sampled_from(_NUMBERS)) + data.draw(st.sampled_from(["", " "])) + "</confidence>"
        text += data.draw(st.sampled_from(_AFTER))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids: list[int] = []
        for piece in pieces:
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
            if data.draw(st.integers(0, 9)) == 0:
                ids.append(data.draw(st.sampled_from(special)))
        responses.append(ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids)
    for position in ("first", "last"):
        check(tokenizer, responses, position=position, max_tokens=data.draw(st.integers(1, 20)))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_ids_and_a_hostile_padding_value(data):
    """Ids behind a response's end are never looked at, even where they spell a closing tag."""
    tokenizer = kinds.tags_as_special_tokens()
    close = tokenizer.convert_tokens_to_ids("</confidence>")
    ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=40)
    check(tokenizer, data.draw(st.lists(ids, min_size=1, max_size=5)), pad=close)


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["4", "2", "<conf", "idence>", ".5", "</confidence>", " "], {"last": [2, 7]}),
        (["4", "2 <", "confidence>", ".5", "</confidence>"], {"last": [1, 5]}),  # a straddling token is confidence
        (["<confidence>", "1</", "confidence>", "4"], {"first": [3, 4], "last": [2, 4], "both": [3, 3, 4]}),
        (
            ["<confidence>", "1", "</confidence>4", "2", "<confidence>", ".5", "</confidence>", "\n"],
            {"both": [3, 4, 8], "first": [3, 8], "last": [4, 8]},
        ),
        (["<confidence>", "1", "</confidence>", "<confidence>.5</confidence>"], {"both": [3, 3, 4]}),
        (["1", "2", "3"], {"first": [2, 3], "last": [1, 3], "both": [2, 2, 3]}),  # invalid: two tokens
        (["1"], {"first": [1, 1], "last": [0, 1], "both": [1, 1, 1]}),
    ],
)
def test_ends_of_the_segments(pieces, ends):
    table = TokenText([piece.encode() for piece in pieces])
    ids, lengths = torch.arange(len(pieces))[None], torch.tensor([len(pieces)])
    for position, expected in ends.items():
        parsed = ResponseParser(position)("".join(pieces))
        stated = [parsed.confidence, parsed.confidence_after][: len(expected) - 1]
        valid = [torch.tensor([value is not None]) for value in stated]
        found = segment_ends(ids, lengths, table, valid, max_confidence_tokens=2, position=position)
        assert found.tolist() == [expected], position


@given(st.lists(st.sampled_from(["<confidence>.5</confidence>", "x", "<confidence>", "</confidence>"]), max_size=90))
def test_the_last_confidence_begins_with_its_opening_tag(pieces):
    text = "".join(pieces)
    table = TokenText([bytes([i]) for i in range(128)])
    ids, lengths = torch.tensor([list(text.encode()) or [0]]), torch.tensor([len(text)])
    parsed = ResponseParser("both")(text)
    valid = [torch.tensor([value is not None]) for value in (parsed.confidence, parsed.confidence_after)]
    first, second, whole = segment_ends(ids, lengths, table, valid, position="both")[0].tolist()
    if parsed.confidence is not None and parsed.confidence_after is not None:
        assert text[first:second] == parsed.answer
    assert 0 <= first <= second <= whole == len(text)


def test_a_character_split_over_tokens_right_behind_the_tag():
    smile = "🙂".encode()
    table = TokenText([b"<confidence>1</confidence", b">" + smile[:1], smile[1:3], smile[3:]])
    ids = torch.tensor([[0, 1, 2, 3]])
    assert table.decode(ids, torch.tensor([4])) == ["<confidence>1</confidence>🙂"]
    assert confidence_segment_lengths(ids, torch.tensor([4]), table, torch.tensor([True])).tolist() == [2]


def test_a_confidence_behind_thousands_of_blanks_is_found():
    table = TokenText([b" ", b"<confidence>", b"1", b"</confidence>", b"x"])
    blanks = torch.zeros(3, 4000, dtype=torch.int64)
    ids = torch.cat([blanks, torch.tensor([[1, 2, 3, 4]]).expand(3, 4)], dim=1)
    found = confidence_segment_lengths(ids, torch.tensor([4004, 4003, 10]), table, torch.tensor([True, True, False]))
    assert found.tolist() == [4003, 4003, 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(2, 3)}, "token_ids should be int"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, "token_ids should be int"),
        ({"token_ids": torch.zeros(3, 3, dtype=torch.int64)}, "response_lengths should be int"),
        ({"token_ids": torch.full((2, 3), 2)}, r"token ids should be in \[0, 2\)"),
        ({"response_lengths": torch.tensor([1, 4])}, r"should be in \[0, 3\]"),
        ({"valid": torch.tensor([1, 0])}, "valid should be bool"),
        ({"valid": torch.tensor([True, False])}, "response 0 is marked valid, but its tokens hold no"),
        ({"max_confidence_tokens": 0}, "at least 1"),
        ({"valid": torch.zeros(2, dtype=torch.bool, device="meta")}, "on meta"),
    ],
)
def test_mismatches_raise(change, message):
    arguments = {
        "token_ids": torch.zeros(2, 3, dtype=torch.int64),
        "response_lengths": torch.tensor([3, 2]),
        "token_text": TokenText([b"a", b"b"]),
        "valid": torch.tensor([False, False]),
    }
    with pytest.raises(ValueError, match=message):
        confidence_segment_lengths(**{**arguments, **change})


def test_empty_batch():
    nothing = torch.zeros(0, 5, dtype=torch.int64)
    lengths = torch.zeros(0, dtype=torch.int64)
    table = TokenText([b"a"])
    assert table.decode(nothing, lengths) == []
    assert confidence_segment_lengths(nothing, lengths, table, lengths.bool()).tolist() == []


@pytest.mark.timing
def test_the_papers_batch_takes_a_fraction_of_a_second():
    """2,048 responses of 4,096 tokens; the target is 0.15 s on one core, the bound here is of CPU time."""
    tokenizer = kinds.qwen_like()
    head = tokenizer("<confidence> 0.85 </confidence>\n", add_special_tokens=False)["input_ids"]
    ids = torch.randint(0, 256, (2048, 4096))
    ids[:, : len(head)] = torch.tensor(head)
    table, lengths = token_text(tokenizer, len(tokenizer)), torch.full((2048,), 4096)
    start = time.process_time()
    found = confidence_segment_lengths(ids, lengths, table, torch.ones(2048, dtype=torch.bool))
    assert within(time.process_time() - start, 0.5)
    assert set(found.tolist()) == {len(head)}
