"""Exit codes and usage: 2 for what is typed wrong, with the subcommand's own usage; 1 for failures; 130 for ^C."""

import argparse
import os
import signal
import subprocess
import sys

import pytest

from coca_mindspeed import cli
from coca_mindspeed.cli import COMMANDS, main
from coca_mindspeed.cli import config as config_command


def usage_error(capsys, *arguments):
    """What is printed on a usage error; argparse ends by SystemExit, our own checks return the code."""
    try:
        code = main([*map(str, arguments)])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["patches", "verify", "PATH", "too", "many"], "coca-mindspeed patches verify"),
        (["patches", "fingerprint"], "coca-mindspeed patches fingerprint"),
        (["config", "list", "more"], "coca-mindspeed config list"),
        (["config", "show", "demo", "--resume"], "coca-mindspeed config show"),
        (["train", "demo", "--output", "x", "--outptu", "x"], "coca-mindspeed train"),
        (["data", "inspect", "a", "b"], "coca-mindspeed data inspect"),
        (["data", "export", "verl", "--inputs"], "coca-mindspeed data export verl"),
        (["doctor", "--onlyproblems"], "coca-mindspeed doctor"),
        (["trian"], "coca-mindspeed"),
        (["train", "demo", "--output", ""], "coca-mindspeed train"),
    ],
)
def test_usage_is_that_of_the_subcommand(capsys, arguments, usage):
    error = usage_error(capsys, *arguments)
    assert error.startswith(f"usage: {usage} [-h]")
    assert error.splitlines()[-1].startswith(f"{usage}: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "show", "demoo"], "'demo'"),
        (["config", "show", "demo", "rollout.promts=3"], "'prompts'"),
        (["config", "show", "demo", "method=coka"], "'coca'"),
        (["config", "get", "demo", "rollout.promts"], "'prompts'"),
        (["reproduce", "--seeds", "3"], "python -m experiments.reproduce"),
        (["import-gguf", "a.gguf", "hf"], "python -m experiments.gguf_import"),
        (["data", "real-world", "--output", "o"], "python -m experiments.real_world"),
        (["check", "qwen25_7b_910b", "--stage", "-1"], "--stage: "),
        (["trian"], "'train'"),
        (["data", "prepare", "bigmath", "--input", "x", "--output", "o"], "'big_math'"),
        (["data", "prepair"], "'prepare'"),
        (["config", "show", "no.yaml"], "no.yaml: "),
        (["patches", "verify"], "MINDSPEED_RL_HOME"),
        (["data", "inspect", "x.jsonl", "--show", "-1"], "--show: "),
        (["data", "prepare", "records", "--hub", "--output", "o"], "--hub"),
        (["demo", "--seed", "-1"], "--seed: "),
        (["report"], "--paper"),
        (["report", "--paper", "x"], "--paper"),
        (["report", "--paper", "--compare-paper"], "--compare-paper"),
        (["report", "x", "--samples", "-1"], "--samples: "),
        (["report", "x", "--replicates", "0"], "--replicates: "),
        (["report", "x", "--seed", "-1"], "--seed: "),
        (["report", "x", "--compare-paper", "gpt/math"], "'gpt/math'"),
        (["evaluate", "x", "--output", "o", "--bins", "0"], "--bins: "),
        (["evaluate", "x", "--output", "o", "--replicates", "0"], "--replicates: "),
        (["evaluate", "x", "--output", "o", "--format", "rollouts", "--decimals", "0"], "--decimals: "),
        (["evaluate", "x", "--output", "o", "--decimals", "2"], "--decimals: "),
        (["evaluate", "x", "--output", "o", "--format", "responses"], "--gold"),
        (["watch", "x", "--interval", "0"], "--interval: "),
        (["watch", "x", "--interval", "nan"], "--interval: "),
        (["calibrate", "x", "--output", "o", "--folds", "1"], "--folds: "),
        (["calibrate", "x", "--output", "o", "--risk", "nan"], "--risk: "),
        (["calibrate", "x", "--output", "o", "--risk", "1.5"], "--risk: "),
        (["calibrate", "x", "--output", "o", "--confidence", "1"], "--confidence: "),
        (["calibrate", "x", "--output", "o", "--temperature", "3"], "--temperature: "),
        (["calibrate", "x", "--output", "o", "--shrinkage", "-1"], "--shrinkage: "),
        (["route", "x", "y", "--replicates", "0"], "--replicates: "),
        (["serve", "--model", "x", "--port", "65536"], "--port: "),
        (["serve", "--model", "x", "--threads", "0"], "--threads: "),
        (["serve", "--model", "x", "--max-tokens", "0"], "--max-tokens: "),
        (["serve", "--model", "x", "--device", "abacus"], "--device: "),
    ],
)
def test_what_is_typed_wrong_ends_with_two(capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("MINDSPEED_RL_HOME", raising=False)
    assert message in usage_error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "--samples: "),
        (["--batch", "0"], "--batch: "),
        (["--max-new-tokens", "0"], "--max-new-tokens: "),
        (["--probe-width", "0"], "--probe-width: "),
        (["--assessor-lr", "-1"], "--assessor-lr: "),
        (["--assessor-epochs", "0"], "--assessor-epochs: "),
        (["--seed", "-1"], "--seed: "),
        (["--device", "abacus"], "--device: "),
        ([], "--train"),
    ],
)
def test_what_is_typed_wrong_of_a_baseline(capsys, arguments, message):
    command = ["baseline", "probe", "--model", "m", "--data", "d", "--output", "o", *arguments]
    assert message in usage_error(capsys, *command)


def every_option(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for of_action in action.choices.values():
                yield from every_option(of_action)
        else:
            yield action


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_has_a_range(command):
    options = list(every_option(cli._parser([command])._subparsers._group_actions[0].choices[command]))
    assert options
    # How many layers there are to read from is up to the model.
    assert [action.dest for action in options if action.type in (int, float) and action.dest != "layer"] == []


def test_a_release_that_is_not_known(tmp_path, capsys):
    (tmp_path / "mindspeed_rl").mkdir()
    assert "'9.9'" in usage_error(capsys, "patches", "verify", tmp_path, "--release", "9.9")


def test_a_stage_that_the_method_does_not_have(capsys):
    assert "0 to 0" in usage_error(capsys, "check", "qwen25_7b_910b", "--quiet", "--stage", "7")


def test_what_a_file_says_wrong_ends_with_one(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [demo, _self_]\nseed: red\n")
    assert main(["config", "show", str(tmp_path / "mine.yaml")]) == 1
    assert "seed='red'" in capsys.readouterr().err


def raising(error):
    def run(arguments):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileExistsError(17, "File exists", "/data/out"), 1, "/data/out: File exists"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 1, "pip install '.[wandb]'"),
        (
            ModuleNotFoundError("No module named 'scipy.stats'", name="scipy.stats"),
            1,
            "'scipy'",
        ),
    ],
)
def test_surroundings_that_fail_give_one_line(capsys, monkeypatch, error, code, message):
    monkeypatch.setattr(config_command, "run", raising(error))
    assert main(["config", "list"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("coca-mindspeed: ")
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_mistakes_of_our_own_keep_their_traceback(monkeypatch):
    for error in (ModuleNotFoundError("No module", name="coca_mindspeed.nothing"), KeyError("x")):
        monkeypatch.setattr(config_command, "run", raising(error))
        with pytest.raises(type(error)):
            main(["config", "list"])


def test_an_interrupt_while_a_command_is_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert main(["config", "list"]) == 130
    assert capsys.readouterr().err == "coca-mindspeed: interrupted\n"


def test_control_c_ends_a_process_with_130(tmp_path):
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "coca_mindspeed.cli", "data", "inspect", str(pipe)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with pipe.open("w"):  # open as soon as the command reads from it, which then waits for a line
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=200)
    assert process.returncode == 130
    assert error == "coca-mindspeed: interrupted\n"


@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict"}, {"PYTHONUTF8": "1"}])
def test_any_locale_can_print_any_path(tmp_path, environment):
    path = os.fsencode(tmp_path) + b"/\xff\xe6\x95\xb0.yaml"
    command = [sys.executable, "-m", "coca_mindspeed.cli", "config", "show", path]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)
    assert b"Traceback" not in done.stderr
    assert b".yaml: " in done.stderr
