"""Help, exit codes and usage: 2 for wrong usage, with that of the subcommand; 1 for failures; 130 for ^C."""

import os
import subprocess
import sys

import pytest

from coca_mindspeed.cli import COMMANDS, main
from coca_mindspeed.cli import config as config_command
from tests.tables import read_table


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: coca-mindspeed {name}" in text


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    assert set(COMMANDS) <= set(capsys.readouterr().out.split())


def test_config_show_prints_yaml_that_composes(tmp_path, capsys):
    assert main(["config", "show", "demo", "method=joint"]) == 0
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out)
    assert main(["config", "show", str(tmp_path / "shown.yaml"), "seed=4"]) == 0
    assert "name: joint" in capsys.readouterr().out
    assert main(["config", "list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "laptop" in lines["demo"]
    assert "Ascend 910B" in lines["qwen25_7b_910b"]
    assert main(["config", "keys"]) == 0
    assert "`rollout.group_size`" in capsys.readouterr().out


def test_overrides_may_stand_before_and_behind_the_options(tmp_path, capsys):
    arguments = ["train", "demo", "seed=1", "--output", str(tmp_path), "--quiet", "rollout.promts=3"]
    assert main(arguments) == 2
    assert "rollout.promts=3: unknown key" in capsys.readouterr().err
    for mistake in (["--outptu", "x"], ["prompts"]):
        with pytest.raises(SystemExit) as stopped:
            main(["train", "demo", "--output", str(tmp_path), "--quiet", *mistake])
        assert stopped.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


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
        (["config", "show", "demo", "--resume"], "coca-mindspeed config show"),
        (["train", "demo", "--output", "x", "--outptu", "x"], "coca-mindspeed train"),
        (["data", "export", "verl", "--inputs"], "coca-mindspeed data export verl"),
        (["trian"], "coca-mindspeed"),
        (["train", "demo", "--output", ""], "coca-mindspeed train"),
    ],
)
def test_usage_is_that_of_the_subcommand(capsys, arguments, usage):
    error = usage_error(capsys, *arguments)
    assert error.startswith(f"usage: {usage} [-h]")
    assert error.splitlines()[-1].startswith(f"{usage}: error: ")


@pytest.mark.parametrize(
    ("split", "quoted"),
    [
        ("data.columns={question: text, answer: solution}", "'data.columns={question: text, answer: solution}'"),
        ("+data.grader_options={math: {seconds: 5}}", "'+data.grader_options={math: {seconds: 5}}'"),
        ("optimizer.betas=[0.9, 0.95]", "'optimizer.betas=[0.9, 0.95]'"),
        ("data.columns={question:", "'data.columns={question:'"),
    ],
)
@pytest.mark.parametrize("behind", [False, True])
def test_a_value_that_the_shell_has_split_is_to_be_quoted(capsys, split, quoted, behind):
    where = [[], split.split(" ")][:: -1 if behind else 1]
    assert quoted in usage_error(capsys, "train", "laptop", *where[1], "--output", "x", *where[0])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:  # a whole one is not meant
        main(["config", "show", "demo", 'model.chat_template_kwargs={a: "}"}', "--no"])
    assert stopped.value.code == 2
    assert "--no" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), read_table(__file__, "refused_usage.tsv"))
def test_what_is_typed_wrong_ends_with_two(capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("MINDSPEED_RL_HOME", raising=False)
    assert message in usage_error(capsys, *arguments.split())


def test_an_option_that_is_known_is_not_taken_for_a_misspelled_one(capsys):
    assert usage_error(capsys, "evaluate", "--output=o").endswith("are required: PATH\n")


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
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 1, "wandb"),
        (ModuleNotFoundError("No module named 'scipy.stats'", name="scipy.stats"), 1, "scipy"),
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


def test_any_locale_can_print_any_path(tmp_path):
    environment = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict"}
    path = os.fsencode(tmp_path) + b"/\xff\xe6\x95\xb0.yaml"
    command = [sys.executable, "-m", "coca_mindspeed.cli", "config", "show", path]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)
    assert b"Traceback" not in done.stderr
    assert b".yaml: " in done.stderr


@pytest.mark.parametrize("module", ["coca_mindspeed", "coca_mindspeed.cli"])
def test_the_package_and_its_module_are_programs(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, check=True, text=True)
    assert done.stdout.startswith("coca-mindspeed ")


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
Path("slow_module.py").write_text("import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\n")
sys.path.insert(0, "")
from coca_mindspeed.cli import config
config.run = lambda arguments: {what}
from coca_mindspeed.__main__ import main
sys.argv = ["coca-mindspeed", "config", "list"]
sys.exit(main())
"""


@pytest.mark.parametrize("what", ["__import__('slow_module')", "os.kill(os.getpid(), signal.SIGINT)"])
def test_an_interrupt_ends_in_one_line_also_while_modules_are_imported(tmp_path, what):
    """A module that catches what it can of an interrupt, as extension modules do, is not asked."""
    program = INTERRUPTED.replace("{what}", what)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "coca-mindspeed: interrupted\n")
