"""The command: what it checks before it listens, and where it listens."""

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from coca_mindspeed.local.tiny_model import write_tiny_model
from coca_mindspeed.utils.directories import write_marker
from coca_router.cli import main
from tests.router.test_pinned import calibrated
from tests.support.waiting import until

CONFIG = {
    "backends": {"a": {"url": "http://127.0.0.1:9/v1", "model": "small"}},
    "tiers": [{"name": "t", "backend": "a", "bands": [{"at_least": 0, "action": "answer"}]}],
}


def written(tmp_path, **sections):
    path = tmp_path / "serving.yaml"
    path.write_text(json.dumps({**CONFIG, **sections}))
    return str(path)


def test_it_checks_before_it_listens(tmp_path, capsys):
    config = written(tmp_path, tiers=[{**CONFIG["tiers"][0], "calibration": "map.json"}])
    assert main(["serve", config, "--check"]) == 1
    assert "map.json: cannot be read" in capsys.readouterr().err
    calibrated(tmp_path / "map.json")
    assert main(["serve", config, "--check"]) == 0
    assert "can be served" in capsys.readouterr().out
    for arguments in ([], [config, "--model", str(tmp_path)]):
        assert main(["serve", *arguments]) == 2
        assert "CONFIG" in capsys.readouterr().err
    write_tiny_model(tmp_path / "tiny", 0)
    assert main(["serve", "--model", str(tmp_path / "tiny"), "--check"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}: can be served\n"


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("0.0.0.0", None, True),
        ("192.0.2.7", None, True),
        ("model-host", None, True),
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", "PROXY_KEY", False),
    ],
)
def test_without_a_key_it_warns_where_others_can_reach_it(host, key, warned, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PROXY_KEY", "secret")
    config = written(tmp_path, listen={"host": host, "api_key_env": key})
    assert main(["serve", config, "--check"]) == 0
    err = capsys.readouterr().err
    assert ("warning: " in err) == warned
    assert "secret" not in err
    # The command line may say otherwise than the file.
    assert main(["serve", config, "--check", "--host", "0.0.0.0"]) == 0
    assert ("listen.api_key_env" in capsys.readouterr().err) == (key is None)


def test_a_model_is_served_on_this_machine_alone_until_it_is_told_to_stop(tmp_path):
    write_tiny_model(tmp_path / "tiny", 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def answers(host):
        try:
            return httpx.get(f"http://{host}:{port}/health", timeout=60).status_code == 200
        except httpx.ConnectError:
            return False

    command = [sys.executable, "-m", "coca_router", "serve", "--model", str(tmp_path / "tiny"), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: answers("127.0.0.1"), 120)
            assert not answers("127.0.0.2")  # which a server on every address would answer too
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, -signal.SIGTERM)  # uvicorn ends, then raises the signal anew
            assert f"loading {tmp_path / 'tiny'}" in process.stderr.read()
        finally:
            process.kill()


def test_a_port_that_is_taken_names_the_option(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", written(tmp_path), "--port", str(taken.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert all(name in error for name in ("--port", "listen.port"))


@pytest.mark.parametrize(
    ("url", "dialect", "warned"),
    [
        ("http://127.0.0.1:9", "vllm", True),
        ("http://127.0.0.1:9/", "openai", True),
        ("http://127.0.0.1:9/large", "vllm", True),
        ("http://user:secret@127.0.0.1:9", "openai", True),
        ("http://127.0.0.1:9?key=secret", "openai", True),
        ("http://127.0.0.1:9/large/v1/", "vllm", False),
        ("http://127.0.0.1:9/v1beta/openai", "openai", False),  # not all servers serve /v1
    ],
)
def test_a_url_without_its_path_is_noticed(url, dialect, warned, tmp_path, capsys):
    config = written(tmp_path, backends={"a": {"url": url, "model": "small", "dialect": dialect}})
    assert main(["serve", config, "--check"]) == 0
    err = capsys.readouterr().err
    assert ("warning: backends.a.url" in err) == warned
    assert "secret" not in err


def test_a_run_directory_stands_for_its_model(tmp_path, capsys):
    run = tmp_path / "run"
    write_marker(run, "run")
    write_tiny_model(run / "model", 0)
    assert main(["serve", "--model", str(run), "--check"]) == 0
    assert f"loading {run / 'model'}\n" in capsys.readouterr().err
    (run / "predictions_after.jsonl").touch()
    assert main(["calibrate", str(run), "--model", "small", "--output", str(tmp_path / "map.json")]) == 1
    assert f"{run}/predictions_after.jsonl" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none.yaml"), "--check"]) == 1
    assert "none.yaml: cannot be read: No such file or directory" in capsys.readouterr().err
