"""The command line: help for every command, errors without tracebacks, exit codes."""

import re
import subprocess
import sys

import pytest

from coca_mindspeed import __version__
from coca_mindspeed.cli import COMMANDS, main
from coca_mindspeed.config.compose import ready_made_runs


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: coca-mindspeed {name}" in text


def test_help_lists_every_command_and_loads_none(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    code = "import sys; from coca_mindspeed.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_a_mistake_ends_with_one_line_and_a_code(capsys):
    assert main(["config", "show", "demoo"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert all(name in line for name in ready_made_runs())


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "evaluate" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_tables_fit_the_terminal(monkeypatch, capsys, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["config", "keys", "verl"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert any("coca.method.name" in line for line in lines)
    if columns > 100:  # in fewer columns the rows are printed as lists
        assert max(map(len, lines)) <= columns
    assert not any(line.startswith("| ") for line in lines)


def test_config_show_prints_yaml_that_composes(tmp_path, capsys):
    assert main(["config", "show", "demo", "method=joint"]) == 0
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out)
    assert main(["config", "show", str(tmp_path / "shown.yaml"), "seed=4"]) == 0
    assert "name: joint" in capsys.readouterr().out
    assert main(["config", "list"]) == 0
    assert "demo" in capsys.readouterr().out.split()
    assert main(["config", "keys"]) == 0
    assert "`rollout.group_size`" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough(tmp_path):
    """``coca-mindspeed config keys | head -1`` ends quietly."""
    command = f"{sys.executable} -m coca_mindspeed.cli config keys | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_overrides_may_stand_before_and_behind_the_options(tmp_path, capsys):
    arguments = ["train", "demo", "seed=1", "--output", str(tmp_path), "--quiet", "rollout.promts=3"]
    assert main(arguments) == 2
    assert "rollout.promts=3: unknown key" in capsys.readouterr().err
    for mistake in (["--outptu", "x"], ["prompts"]):
        with pytest.raises(SystemExit) as stopped:
            main(["train", "demo", "--output", str(tmp_path), "--quiet", *mistake])
        assert stopped.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err
