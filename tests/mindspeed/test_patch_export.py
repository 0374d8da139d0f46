"""The hooks as a patch: written for one checkout, applied and taken back by git, and recognised."""

import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from coca_mindspeed import __version__
from coca_mindspeed.cli import main
from coca_mindspeed.mindspeed.doctor import examine_machine
from coca_mindspeed.mindspeed.hooks import applied_patch, export_patch, is_patchable
from coca_mindspeed.upstream.machine import Machine
from coca_mindspeed.upstream.manifest import (
    Hook,
    Manifest,
    ManifestError,
    examine,
    fingerprint,
    load_manifests,
    manifest_directory,
    manifest_of,
    stack_of,
)

CHECKOUTS = {"2.3.0": "MINDSPEED_RL_HOME", "master": "MINDSPEED_RL_MASTER_HOME"}
FILES = {  # the second has no final newline, and the class that is hooked is at its end
    "mindspeed_rl/workers/actor_hybrid_worker.py": "from mindspeed_rl.base import Base\n\n\nclass A(Base): ...\n",
    "mindspeed_rl/base.py": "from math import sqrt\n\n\nclass Base:\n    def step(self):\n        return 1",
    "cli/run.py": "class Table:\n    entries = {}\n\n\n"
    "def run():\n    return 1\n\n\nif __name__ == '__main__':\n    run()\n",
}
TARGETS = {"mindspeed_rl.base:Base.step": "wrap", "mindspeed_rl.base:sqrt": "replace", "cli.run:run": "wrap"}


def apply_patch(patch, root, *options):
    subprocess.run(["git", "apply", *options, str(patch)], cwd=root, check=True)


@pytest.fixture
def fake(tmp_path):
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    hooks = [
        Hook(target, kind, "both", "a reason", fingerprint(root, target), replacement=f"tests.ours:hook{number}")
        for number, (target, kind) in enumerate(TARGETS.items())
    ]
    hooks += [
        Hook(
            target := "cli.run:Table.entries", "register", "both", "a reason", fingerprint(root, target),
            replacement="tests.ours:entry", key="loss",
        )
    ]  # fmt: skip
    host = replace(hooks[0], platform="host", replacement="tests.ours:host")
    return Manifest(tmp_path / "m.yaml", "1.0", "abc", (*hooks, host)), root


def written(manifest, root, file, **options):
    file.write_text(export_patch(manifest, root, **options))
    return file


def texts_of(root):
    return {name: (root / name).read_text() for name in FILES}


def comment(root, lines):
    """Add comments on top of every file, and change the newlines at its end: the fingerprints stay."""
    for number, name in enumerate(FILES):
        path = root / name
        path.write_text("# a line of a fork\n" * lines + path.read_text() + "\n# the end" * (number == 0))


@pytest.mark.parametrize("lines", [0, 5])
def test_a_patch_changes_only_what_the_hooks_name(fake, tmp_path, lines):
    manifest, root = fake
    comment(root, lines)
    before = texts_of(root)
    assert applied_patch(manifest, root) is None
    patch = written(manifest, root, tmp_path / "a.patch")
    apply_patch(patch, root)
    assert all(finding.matches for finding in examine(manifest, root))
    assert applied_patch(manifest, root) == __version__
    texts = texts_of(root)
    for name in FILES:
        assert texts[name] != before[name]
        compile(texts[name], name, "exec")
    assert texts["cli/run.py"].index("run = _coca_hook2(run)") < texts["cli/run.py"].index("if __name__")
    # Other modules register the same key behind the registry's own module.
    assert '_coca_Table.entries["loss"] = _coca_entry' in texts["mindspeed_rl/workers/actor_hybrid_worker.py"]
    assert "_coca_Base.step = _coca_hook0(_coca_Base.step)" in texts["mindspeed_rl/workers/actor_hybrid_worker.py"]
    assert "tests.ours import host" not in "".join(texts.values())  # platform host is hooked at run time
    apply_patch(patch, root, "-R")
    assert texts_of(root) == before


def test_a_patch_is_refused_by_other_files_than_those_that_it_was_written_for(fake, tmp_path):
    manifest, root = fake
    patch = written(manifest, root, tmp_path / "a.patch")
    (root / "mindspeed_rl/base.py").write_text("from math import sqrt\n\n\nclass Other: ...\n")
    before = texts_of(root)
    with pytest.raises(subprocess.CalledProcessError):
        apply_patch(patch, root)
    assert texts_of(root) == before


def test_the_shipped_form_has_the_same_lines_at_the_same_places(fake, tmp_path):
    manifest, root = fake
    without = written(manifest, root, tmp_path / "b.patch", context=0)
    apply_patch(written(manifest, root, tmp_path / "a.patch"), root)
    texts = texts_of(root)
    apply_patch(tmp_path / "a.patch", root, "-R")
    apply_patch(without, root, "--unidiff-zero")
    assert texts_of(root) == texts
    assert {line[:1] for line in without.read_text().splitlines()} == {"-", "+", "@"}


HALF = [
    ("mindspeed_rl/base.py", "sqrt = _coca_hook1\n", ""),
    ("cli/run.py", "run = _coca_hook2(run)", "pass"),
    ("cli/run.py", "if __name__", "from coca_mindspeed.gone import old as _coca_old\nif __name__"),
    ("cli/other.py", "", "# coca_mindspeed 0.1.0: hooks for release 1.0\n_coca_old = 1\n"),
    *((name, "", text) for name, text in FILES.items()),  # the file as it was before the patch
]


def edit(root, name, old, new):
    path = root / name
    path.write_text(path.read_text().replace(old, new, 1) if old else new)


@pytest.mark.parametrize(("name", "old", "new"), HALF)
def test_a_part_of_a_patch_or_more_than_it_is_refused(fake, tmp_path, name, old, new):
    manifest, root = fake
    apply_patch(written(manifest, root, tmp_path / "a.patch"), root)
    edit(root, name, old, new)
    assert all(finding.matches for finding in examine(manifest, root))
    with pytest.raises(ManifestError) as caught:
        applied_patch(manifest, root)
    assert name in str(caught.value)


@pytest.fixture
def known(fake, monkeypatch):
    """The checkout of a release that the package knows; the variable names it."""
    manifest, root = fake
    content = {"release": "1.0", "commit": "abc", "hooks": [asdict(hook) for hook in manifest.hooks]}
    stack = asdict(stack_of("2.3.0"))
    folder = root.parent / "manifests"
    folder.mkdir()
    (folder / "m.yaml").write_text(yaml.safe_dump(json.loads(json.dumps({**content, "stack": stack}))))
    monkeypatch.setattr("coca_mindspeed.upstream.manifest.manifest_directory", lambda: folder)
    monkeypatch.setenv("MINDSPEED_RL_HOME", str(root))
    return root


def doctors(root):
    found = examine_machine(Machine(environment={"MINDSPEED_RL_HOME": str(root)}), None)
    [checkout] = [each for each in found if each.problem.key == "MindSpeed-RL"]
    return checkout


def test_the_commands_write_a_patch_and_say_that_it_is_applied(known, tmp_path, capsys):
    patch = tmp_path / "a.patch"
    assert main(["patches", "verify"]) == 0
    printed = capsys.readouterr().out
    assert f"coca_mindspeed {__version__}" not in printed
    assert len(printed.splitlines()) == 1  # nothing differs
    assert __version__ not in doctors(known).problem.value
    assert main(["patches", "export", "--output", str(patch)]) == 0
    apply_patch(patch, known)
    assert main(["patches", "verify"]) == 0
    assert f"coca_mindspeed {__version__}" in capsys.readouterr().out
    assert doctors(known).ok
    assert f"coca_mindspeed {__version__}" in doctors(known).problem.value
    before = patch.read_bytes()
    assert main(["patches", "export", str(known), "--output", str(patch)]) == 1  # it would be applied twice
    assert patch.read_bytes() == before
    edit(known, "cli/run.py", f"coca_mindspeed {__version__}:", "coca_mindspeed 0.0.1:")  # the same lines
    assert main(["patches", "verify"]) == 0
    assert "coca_mindspeed 0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "old", "new"), HALF)
def test_the_commands_refuse_a_part_of_a_patch(known, tmp_path, capsys, name, old, new):
    patch = tmp_path / "a.patch"
    assert main(["patches", "export", "--output", str(patch)]) == 0
    apply_patch(patch, known)
    edit(known, name, old, new)
    capsys.readouterr()
    assert main(["patches", "verify"]) == 1
    assert name in capsys.readouterr().out
    assert not doctors(known).ok
    assert main(["patches", "export", "--output", str(tmp_path / "b.patch")]) == 1


def test_a_checkout_that_differs_is_named_with_its_patch_and_never_exported(known, tmp_path, capsys):
    patch = tmp_path / "a.patch"
    assert main(["patches", "export", "--output", str(patch)]) == 0
    apply_patch(patch, known)
    edit(known, "cli/run.py", "    return 1\n", "    return (\n")  # as a patch that was put into other lines leaves it
    capsys.readouterr()
    assert main(["patches", "verify"]) == 1
    assert f"coca_mindspeed {__version__}" in capsys.readouterr().out
    assert main(["patches", "export", "--output", str(tmp_path / "b.patch")]) == 1
    assert not (tmp_path / "b.patch").exists()
    (tmp_path / "verl").mkdir()
    assert main(["patches", "export", str(tmp_path), "--output", str(tmp_path / "b.patch")]) == 1


@pytest.mark.parametrize("release", CHECKOUTS)
def test_shipped_patches_only_insert_and_hold_every_hook(release):
    (manifest,) = (manifest for manifest in load_manifests() if manifest.release == release)
    lines = (manifest_directory() / f"mindspeed_rl_{release}.patch").read_text().splitlines()
    kinds = {line[:1] for line in lines if not line.startswith(("--- a/", "+++ b/", "@@ -"))}
    assert kinds == {"+"}  # no context and nothing removed: no line of MindSpeed-RL's
    assert {line for line in lines if line.startswith("+# coca_mindspeed")} == {
        f"+# coca_mindspeed {__version__}: hooks for release {release}"
    }
    for hook in filter(is_patchable, manifest.hooks):
        module, _, function = str(hook.replacement).partition(":")
        assert f"+from {module} import {function} as _coca_{function}" in lines


def git(root, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.mark.published
@pytest.mark.parametrize("release", CHECKOUTS)
@pytest.mark.parametrize("lines", [0, 5])
def test_patches_of_real_checkouts_apply_compile_and_are_taken_back(release, lines, tmp_path):
    """Of a release, and of a fork with comments on top of the files that are patched."""
    home = os.environ.get(CHECKOUTS[release])
    if not home:
        pytest.skip(f"needs a checkout: {CHECKOUTS[release]} is not set (docs/port.md)")
    shipped, root = (manifest_directory() / f"mindspeed_rl_{release}.patch").read_text(), tmp_path / "copy"
    assert export_patch(manifest_of(release), Path(home), context=0) == shipped
    names = [line.removeprefix("+++ b/") for line in shipped.splitlines() if line.startswith("+++ b/")]
    for folder in ("cli", "mindspeed_rl"):
        shutil.copytree(Path(home, folder), root / folder)
    for name in names[:5]:
        (root / name).write_text("# a line of a fork\n" * lines + (root / name).read_text())
    git(root, "init", "-q")
    git(root, "add", "--force", ".")
    git(root, "commit", "-q", "-m", "copy")
    patch = tmp_path / "a.patch"
    assert main(["patches", "export", str(root), "--output", str(patch)]) == 0
    apply_patch(patch, root)
    assert git(root, "status", "--porcelain").split() == [word for name in names for word in ("M", name)]
    for name in names:
        compile((root / name).read_text(), name, "exec")
    assert main(["patches", "verify", str(root), "--release", release]) == 0
    apply_patch(patch, root, "-R")
    assert git(root, "status", "--porcelain") == ""
