"""A model of the Hugging Face hub in place of a directory: downloaded once, kept by a resumed run, and errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.local.run_directory import open_run_directory, with_stored
from coca_mindspeed.utils.directories import write_marker
from coca_mindspeed.utils.files import is_hub_id
from tests.hub_stub import COMMIT, hub

FILES = {"config.json": "{}", "model.safetensors": "weights", "pytorch_model.bin": "again", "tokenizer.json": "{}"}
DOWNLOAD = """
import sys
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.model_files import download_model
for name in sys.argv[1:]:
    try:
        print(*sorted(path.name for path in download_model(name, custom_code=False, show_progress=True).iterdir()))
    except ConfigError as error:
        print(*error.problems[0][:3])
"""


def download(names: list[str], endpoint: str, cache: Path) -> list[str]:
    """In a process of its own: huggingface_hub reads these variables when it is imported."""
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", DOWNLOAD, *names]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300).stdout.splitlines()


def test_a_model_is_downloaded_once_and_found_offline_and_others_are_refused(tmp_path):
    model, cache = tmp_path / "tiny", tmp_path / "cache"
    model.mkdir()
    for name, text in FILES.items():
        (model / name).write_text(text)
    refused = ["org/unknown", "org/gated", "org/..bad"]
    kept = "config.json model.safetensors tokenizer.json"
    with hub({"org/tiny": model}) as endpoint:
        online = download(["org/tiny", "org/tiny", *refused], endpoint, cache)
    offline = download(["org/tiny", *refused], endpoint, cache)
    assert online == [kept, kept, *(f"no-model model.path {name}" for name in refused)]
    assert offline == online[1:]


def test_a_resumed_run_keeps_its_copy(tmp_path):
    keys = ["data.train=train.jsonl", "data.evaluate=null", "evaluation.interval=0"]
    saved = f"{tmp_path}/models--org--tiny/snapshots/{COMMIT}"
    write_marker(tmp_path, "run", {"id": "1"})
    (tmp_path / "config.yaml").write_text(compose_run("local", [f"model.path={saved}", *keys]).to_yaml())
    with open_run_directory(tmp_path, resume=True) as found:
        for name, expected in (("org/tiny", saved), ("org/other", "org/other")):
            config = compose_run("local", [f"model.path={name}", *keys]).run
            assert with_stored(config, found).model.path == expected


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
