"""Manifests on a small fake package: verified without importing, applied only as a whole."""

import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from coca_mindspeed.cli import patches
from coca_mindspeed.mindspeed import hooks as hooks
from coca_mindspeed.upstream.manifest import (
    Hook,
    Manifest,
    ManifestError,
    examine,
    load_manifest,
    load_manifests,
    matching_manifest,
    normalise_source,
    skeleton,
    source_of,
)

FAKE = """
REGISTRY = {"old": 1}

def score(x):
    return x

class Base:
    def step(self):
        return "base"

class Trainer(Base):
    def fit(self):
        return "fit"

def relied_upon():
    return 0
"""


def wrapping(original):
    return lambda x: 10 * original(x)


def subclassing(original):
    class Sub(original):
        def fit(self):
            return "our " + str(super().fit())

    return Sub


REPLACEMENT = object()


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "fake_rl").mkdir()
    (tmp_path / "fake_rl" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "fake_rl" / "core.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hooks, "manifest_of_process", {})
    yield tmp_path
    for name in ("fake_rl", "fake_rl.core"):
        sys.modules.pop(name, None)


def _hook(root, target, kind, **fields):
    digest = hashlib.sha256(normalise_source(source_of(root, target)).encode()).hexdigest()
    return Hook(target=target, kind=kind, process="worker", reason="a test", sha256=digest, **fields)


def _manifest(root):
    here = "tests.mindspeed.test_manifest:"
    return Manifest(
        path=root / "fake.yaml",
        release="1.0",
        commit="abc",
        hooks=(
            _hook(root, "fake_rl.core:score", "wrap", replacement=here + "wrapping"),
            _hook(root, "fake_rl.core:Trainer", "subclass", replacement=here + "subclassing"),
            _hook(root, "fake_rl.core:REGISTRY", "register", key="new", replacement=here + "REPLACEMENT"),
            _hook(root, "fake_rl.core:Base.step", "replace", replacement=here + "REPLACEMENT"),
            _hook(root, "fake_rl.core:relied_upon", "use"),
        ),
    )


@pytest.fixture
def manifest(root):
    """Of a package that can be imported."""
    (root / "fake_rl" / "__init__.py").write_text("")
    return _manifest(root)


def _apply(manifest, root, processes=("worker",)):
    return hooks.apply(manifest, root, processes=processes, platform="npu", rollout="vllm")


def test_each_kind_of_hook(root, manifest):
    """The second wrapper is around the first; applying again changes nothing."""
    twice = replace(manifest, hooks=(manifest.hooks[0], *manifest.hooks))
    _apply(twice, root)
    _apply(twice, root)
    import fake_rl.core as core

    assert core.score(3) == 300
    assert core.Trainer().fit() == "our fit"
    assert core.REGISTRY == {"old": 1, "new": REPLACEMENT}
    assert core.Base.step is REPLACEMENT


@pytest.mark.parametrize(("rollout", "score"), [("vllm", 30), ("transformers", 3)])
def test_hooks_of_another_rollout_engine_are_left_out(root, manifest, rollout, score):
    _apply(replace(manifest, hooks=(replace(manifest.hooks[0], rollout=rollout), *manifest.hooks[1:])), root)
    import fake_rl.core as core

    assert core.score(3) == score


@pytest.mark.parametrize(("platform", "fit"), [("npu", "fit"), ("host", "our fit")])
@pytest.mark.parametrize("patched", [False, True])
def test_hooks_of_another_platform_and_those_of_a_patch_are_left_out(root, manifest, platform, fit, patched):
    """A wrapper around its own wrapper would give 300."""
    manifest = replace(manifest, hooks=(manifest.hooks[0], replace(manifest.hooks[1], platform="host")))
    if patched:
        (root / "a.patch").write_text(hooks.export_patch(manifest, root))
        subprocess.run(["git", "apply", "a.patch"], cwd=root, check=True)
    hooks.apply(manifest, root, processes=("worker",), platform=platform, rollout="vllm")
    import fake_rl.core as core

    assert (core.score(3), core.Trainer().fit()) == (30, fit)


def test_a_further_process_adds_its_own_hooks_only(root, manifest):
    driver_hook = replace(manifest.hooks[1], process="driver")
    manifest = replace(manifest, hooks=(manifest.hooks[0], driver_hook))
    _apply(manifest, root)
    import fake_rl.core as core

    assert core.Trainer().fit() == "fit"
    _apply(manifest, root, ("worker", "driver"))
    assert core.Trainer().fit() == "our fit"
    assert core.score(1) == 10


def test_another_release_is_refused_while_one_is_applied(root, manifest):
    _apply(manifest, root)
    with pytest.raises(ManifestError, match=r"1\.0 is already"):
        _apply(replace(manifest, release="2.0"), root)


def test_an_edited_definition_stops_everything(root, manifest):
    core_file = root / "fake_rl" / "core.py"
    core_file.write_text(FAKE.replace("return 0", "return 1"))
    with pytest.raises(ManifestError, match=r"fake_rl\.core:relied_upon"):
        _apply(manifest, root)
    import fake_rl.core as core

    assert core.score(3) == 3


@pytest.mark.parametrize("bad", ["tests.mindspeed.test_manifest:missing", "tests.mindspeed.no_such_module:x"])
def test_a_replacement_that_cannot_be_found_changes_nothing(root, manifest, bad):
    broken = replace(manifest, hooks=(*manifest.hooks, replace(manifest.hooks[0], replacement=bad)))
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        _apply(broken, root)
    import fake_rl.core as core

    assert core.score(3) == 3
    assert core.REGISTRY == {"old": 1}


def test_an_inherited_method_is_refused(root, manifest):
    inherited = replace(manifest.hooks[3], target="fake_rl.core:Trainer.step")
    with pytest.raises(ManifestError, match="has no 'step'"):
        _apply(replace(manifest, hooks=(inherited,)), root)


def test_a_package_imported_from_elsewhere_is_refused(root, manifest, tmp_path_factory):
    verified = tmp_path_factory.mktemp("other")
    (verified / "fake_rl").mkdir()
    (verified / "fake_rl" / "core.py").write_text(FAKE)
    with pytest.raises(ManifestError, match="but Python imports"):
        _apply(manifest, verified)


def test_the_closest_release_is_named_where_none_matches(root):
    manifest = _manifest(root)
    other = replace(manifest, release="2.0", hooks=tuple(replace(h, sha256="0" * 64) for h in manifest.hooks))
    (root / "fake_rl" / "core.py").write_text(FAKE.replace("return x", "return -x"))
    with pytest.raises(ManifestError, match=r"1 of 5 .* 1\.0, .*fake_rl.core:score"):
        matching_manifest(root, [other, manifest])


@pytest.mark.parametrize(
    ("severity", "engine", "new", "refused"),
    [
        ("contract", None, "return 1", True),
        ("text", None, "return 1", False),
        ("text", None, None, True),  # it is gone
        ("contract", "fsdp", "return 1", True),
        ("contract", "megatron", "return 1", False),  # of an engine that the run does not use
    ],
)
def test_a_changed_text_warns_and_a_changed_contract_is_refused(root, capsys, severity, engine, new, refused):
    manifest = _manifest(root)
    *others, relied = manifest.hooks
    manifest = replace(manifest, hooks=(*others, replace(relied, severity=severity, engine=engine)))
    edited = FAKE.replace("return 0", new) if new else FAKE.replace("relied_upon", "renamed")
    (root / "fake_rl" / "core.py").write_text(edited)
    if refused:
        with pytest.raises(ManifestError, match=r"fake_rl\.core:relied_upon"):
            matching_manifest(root, [manifest], engine="fsdp")
    else:
        assert matching_manifest(root, [manifest], engine="fsdp") is manifest
    assert ("fake_rl.core:relied_upon" in capsys.readouterr().err) == (not refused and engine is None)


def test_a_skeleton_has_the_fingerprints_found(root):
    """Verifying never imports."""
    manifest = _manifest(root)
    assert all(finding.matches for finding in examine(manifest, root))
    assert "fake_rl" not in sys.modules
    (root / "fake_rl" / "core.py").write_text(FAKE.replace("return x", "return -x").replace("class Trainer", "class T"))
    content = skeleton(manifest, root, "1.1", "def")
    assert (content["release"], content["commit"]) == ("1.1", "def")
    assert len(content["hooks"][0]["sha256"]) == 64
    assert content["hooks"][0]["sha256"] != manifest.hooks[0].sha256
    assert "no 'Trainer'" in content["hooks"][1]["sha256"]
    assert content["hooks"][4]["sha256"] == manifest.hooks[4].sha256


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kind": "patch"}, "kind='patch'"),
        ({"replacement": None}, "replacement=null"),
        ({"key": "x"}, "key='x'"),
        ({"colour": "red"}, "colour='red'"),
    ],
)
def test_a_manifest_that_is_wrong_names_file_and_key(tmp_path, change, key):
    entry = {"target": "a:b", "kind": "wrap", "replacement": "c:d", "process": "both", "reason": "r", "sha256": "0"}
    entry = {k: v for k, v in {**entry, **change}.items() if v is not None}
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({"release": "1", "commit": "c", "hooks": [entry]}))
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert f"{path}: hooks.0.{key}: " in str(caught.value)


def test_the_shipped_manifests_are_whole():
    manifests = load_manifests()
    assert {m.release for m in manifests} == {"2.3.0", "master"}
    released, master = ({h.target: (h.kind, h.replacement) for h in m.hooks} for m in manifests)
    assert released.keys() == master.keys()
    assert {target for target in released if released[target] != master[target]} == {
        "mindspeed_rl.models.rollout.vllm_engine:VLLMInferEngine.generate_sequences"  # only master drops special tokens
    }
    for manifest in [*manifests, *load_manifests(package="vllm")]:
        assert all(len(hook.sha256) == 64 for hook in manifest.hooks)
        for hook in manifest.hooks:
            if hook.replacement is not None:
                module, _, name = hook.replacement.partition(":")
                assert source_of(Path(__file__).parents[2], f"{module}:{name}")


def test_the_command_says_what_differs(root, capsys):
    import argparse

    (root / "mindspeed_rl").mkdir()
    parser = argparse.ArgumentParser()
    patches.add_arguments(parser)
    assert patches.run(parser.parse_args(["verify", str(root)])) == 1
    verdict, *rest = capsys.readouterr().out.splitlines()
    assert re.match(r"\d+ of \d+ .*cli\.train_grpo:train", verdict)
    assert len(rest) > len(load_manifests()[0].hooks)
    assert patches.run(parser.parse_args(["fingerprint", str(root), "--release", "9", "--commit", "c"])) == 0
    assert yaml.safe_load(capsys.readouterr().out)["release"] == "9"
