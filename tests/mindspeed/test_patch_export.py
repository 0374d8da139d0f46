"""The hooks as a patch: shipped files are regenerated, inserts only, applied by git, and left out at run time."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.mindspeed.hooks import export_patch, is_patchable, patched_hooks
from coca_mindspeed.upstream.manifest import (
    Hook,
    Manifest,
    ManifestError,
    examine,
    fingerprint,
    load_manifests,
    manifest_directory,
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
    command = ["git", "apply", "--unidiff-zero", *options, str(patch)]
    subprocess.run(command, cwd=root, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)})


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


def test_a_patch_changes_only_what_the_hooks_name(fake, tmp_path):
    manifest, root = fake
    assert patched_hooks(manifest, root) == set()
    (tmp_path / "a.patch").write_text(export_patch(manifest, root))
    apply_patch(tmp_path / "a.patch", root)
    assert all(finding.matches for finding in examine(manifest, root))
    assert patched_hooks(manifest, root) == set(manifest.hooks[:4])  # platform host is hooked at run time
    texts = {name: (root / name).read_text() for name in FILES}
    for name, before in FILES.items():
        assert texts[name] != before
        compile(texts[name], name, "exec")
    assert texts["cli/run.py"].index("run = _coca_hook2(run)") < texts["cli/run.py"].index("if __name__")
    # Other modules register the same key behind the registry's own module.
    assert '_coca_Table.entries["loss"] = _coca_entry' in texts["mindspeed_rl/workers/actor_hybrid_worker.py"]
    assert "_coca_Base.step = _coca_hook0(_coca_Base.step)" in texts["mindspeed_rl/workers/actor_hybrid_worker.py"]
    apply_patch(tmp_path / "a.patch", root, "-R")
    assert {name: (root / name).read_text() for name in FILES} == FILES


@pytest.mark.parametrize("lost", ["sqrt = _coca_hook1", "run = _coca_hook2(run)"])
def test_a_part_of_a_patch_is_refused(fake, tmp_path, lost):
    manifest, root = fake
    (tmp_path / "a.patch").write_text(export_patch(manifest, root))
    apply_patch(tmp_path / "a.patch", root)
    for name in FILES:
        path = root / name
        path.write_text(path.read_text().replace(lost, "pass"))
    with pytest.raises(ManifestError, match=str(root)):
        patched_hooks(manifest, root)


@pytest.mark.published
@pytest.mark.parametrize("release", CHECKOUTS)
def test_shipped_patches_only_insert_and_hold_every_hook(release):
    (manifest,) = (manifest for manifest in load_manifests() if manifest.release == release)
    lines = (manifest_directory() / f"mindspeed_rl_{release}.patch").read_text().splitlines()
    kinds = {line[:1] for line in lines if not line.startswith(("--- a/", "+++ b/", "@@ -"))}
    assert kinds == {"+"}  # no context and nothing removed: no line of MindSpeed-RL's
    for hook in filter(is_patchable, manifest.hooks):
        module, _, function = str(hook.replacement).partition(":")
        assert f"+from {module} import {function} as _coca_{function}" in lines


@pytest.mark.published
@pytest.mark.parametrize("release", CHECKOUTS)
def test_shipped_patches_are_regenerated_and_apply(release, tmp_path):
    home = os.environ.get(CHECKOUTS[release])
    if not home:
        pytest.skip(f"needs a checkout: {CHECKOUTS[release]} is not set (docs/port.md)")
    shipped, written = manifest_directory() / f"mindspeed_rl_{release}.patch", tmp_path / "new.patch"
    assert main(["patches", "export", release, "--mindspeed-rl", home, "--output", str(written)]) == 0
    assert written.read_text() == shipped.read_text()
    apply_patch(shipped, Path(home), "--check")
    root = tmp_path / "copy"
    for folder in ("cli", "mindspeed_rl"):
        shutil.copytree(Path(home, folder), root / folder)
    apply_patch(shipped, root)
    assert main(["patches", "verify", str(root), "--release", release]) == 0
    assert main(["patches", "export", release, "--mindspeed-rl", str(root), "--output", str(written)]) == 1
