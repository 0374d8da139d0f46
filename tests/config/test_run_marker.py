"""The file that says what a run was started with, and the files of releases before it."""

import json

import pytest
import yaml

from coca_mindspeed.config.prompt_form import PromptForm, TrainedPrompt, prompt_file, read_prompt_file
from coca_mindspeed.config.run_marker import RunMarker, is_run_of, read_run_marker
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.utils.directories import MARKER
from tests.mindspeed.builders import write

ENGINES = ("local", "mindspeed_rl", "verl")
PROMPT = TrainedPrompt(
    form=PromptForm(system_prompt="State it.", instructions={"math": ""}), method="coca", max_new_tokens=8
)
FORM = PROMPT.model_dump_json()
OURS = {"made_by": "coca-mindspeed", "kind": "run"}
BEGUN = {**OURS, "id": "12", "method": "coca", "seed": 1, "model": None, "version": "0.3.2"}
COCA = {"method": {"name": "coca", "clip": 0.1}, "grader": "math"}
#: Files of a run as releases before 0.4 wrote them, and what they say today.
EARLIER = {
    "local": (
        {
            MARKER: json.dumps(
                {**BEGUN, "data": {"train": {"records": 3, "sha256": "ab"}}, "prompt": {"sha256": "cd", "date": None}}
            ),
            "config.yaml": "seed: 1\nmethod: {name: coca}\n",
            "coca_prompt.json": FORM,
        },
        {
            **{"id": "12", "version": "0.3.2", "first_prompt_sha256": "cd"},
            "settings": {"seed": 1, "method": {"name": "coca"}},
            "data": {"train": {"records": 3, "sha256": "ab"}},
        },
    ),
    "mindspeed_rl": (
        {
            "mindspeed_rl.yaml": yaml.safe_dump(
                {
                    "megatron_training": {"data_path": "/d/train.jsonl", "seed": 2},
                    "coca": {**COCA, "eval_data": "/d/held.jsonl", "data_sha256": {"/d/train.jsonl": "ab"}},
                }
            ),
            "coca_prompt.json": FORM,
        },
        {
            "settings": {
                "megatron_training": {"data_path": "/d/train.jsonl", "seed": 2},
                "coca": {**COCA, "eval_data": "/d/held.jsonl"},
            },
            "data": {"train": {"file": "/d/train.jsonl", "sha256": "ab"}},
        },
    ),
    "verl": (
        {
            "coca.json": json.dumps(
                {"name": "coca", "clip": 1e-05, "grader": "math", "grading": {}, "total_training_steps": 8}
            ),
            "coca_prompt.json": FORM,
        },
        {
            "settings": {
                "coca": {"method": {"name": "coca", "clip": 1e-05}, "grader": "math", "grading": {}},
                "trainer": {"total_training_steps": 8},
            },
            "data": {},
        },
    ),
}


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def earlier(engine, tmp_path):
    """The directory of a run that an earlier release began, and what it says."""
    files, says = EARLIER[engine]
    for name, text in files.items():
        write(tmp_path / name, text)
    return tmp_path, says


def test_a_run_of_an_earlier_release_goes_on_with_one_file(engine, earlier):
    directory, says = earlier
    marker = read_run_marker(directory, engine)
    assert marker.model_dump(include=set(says)) == says
    assert read_prompt_file(prompt_file(directory)) == PROMPT
    before = {path.name for path in directory.iterdir()}
    marker.model_copy(update={"prompt": PROMPT}).write(directory, resumed=True)
    assert {path.name for path in directory.iterdir()} == {MARKER} | (before & {"config.yaml"})
    written = read_run_marker(directory, engine)
    assert written == marker.model_copy(update={"prompt": PROMPT, "id": written.id})
    assert read_prompt_file(prompt_file(directory)) == PROMPT


def test_a_resumed_run_keeps_its_id_and_the_release_that_began_it(engine, tmp_path):
    assert read_run_marker(tmp_path, engine) is None
    settings = {"a": float("inf"), "b": [1, (2.5, None)], "c": {3: tmp_path}}
    first = RunMarker(engine=engine, version="0.3.9", settings=settings, data={"train": {"sha256": "ab"}})
    first.write(tmp_path, resumed=False)
    assert read_run_marker(tmp_path, engine) == first
    RunMarker(engine=engine, settings={}).write(tmp_path, resumed=True)
    second = read_run_marker(tmp_path, engine)
    assert (second.id, second.version, second.settings) == (first.id, "0.3.9", {})
    RunMarker(engine=engine, settings={}).write(tmp_path, resumed=False)
    assert read_run_marker(tmp_path, engine).id != first.id
    assert [other for other in ENGINES if is_run_of(tmp_path, other)] == [engine]
    for other in set(ENGINES) - {engine}:
        with pytest.raises(ConfigError, match=MARKER):
            read_run_marker(tmp_path, other)


@pytest.mark.parametrize("text", ["[", "7", "[]"])
def test_a_damaged_file_of_an_earlier_release_is_refused(engine, earlier, text):
    directory, _ = earlier
    name = next(name for name in EARLIER[engine][0] if name != MARKER)
    (directory / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_run_marker(directory, engine)


@pytest.mark.parametrize("text", ["", "[", "7", "{}", '{"engine": "ENGINE"}', '{"engine": "ours", "settings": {}}'])
def test_a_damaged_marker_is_refused(engine, tmp_path, text):
    (tmp_path / MARKER).write_text(text.replace("ENGINE", engine))
    with pytest.raises(ConfigError, match=MARKER):
        read_run_marker(tmp_path, engine)


def test_a_run_of_the_engine_before_there_were_several_is_not_anothers(earlier, engine):
    directory, _ = earlier
    if engine == "local":
        for other in ("mindspeed_rl", "verl"):
            with pytest.raises(ConfigError, match=MARKER):
                read_run_marker(directory, other)
