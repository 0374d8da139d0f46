"""The plugin without verl: it imports nothing heavy, its manifest is complete, and resumed runs are compared."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.upstream.manifest import load_manifests, source_of
from coca_mindspeed.utils.directories import MARKER
from coca_mindspeed.utils.json_files import read_object, write_json
from coca_mindspeed.verl.checkpoints import check_length, check_resume
from coca_mindspeed.verl.register import REGISTRIES
from coca_mindspeed.verl.settings import VerlSettings

ROOT = Path(__file__).parents[2]


def test_loading_the_plugin_imports_neither_verl_nor_anything_heavy():
    """Verl does it in every one of its processes."""
    heavy = ("torch", "verl", "ray", "transformers", "pydantic", "numpy")
    code = f"import sys, coca_mindspeed.verl.register; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_registry_is_filled_right_after_its_module_is_imported(tmp_path):
    for name in (*REGISTRIES, *REGISTRIES.values()):
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
    for folder in [tmp_path / "verl", *(tmp_path / "verl").rglob("*/")]:
        (folder / "__init__.py").touch()
    (tmp_path / "verl/trainer/ppo/v1/trainer_sync.py").write_text("print('the registry')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib; import coca_mindspeed.verl.register\n"
        "importlib.import_module = print  # ours needs verl itself\n"
        "import verl.trainer.ppo.v1; print('imported'); import verl.trainer.ppo.v1.trainer_sync\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["imported", "the registry", "coca_mindspeed.verl.trainer"]


def test_the_shipped_manifest_is_whole():
    (manifest,) = load_manifests(package="verl")
    assert manifest.release == "0.9.1"
    (entry,) = [e for e in importlib.metadata.entry_points(group="verl.plugins") if e.name == "coca"]
    assert entry.value == "coca_mindspeed.verl.register"
    for hook in manifest.hooks:
        assert len(hook.sha256) == 64
        assert hook.target.startswith("verl.")
        if hook.replacement is not None:
            assert source_of(ROOT, hook.replacement)


@pytest.mark.parametrize(("stored", "problems"), [({}, []), ({"advantage_ddof": 0}, ["coca.method.advantage_ddof"])])
def test_keys_that_a_later_release_adds_have_their_defaults_in_an_earlier_run(tmp_path, stored, problems):
    check_resume(tmp_path, VerlSettings(), 10, 0)
    before = read_object(tmp_path / MARKER)
    section = before["settings"]["coca"]
    del section["require_evaluated"], section["method"]["advantage_ddof"], section["method"]["separate_format"]
    section["method"] |= stored
    write_json(tmp_path / MARKER, before)
    if not problems:
        check_resume(tmp_path, VerlSettings(), 10, 5)
        return
    with pytest.raises(ConfigError) as caught:
        check_resume(tmp_path, VerlSettings(), 10, 5)
    assert [problem.key for problem in caught.value.problems] == problems


def test_a_run_is_not_resumed_on_other_records(tmp_path):
    """Changed ones, others in their place, or fewer; a copy elsewhere is the same."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text(file.name)
    given = [str(file) for file in files]
    check_resume(tmp_path, VerlSettings(), 10, 0, train_files=given)
    check_resume(
        tmp_path, VerlSettings(), 10, 5, train_files=[str(shutil.copy(file, f"{file}.copy")) for file in files]
    )
    files[1].write_text("changed")
    for asked, numbers in ((given, [1]), (given[::-1], [0, 1]), (given[:1], [1])):
        with pytest.raises(ConfigError) as caught:
            check_resume(tmp_path, VerlSettings(), 10, 5, train_files=asked)
        keys = [f"data.train_files.{number}" for number in numbers]
        assert [(problem.code, problem.key.removesuffix(".sha256")) for problem in caught.value.problems] == [
            ("another-run", key) for key in keys
        ]


def test_a_resumed_run_is_the_same_run(tmp_path):
    check_resume(tmp_path, VerlSettings(), 10, 0)
    check_resume(tmp_path, VerlSettings(), 20, 5)  # longer is the same run, but for a method with stages
    changed = VerlSettings.model_validate({"method": {"name": "joint", "clip": 0.1}})
    with pytest.raises(ConfigError) as caught:
        check_resume(tmp_path, changed, 10, 5)
    assert [problem[:3] for problem in caught.value.problems] == [
        ("another-run", "coca.method.clip", 0.1),
        ("another-run", "coca.method.entropy_bonus", None),
        ("another-run", "coca.method.name", "joint"),
    ]
    check_resume(tmp_path, changed, 10, 0)
    assert read_object(tmp_path / MARKER)["settings"]["coca"]["method"]["name"] == "joint"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")  # stopped before its own first checkpoint
    with pytest.raises(ConfigError, match="'joint', found 'coca'"):
        check_resume(tmp_path, VerlSettings(), 10, 0)
    check_resume(tmp_path, changed, 10, 0)
    graded = {"grader": "exact", "grading": {"math": {"boxed_only": True}}, "require_evaluated": False}
    for key, value in graded.items():
        with pytest.raises(ConfigError) as caught:
            check_resume(tmp_path, changed.model_copy(update={key: value}), 10, 5)
        assert caught.value.problems[0].key.startswith(f"coca.{key}")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    sequential = VerlSettings.model_validate({"method": {"name": "sequential"}})
    check_resume(tmp_path, sequential, 10, 0)
    with pytest.raises(ConfigError, match="total_training_steps=10, found 20"):
        check_resume(tmp_path, sequential, 20, 5)
    for steps, epochs in ((12, 3), (1, 1)):
        check_length(steps, 4, epochs)
    with pytest.raises(ConfigError) as caught:  # it would end before its last step
        check_length(13, 4, 3)
    assert (caught.value.problems[0].code, caught.value.problems[0].value) == ("length", 13)
