"""The form of a prompt: its file, those of earlier versions, and what identifies it."""

import json

import pytest

from coca_mindspeed.algorithm.methods import METHODS
from coca_mindspeed.algorithm.parsing import MATH_INSTRUCTION, SHORT_ANSWER
from coca_mindspeed.config.prompt_form import PromptForm, join_system, prompt_file, read_prompt_file
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.directories import write_marker

SYSTEM = METHODS["coca"].system_prompt
FORM = {"system_prompt": SYSTEM, "instructions": {"math": " Think."}}
WHOLE = {"version": 2, "form": FORM, "method": "coca", "max_confidence_tokens": 16, "max_new_tokens": 9}
EARLIER = {"method": {"name": "coca", "confidence_decimals": 2, "max_confidence_tokens": 8}, "max_new_tokens": 9}


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# Content of a file, and the key that is named.
REFUSED = [
    ("[1]", "list"),
    ("{", "JSON"),
    ('{"a": NaN}', "a"),
    ("{}", "form"),
    ({**WHOLE, "later": 1}, "later"),
    ({**WHOLE, "version": 3}, "version"),
    ({**WHOLE, "method": "./evil.py:Method"}, "method"),
    ({**WHOLE, "max_new_tokens": 0}, "max_new_tokens"),
    ({**WHOLE, "max_new_tokens": "9"}, "max_new_tokens"),
    ({**WHOLE, "form": {**FORM, "instructions": {"math": 7}}}, "form.instructions.math"),
    ({**WHOLE, "form": {**FORM, "system_prompt": 7}}, "form.system_prompt"),
    ({**WHOLE, "form": {**FORM, "decimals": 0}}, "form.decimals"),
    ({**WHOLE, "form": {"instructions": {}}}, "form.system_prompt"),
    ({**EARLIER, "max_new_tokens": 0}, "max_new_tokens"),
    ({**EARLIER, "category": 7}, "category"),
    ({**EARLIER, "method": {"name": "other"}}, "method.name"),
    ({**EARLIER, "method": {"name": "coca", "confidence_decimals": 0}}, "method.confidence_decimals"),
]


@pytest.mark.parametrize(("content", "named"), REFUSED)
def test_a_damaged_file_is_refused_by_its_name_and_key(content, named, tmp_path):
    file = written(tmp_path / "coca_prompt.json", content)
    with pytest.raises(ConfigError) as caught:
        read_prompt_file(file)
    assert str(file) in str(caught.value)
    keys = [problem.key for problem in caught.value.problems]
    assert named in keys if keys else named in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"p\.json"):
        read_prompt_file(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("more", "instructions"),
    [
        ({}, {}),
        ({"category": "math", "instruction": None}, {"math": f" {MATH_INSTRUCTION}"}),
        ({"category": "factual"}, {"factual": f" {SHORT_ANSWER}"}),
        ({"category": "code", "instruction": None}, {"code": ""}),
        ({"category": "math", "instruction": ""}, {"math": ""}),
        ({"category": "mine", "instruction": "\nBriefly."}, {"mine": "\nBriefly."}),
    ],
)
def test_files_of_earlier_versions_are_read(more, instructions, tmp_path):
    trained = read_prompt_file(written(tmp_path / "p.json", {**EARLIER, **more}))
    assert trained.form == PromptForm(system_prompt=SYSTEM, instructions=instructions, decimals=2)
    assert (trained.method, trained.max_confidence_tokens, trained.max_new_tokens) == ("coca", 8, 9)


def test_a_file_is_found_beside_its_model(tmp_path):
    write_marker(tmp_path, "run")
    file = written(tmp_path / "coca_prompt.json", WHOLE)
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    assert [prompt_file(tmp_path / name) for name in ("", "model", "coca_prompt.json")] == [file] * 3
    assert prompt_file(tmp_path / "other") is None
    assert read_prompt_file(file).model_dump(mode="json", exclude_defaults=True)["form"] == FORM


def test_a_digest_is_that_of_all_parts_and_does_not_change_between_releases():
    form = PromptForm(system_prompt="S", instructions={"math": "Think.", "code": None})
    assert form.instructions["math"] == " Think."
    assert form.digests() == {"math": "0e976362ffdfd793", "code": "40104044ba40a64a"}
    others = [
        PromptForm(system_prompt="T", instructions={"math": " Think."}),
        PromptForm(system_prompt=None, instructions={"math": " Think."}),
        PromptForm(system_prompt="S", instructions={"math": "\nThink."}),
        PromptForm(system_prompt="S", instructions={"math": ""}),
        PromptForm(system_prompt="S", instructions={"math": " Think."}, decimals=2),
        PromptForm(system_prompt="S", instructions={"math": " Think."}, template_variables={"thinking": False}),
    ]
    assert len({form.digests()["math"], *(other.digests()["math"] for other in others)}) == 7
    same = PromptForm(system_prompt="S", instructions={"mine": " Think."})
    assert same.digests()["mine"] == form.digests()["math"]


@pytest.mark.parametrize(
    ("prompt", "more", "joined"),
    [
        ("P q", None, "P q"),
        (None, "m", "m"),
        (None, None, None),
        ("", "", None),
        ("P q", "m", "P q\n\nm"),
        ("P q", "P  q\n\nm", "P  q\n\nm"),
        ("P q\n\nm", "m", "P q\n\nm"),
        ("P q", "q", "P q\n\nq"),
    ],
)
def test_a_system_message_that_has_the_prompt_is_taken_as_it_is(prompt, more, joined):
    assert join_system(prompt, more) == joined
