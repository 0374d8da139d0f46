"""The manifests of vLLM-Ascend and vLLM against their sources, which are parsed and not imported.

``VLLM_ASCEND_HOME`` and ``VLLM_ASCEND_MASTER_HOME`` name checkouts of the commits that the install guides of
MindSpeed-RL 2.3.0 and of its master pin; ``VLLM_HOME`` and ``VLLM_MASTER_HOME`` vLLM 0.9.1 and 0.11.0.
"""

import ast
import os
from pathlib import Path

import pytest

from coca_mindspeed.upstream.manifest import load_manifests, matching_manifest

#: Package and release -> variable with its checkout.
SOURCES = {
    ("vllm_ascend", "0.9.1"): "VLLM_ASCEND_HOME",
    ("vllm_ascend", "0.11.0"): "VLLM_ASCEND_MASTER_HOME",
    ("vllm", "0.9.1"): "VLLM_HOME",
    ("vllm", "0.11.0"): "VLLM_MASTER_HOME",
}
#: Release of vLLM-Ascend -> variable with the MindSpeed-RL that pins it.
PINNED_BY = {"0.9.1": "MINDSPEED_RL_HOME", "0.11.0": "MINDSPEED_RL_MASTER_HOME"}


def _checkout(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"needs a checkout: {variable} not set (docs/port.md)")
    return Path(os.environ[variable])


def _manifests():
    return {manifest.release: manifest for manifest in load_manifests(package="vllm_ascend")}


def test_every_release_has_a_manifest_that_changes_nothing():
    assert _manifests().keys() == PINNED_BY.keys()
    for manifest in _manifests().values():
        assert not [hook.target for hook in manifest.hooks if hook.acts or len(hook.sha256) != 64]


@pytest.mark.published
@pytest.mark.parametrize(("package", "release"), SOURCES)
def test_the_pinned_sources_match(package, release):
    root = _checkout(SOURCES[package, release])
    assert matching_manifest(root, package=package).release == release


@pytest.mark.published
@pytest.mark.parametrize("release", PINNED_BY)
def test_the_manifest_lists_everything_that_upstream_imports(release):
    root = _checkout(PINNED_BY[release])
    imported = {
        f"{node.module}:{alias.name}"
        for path in (root / "mindspeed_rl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_ascend.")
        for alias in node.names
    }
    imported -= {"vllm_ascend.patch:platform", "vllm_ascend.patch:worker"}  # imported for what their modules patch
    listed = {hook.target for hook in _manifests()[release].hooks}
    missing = {name for name in imported if not any(t == name or t.startswith(f"{name}.") for t in listed)}
    assert imported
    assert not missing
