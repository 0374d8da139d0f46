"""A model of the Hugging Face hub in place of a directory: downloaded once, kept by a resumed run, and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.validation import validate_run
from coca_mindspeed.utils.files import write_marker
from coca_mindspeed.utils.hub import is_hub_id
from tests.hub_stub import COMMIT, hub
from tests.local.starts_for_tests import QUESTIONS, write_rows

FILES = {"config.json": "{}", "model.safetensors": "weights", "pytorch_model.bin": "again", "tokenizer.json": "{}"}
DOWNLOAD = """
import sys
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.model_files import download_model
try:
    print(*sorted(path.name for path in download_model(sys.argv[1], own_code=False, show_progress=True).iterdir()))
except ConfigError as error:
    print(error.problems[0].code, error.problems[0].key, error.problems[0].value, file=sys.stderr)
"""


def download(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads these variables when it is imported."""
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", DOWNLOAD, name]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_a_model_is_downloaded_once_and_found_offline(tmp_path):
    model, cache = tmp_path / "tiny", tmp_path / "cache"
    model.mkdir()
    for name, text in FILES.items():
        (model / name).write_text(text)
    kept = ["config.json", "model.safetensors", "tokenizer.json"]
    with hub({"org/tiny": model}) as endpoint:
        first, second = download("org/tiny", endpoint, cache), download("org/tiny", endpoint, cache)
    offline = download("org/tiny", endpoint, cache)
    assert [done.stdout.split() for done in (first, second, offline)] == [kept] * 3, first.stderr


@pytest.mark.parametrize("name", ["org/unknown", "org/gated", "org/..bad"])
def test_models_that_cannot_be_had(tmp_path, name):
    with hub({}) as endpoint:
        online = download(name, endpoint, tmp_path)
    for done in (online, download(name, endpoint, tmp_path)):
        assert done.stderr.split()[-3:] == ["no-model", "model.path", name]


def test_a_resumed_run_keeps_its_copy(tmp_path, monkeypatch):
    """Nothing is downloaded: the run gets as far as its model's files, which are not there."""
    monkeypatch.setattr("coca_mindspeed.local.validation.download_model", lambda *_, **__: pytest.fail("downloaded"))
    write_rows(tmp_path / "train.jsonl", QUESTIONS)
    keys = [f"data.train={tmp_path}/train.jsonl", "data.evaluate=null", "evaluation.interval=0"]
    saved = f"{tmp_path}/models--org--tiny/snapshots/{COMMIT}"
    run = tmp_path / "run"
    write_marker(run, "run", {"id": "1"})
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    (run / "config.yaml").write_text(compose_run("local", [f"model.path={saved}", *keys]).to_yaml())
    with pytest.raises(ConfigError, match=f"model.path={saved}"):
        validate_run(compose_run("local", ["model.path=org/tiny", *keys]).run, run, resume=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True), ("openai/gsm8k:main:test", True), ("models/smollm2", False),
        ("data/train.jsonl", False), ("./org/name", False), ("/org/name", False), ("here/name", False), ("name", False),
    ],
)  # fmt: skip
def test_what_is_an_id(tmp_path, monkeypatch, text, expected):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(text) is expected
