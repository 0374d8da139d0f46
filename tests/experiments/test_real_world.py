"""Real-world questions: disjoint parts, accepted answers, determinism, the command."""

from collections import Counter, defaultdict
from contextlib import closing
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.facts import normalise_fact
from coca_mindspeed.data.records import read_records
from coca_mindspeed.grading.registry import build_grader
from experiments.__main__ import main
from experiments.real_world.families import FAMILIES, NEVER_TAUGHT, part_of, real_world_records

PARTS = ("warm_up", "train", "evaluate")
ALL = 10_000


@pytest.fixture(scope="module")
def parts():
    return {part: real_world_records(part, 150) for part in PARTS}


def test_families_have_records_in_the_parts_of_their_role(parts):
    names = {part: {record.dataset for record in records} for part, records in parts.items()}
    for family in FAMILIES:
        where = {part for part in PARTS if family.name in names[part]}
        wanted = {"trained": set(PARTS), "warm_up": {"warm_up"}}.get(family.role, {"evaluate"})
        assert where == wanted, family.name
    counts = Counter(record.dataset for record in parts["evaluate"])
    assert min(counts.values()) >= 40, counts
    records = [record for part in PARTS for record in parts[part]]
    assert len({r.id for r in records}) == len({(r.dataset, r.question) for r in records}) == len(records)
    taught = [*parts["warm_up"], *parts["train"]]
    assert NEVER_TAUGHT.isdisjoint(entity.partition(":")[0] for r in taught for entity in r.metadata["entities"])
    warm_up, train = (
        {r.metadata["entities"][0] for r in parts[part] if r.metadata["role"] == "trained"}
        for part in ("warm_up", "train")
    )
    assert warm_up.isdisjoint(train)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_held_out_entities_are_never_taught(seed):
    evaluate = real_world_records("evaluate", 40, seed)
    held_out = {record.metadata["entities"][0] for record in evaluate}
    for other in (seed, seed + 1):  # of any two runs
        for part in ("warm_up", "train"):
            for record in real_world_records(part, 40, other):
                assert held_out.isdisjoint(record.metadata["entities"]), record
                assert all(part_of(entity) != "evaluate" for entity in record.metadata["entities"]), record


@pytest.mark.parametrize("match", ["exact", "contains"])
def test_graders_accept_every_alias_and_no_answer_of_another_question(parts, match):
    records = [record for part in PARTS for record in parts[part]][::3]
    aliases = [{normalise_fact(alias) for alias in record.metadata["aliases"]} for record in records]
    with closing(build_grader("auto", {"factual": {"match": match}})) as grader:
        grader.check(records)
        for shown in ("{}", "The answer is {}.", " {}\n"):
            verdicts = grader.grade(records, [shown.format(record.answer) for record in records])
            assert [r for r, verdict in zip(records, verdicts, strict=True) if not verdict.correct] == [], shown
        for record, own in zip(records, aliases, strict=True):
            every = grader.grade([record] * len(own), [*record.metadata["aliases"]][: len(own)])
            assert all(verdict.correct for verdict in every), record
        # Each record gets the answer of the next one of its family.
        by_family = defaultdict(list)
        for record in records:
            by_family[record.dataset].append(record)
        for family in by_family.values():
            others = [*family[1:], family[0]]
            pairs = [(a, b) for a, b in zip(family, others, strict=True)
                     if normalise_fact(b.answer) not in {normalise_fact(x) for x in a.metadata["aliases"]}]  # fmt: skip
            verdicts = grader.grade([a for a, _ in pairs], [b.answer for _, b in pairs])
            wrongly = [(a.question, b.answer) for (a, b), v in zip(pairs, verdicts, strict=True) if v.correct]
            assert wrongly == []


# question, an answer, is it accepted?
ACCEPTED = """
What is the capital of South Africa? | Cape Town | yes
In which country is the city of Mumbai? | India | yes
In which country is the region of Veneto? | Italy | yes
On which continent is Georgia? | Europe | yes
On which continent is Canada? | Central America | no
On which continent is France? | Asia | no
What is the country code top-level domain of Japan on the internet? | .jp | yes
What is the chemical symbol of gold? | Au | yes
What is the currency of Japan? | Japanese Yen | yes
Which currency has the code CAD? | US Dollar | no
Which language has the two-letter code 'el'? | Greek | yes
Which language has the two-letter code 'sv'? | Norwegian | no
Which month comes after May? | June | yes
"""


@pytest.mark.parametrize("line", ACCEPTED.strip().splitlines())
def test_accepted_answers(line):
    question, answer, accepted = line.split(" | ")
    names = {normalise_fact(alias) for alias in all_questions()[question].aliases}
    assert (normalise_fact(answer) in names) == (accepted == "yes")


@cache
def all_questions():
    return {q.text: q for family in FAMILIES for q in family.questions(1, np.random.default_rng(0))}


def test_the_command(tmp_path, capsys):
    output = tmp_path / "rw"
    sizes = ("--train", "20", "--evaluate", "10", "--warm-up", "5", "--hardest", "0.6")
    assert main(["real_world", "--output", str(output), *sizes]) == 0
    for part, size in (("train", 20), ("evaluate", 10), ("warm_up", 5)):
        assert list(read_records(output / f"{part}.jsonl")) == real_world_records(part, size, hardest=0.6)
    first = (output / "train.jsonl").read_bytes()
    assert main(["real_world", "--output", str(output), *sizes]) == 1
    assert str(output) in capsys.readouterr().err
    assert main(["real_world", "--output", str(output), *sizes, "--overwrite"]) == 0
    assert (output / "train.jsonl").read_bytes() == first
