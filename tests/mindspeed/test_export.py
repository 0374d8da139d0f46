"""The export's own files and refusals; tests/integration runs MindSpeed-RL's preprocess_data.py on them."""

import json
import re

import pytest
import yaml

from coca_mindspeed.algorithm.parsing import ANSWER_FIRST_PROMPT, CONFIDENCE_FIRST_PROMPT, MATH_INSTRUCTION
from coca_mindspeed.cli import main
from coca_mindspeed.data.records import Record, write_records
from coca_mindspeed.mindspeed import export as mindspeed_export
from tests.data.tokenizers import save_tokenizer

MATH = [Record("a", "big_math", "math", "What is 1 + 1?", "2"), Record("b", "big_math", "math", "数学 3^2?\n", "9")]
OTHER = Record("c", "own", "math", "Add.", "3", None, {"instruction": "\n\nBox it."})


def export(tmp_path, records, *options, family="qwen", tokenizer=None):
    write_records(tmp_path / "train.jsonl", records)
    tokenizer = tokenizer or save_tokenizer(family, tmp_path / family)
    arguments = ("data", "export", "mindspeed-rl", "--input", tmp_path / "train.jsonl", "--output", tmp_path / "out")
    return main([*map(str, (*arguments, "--template", family, "--tokenizer", tokenizer, *options))])


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "questions.jsonl").read_text().splitlines()]


def template(tmp_path):
    (only,) = json.loads((tmp_path / "out" / "templates.json").read_text())
    return only


def test_a_math_set_has_the_papers_prompts_in_its_template(tmp_path, capsys):
    assert export(tmp_path, MATH) == 0
    assert template(tmp_path)["default_system"] == CONFIDENCE_FIRST_PROMPT
    assert template(tmp_path)["format_user"]["slots"] == [
        f"<|im_start|>user\n{{{{content}}}} {MATH_INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert rows(tmp_path) == [
        {"question": "What is 1 + 1?", "label": "2", "system": ""},
        {"question": "数学 3^2?\n", "label": "9", "system": ""},
    ]
    printed = capsys.readouterr().out
    assert "all 2 prompts equal the tokenizer's chat template, token by token" in printed
    assert f"python cli/preprocess_data.py dataset --config-dir {tmp_path / 'out'}" in printed


def test_a_mixed_set_carries_its_instructions_in_its_rows(tmp_path):
    assert export(tmp_path, [*MATH, OTHER]) == 0
    assert "{{content}}<|im_end|>" in template(tmp_path)["format_user"]["slots"][0]
    assert rows(tmp_path)[0]["question"] == f"What is 1 + 1? {MATH_INSTRUCTION}"
    assert rows(tmp_path)[2] == {"question": "Add.\n\nBox it.", "label": "3", "system": ""}


def test_answer_first_prompt_and_a_records_own_system_prompt(tmp_path):
    own = Record("x", "own", "math", "q?", "1", system=" Be brief. ")
    assert export(tmp_path, [*MATH, own], "--prompt", "answer-first", family="llama3") == 0
    assert template(tmp_path)["default_system"] == ANSWER_FIRST_PROMPT
    assert template(tmp_path)["format_prefix"] == {"slots": [["bos_token"]]}
    assert rows(tmp_path)[2]["system"] == "Be brief."


def test_the_dataset_yaml_names_files_that_are_there(tmp_path):
    assert export(tmp_path, MATH, "--workers", "2") == 0
    settings = yaml.safe_load((tmp_path / "out" / "dataset.yaml").read_text())
    assert settings["input"] == str(tmp_path / "out" / "questions.jsonl")
    assert settings["prompt_type_path"] == str(tmp_path / "out" / "templates.json")
    assert settings["prompt_type"] == template(tmp_path)["name"] == "coca_qwen"
    assert settings["workers"] == 2
    assert (tmp_path / "out" / "packed").is_dir()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["training"]["data_path"] == settings["output_prefix"]
    assert (report["records"], report["prompts_equal_to_chat_template"]) == (2, 2)


def test_a_tokenizer_on_another_machine_is_only_named(tmp_path, capsys):
    assert export(tmp_path, MATH, tokenizer="/models/Qwen2.5-7B-Instruct") == 0
    assert "does not exist here: prompts were not compared" in capsys.readouterr().out
    settings = yaml.safe_load((tmp_path / "out" / "dataset.yaml").read_text())
    assert settings["tokenizer_name_or_path"] == "/models/Qwen2.5-7B-Instruct"


def test_what_can_be_known_is_known_before_the_records_are_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mindspeed_export, "read_records", lambda path: pytest.fail("read too early"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert export(tmp_path, MATH, tokenizer=tmp_path / "empty") == 1
    assert "cannot load a tokenizer" in capsys.readouterr().err
    assert export(tmp_path, MATH, "--output", str(tmp_path / "file")) == 1
    assert "is a file; the output is a directory" in capsys.readouterr().err
    assert export(tmp_path, MATH, "--output", str(tmp_path / "file" / "out")) == 1
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "other", "named"), [("qwen", "llama3", "record 'a'.* token 0"), ("llama3", "qwen", "BOS")]
)
def test_the_wrong_family_is_noticed(tmp_path, capsys, family, other, named):
    tokenizer = save_tokenizer(other, tmp_path / "other")
    assert export(tmp_path, MATH, family=family, tokenizer=tokenizer) == 1
    assert re.search(named, capsys.readouterr().err, re.DOTALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (Record("x", "d", "math", "What is x_{{idx}}?", "1"), "'{{idx}}'"),
        (Record("x", "d", "math", "q", "1", system=" "), "system prompt"),
        (Record("x", "d", "math", "q", " "), "gold answer"),
        (Record("x", "taco", "code", "q", ""), "mathematics"),
    ],
)
def test_what_mindspeed_rl_would_change_is_refused(tmp_path, capsys, record, named):
    assert export(tmp_path, [*MATH, record]) == 1
    error = capsys.readouterr().err
    assert "record 'x': " in error
    assert named in error
    assert not (tmp_path / "out").exists()


def test_other_refusals(tmp_path, capsys):
    assert export(tmp_path, []) == 1
    assert "there are no records to export" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        export(tmp_path, MATH, "--workers", "0")
    assert "--workers: expected a whole number from 1 on, found '0'" in capsys.readouterr().err
    assert export(tmp_path, MATH) == 0
    assert export(tmp_path, MATH) == 1
    assert "already exists" in capsys.readouterr().err
    assert export(tmp_path, MATH[:1], "--overwrite") == 0
    assert len(rows(tmp_path)) == 1


def test_instructions_with_braces_stay_out_of_the_template(tmp_path):
    braces = Record("x", "d", "math", "q?", "1", None, {"instruction": "Write {{answer}}."})
    assert export(tmp_path, [braces]) == 0
    assert template(tmp_path)["format_user"]["slots"][0].count("{{") == 1
    assert rows(tmp_path)[0]["question"] == "q? Write {{answer}}."


@pytest.mark.parametrize(
    "question", ["  spaces around \n", "{{content}}", "<|im_start|>system", "a<|eot_id|>b", "ünï 🙂"]
)
@pytest.mark.parametrize("family", ["qwen", "llama3"])
def test_unusual_questions_still_equal_the_chat_template(tmp_path, family, question):
    assert export(tmp_path, [Record("x", "d", "math", question, "1")], family=family) == 0
