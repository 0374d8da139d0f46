"""The embedded families: right answers, disjoint splits, what is taught and what is not, the tiny model's alphabet."""

import hashlib
from collections import Counter
from contextlib import closing
from typing import get_args

import pytest
import torch

from coca_mindspeed.algorithm.parsing import END_THINK_TAG, THINK_TAG
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.evaluation import HeldOut
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.run import warm_start
from coca_mindspeed.local.tiny_model import tiny_config, tiny_tokenizer
from experiments.miniature import (
    RECURRENCES,
    SYMBOLS,
    MiniatureName,
    digit_records,
    miniature,
    progression_records,
    repeated_progression_records,
    scratch_records,
    symbols_of,
)
from experiments.reproduce.plan import plan_path, read_plan, run_config
from experiments.reproduce.questions import repetition


def test_digit_questions_have_the_answers_that_a_person_gives():
    for record in digit_records(400, "train", 0):
        if record.question[0] == ">":
            left = list(record.question[1:])
            for digit in record.answer:  # each digit is the largest that is left
                assert digit == max(left)
                left.remove(digit)
            assert not left
        else:
            counted, digits = record.question.split("#")
            assert record.answer == str(sum(character == counted for character in digits))


@pytest.mark.parametrize(
    ("draw", "modulus", "digits", "operators"),
    [(progression_records, 10_000, 4, "+*"), (repeated_progression_records, 100, 2, "+*")],
)
def test_progressions_step_by_step(draw, modulus, digits, operators):
    by_question = {r.question: r.answer for r in draw(4000, "train", 0)}
    seen = Counter()
    for question, answer in by_question.items():
        operator = "+" if "+" in question else "*"
        start, step = (int(part[::-1]) for part in question.split(operator))
        terms = [int(term[::-1]) for term in answer.split("=")]
        for before, after in zip([start, *terms], terms, strict=False):
            assert after == (before + step if operator == "+" else before * step) % modulus
        assert all(len(term) == digits for term in answer.split("="))
        assert len(answer) == 74
        seen[operator] += 1
    assert set(seen) == set(operators)
    assert min(seen.values()) > 300


def test_a_run_of_the_long_setting_asks_no_question_twice():
    setting = read_plan(plan_path("miniature")).settings["long"]
    run = run_config(setting, [], 0)
    data = miniature("long")
    assert run.trainer.steps * run.rollout.prompts <= len(data.train)
    assert repetition([*data.warm_up, *data.train]) == (100_000, 100_000, 1.0, 1)
    kinds = Counter(r.metadata["kind"] for r in data.train)
    assert max(kinds.values()) < 1.05 * min(kinds.values())


@pytest.mark.timeout(3600)  # 1,166 s with one thread beside other work
def test_the_warm_start_of_the_long_setting_generalises(tmp_path):
    config = run_config(read_plan(plan_path("miniature")).settings["long"], [], 0)
    data, device = miniature("long"), torch.device("cpu")
    policy = load_policy(warm_start(config, tmp_path, data.warm_up, device, False, SYMBOLS), config.model, device)
    accuracy = {}
    with closing(build_grader("exact")) as grader:
        for split, records in {
            "warm_up": data.warm_up[:4000],
            "train": data.train[:4000],
            "evaluate": progression_records(4000, "evaluate", 0),
        }.items():
            answers = HeldOut(config, policy, grader, records, tmp_path, False).evaluate(records, split)
            accuracy[split] = sum(bool(answer.correct) for answer in answers) / len(answers)
    assert max(accuracy.values()) - min(accuracy.values()) < 0.03
    assert 0.3 < accuracy["train"] < 0.7


# SHA-256 of warm-up, training and evaluation: the published figures were measured on these questions.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "digests", "repeated"),
    [
        ("short", ("04576c0d1daa5768", "309ae3c24225ace3", "8ecef20bee0ef52f"), (32_488, 18)),
        ("long_repeated", ("854264c1b34bc7d3", "854264c1b34bc7d3", "0b360de8390cb86f"), (844, 109)),
    ],
)
def test_published_questions_do_not_change(name, digests, repeated):
    data = miniature(name)
    for records, digest in zip((data.warm_up, data.train, data.evaluate), digests, strict=True):
        lines = "".join(f"{record.id} {record.question}={record.answer}\n" for record in records)
        assert hashlib.sha256(lines.encode()).hexdigest()[:16] == digest
    assert (repetition(data.train).questions, repetition(data.train).largest) == repeated


@pytest.mark.parametrize("name", get_args(MiniatureName))
def test_the_tiny_model_can_read_and_write_all_of_it(name):
    data = miniature(name, size=500, evaluate=40)
    for records in (data.warm_up, data.train, data.evaluate):
        assert len({(r.dataset, r.id) for r in records}) == len({r.id for r in records}) == len(records)
    symbols = symbols_of(name)
    tokenizer, limit = tiny_tokenizer(symbols), tiny_config(symbols).max_position_embeddings
    for record in [*data.warm_up, *data.train, *data.evaluate]:
        ids = tokenizer(f"{record.question}={record.answer}", add_special_tokens=False)["input_ids"]
        assert tokenizer.pad_token_id not in ids  # what stands for an unknown character
        assert len(ids) + 7 < limit  # the confidence and the end
    assert {r.category for r in data.train} == {"math"}
    assert {r.category for r in data.evaluate} == ({"math", "code", "factual"} if name == "short" else {"math"})
    held_out = {r.question for r in data.evaluate if r.category != "factual"}
    assert not held_out & {r.question.removesuffix(THINK_TAG) for r in [*data.train, *data.warm_up]}


@pytest.mark.parametrize(
    ("question", "terms"), [("1234%", "123412341234"), ("1234+", "570496609511"), ("1234*", "484642882426")]
)
def test_recurrences_by_hand(question, terms):
    kind = {kind.name: kind for kind in RECURRENCES}[question[-1]]
    asked = kind.ask([1, 2, 3, 4])
    assert (asked.text, asked.answer[: len(terms)], len(asked.answer)) == (question, terms, 60)


def test_thoughts_are_shown_whole_or_shortened():
    whole = {r.question: r.answer for r in scratch_records(2000, "train", 0)}
    data = miniature("scratch", size=1000, evaluate=40)
    lengths = Counter()
    for record in data.warm_up:
        question, thinks, _ = record.question.partition(THINK_TAG)
        thought, _, answer = record.answer.rpartition(END_THINK_TAG)
        assert answer == whole[question][-2:]
        assert whole[question].startswith(thought)
        lengths["none" if not thinks else "whole" if len(thought) == 60 else "shortened"] += 1
    assert lengths["none"] == 500
    assert 80 < lengths["shortened"] < 170
    assert all(len(record.answer) == 2 for record in [*data.train, *data.evaluate])
