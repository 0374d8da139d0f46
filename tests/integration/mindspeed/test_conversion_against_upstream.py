"""What ``launch/convert_weights.sh`` relies upon in MindSpeed-LLM's converter, read from its sources."""

import ast
import os
from pathlib import Path

import pytest

from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.mindspeed import conversion
from coca_mindspeed.mindspeed.resolved_config import resolve_config

HOME = os.environ.get("MINDSPEED_LLM_HOME")
pytestmark = pytest.mark.skipif(HOME is None, reason="MINDSPEED_LLM_HOME is not set")


def _parse(*parts: str) -> ast.Module:
    return ast.parse(Path(str(HOME)).joinpath(*parts).read_text(encoding="utf-8"))


def _function(module: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [call for call in ast.walk(node) if isinstance(call, ast.Call)]


def test_the_new_weights_are_where_we_look_for_them() -> None:
    saver = _parse("mindspeed_llm", "tasks", "checkpoint", "saver.py")
    joined = [call for call in _calls(_function(saver, "save_huggingface")) if ast.unparse(call.func) == "os.path.join"]
    (folder,) = joined
    assert [ast.unparse(argument) for argument in folder.args] == ["args_cmd.save_dir", repr(conversion.NEW_WEIGHTS)]


def test_modes_are_still_changed() -> None:
    """Once they are not, remembering them can go."""
    saver = _parse("mindspeed_llm", "tasks", "checkpoint", "saver.py")
    names = {ast.unparse(call) for call in _calls(_function(saver, "save_model"))}
    assert "update_save_checkpoint_chmod(args_cmd.save_dir)" in names
    training = _parse("mindspeed_llm", "training", "training.py")
    assert "os.chmod" in {ast.unparse(c.func) for c in _calls(_function(training, "update_save_checkpoint_chmod"))}


@pytest.mark.parametrize("direction", ["hf2mcore", "mcore2hf"])
def test_the_converter_knows_our_options(direction: str) -> None:
    known: dict[str, list[str] | None] = {}
    loader = "loader_hf" if direction == "hf2mcore" else "loader_mg"
    checkpoint = ("mindspeed_llm", "tasks", "checkpoint")
    for path in (("convert_ckpt.py",), (*checkpoint, f"{loader}.py"), (*checkpoint, "saver.py")):
        for call in _calls(_parse(*path)):
            if ast.unparse(call.func).endswith("add_argument") and isinstance(call.args[0], ast.Constant):
                choices = next((word.value for word in call.keywords if word.arg == "choices"), None)
                known[str(call.args[0].value)] = None if choices is None else ast.literal_eval(choices)
    run = compose_run("qwen25_7b_910b").run
    arguments = conversion.converter_arguments(direction, run, resolve_config(run), Path("runs/x"))
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option.startswith("--"):
            assert option in known
            if (choices := known[option]) is not None:
                assert value in choices
