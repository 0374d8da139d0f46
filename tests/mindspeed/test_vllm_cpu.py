"""What is wrapped of vLLM's build for CPUs, on stand-ins; the real one: tests/integration/mindspeed_vllm."""

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coca_mindspeed.mindspeed.host_platform import stand_ins, vllm_cpu
from coca_mindspeed.upstream.manifest import ManifestError

EDIT = Path(__file__).parents[2] / "requirements" / "mindspeed_vllm_edit.py"


def test_float32_is_asked_about_as_bfloat16() -> None:
    asked: list[Any] = []

    def upstream(_self: Any, model_config: Any) -> bool:
        asked.append(model_config.dtype)
        return bool(model_config.fine)

    for fine in (True, False):
        config = SimpleNamespace(dtype=torch.float32, fine=fine)
        assert vllm_cpu.float32_in_v1(upstream)(None, config) is fine
        assert config.dtype == torch.float32
    vllm_cpu.float32_in_v1(upstream)(None, SimpleNamespace(dtype=torch.float16, fine=True))
    assert asked == [torch.bfloat16, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("executor", "kept"), [("external_launcher", "external_launcher"), ("ray", "mp")])
def test_ranks_that_mindspeed_rl_started_are_left_alone(executor: str, kept: str) -> None:
    class Platform:
        @classmethod
        def check(cls, vllm_config: Any) -> None:
            vllm_config.model_config.checked = cls
            vllm_config.parallel_config.distributed_executor_backend = "mp"

    Platform.check = vllm_cpu.in_a_process_of_mindspeed_rl(vars(Platform)["check"])  # type: ignore[method-assign]
    parallel = SimpleNamespace(distributed_executor_backend=executor)
    config = SimpleNamespace(model_config=SimpleNamespace(), parallel_config=parallel)
    Platform.check(config)
    assert (parallel.distributed_executor_backend, config.model_config.checked) == (kept, Platform)
    Platform.check(SimpleNamespace(model_config=None))  # which upstream's would read


def test_a_cache_is_initialised_as_often_as_asked() -> None:
    def upstream(self: Any, config: str) -> None:
        assert not self.attn_backends
        assert not self.attn_metadata_builders
        self.attn_backends.append(config)
        self.attn_metadata_builders.append(config)

    runner = SimpleNamespace()
    for config in ("first", "second"):
        vllm_cpu.once_more(upstream)(runner, config)
    assert runner.attn_backends == runner.attn_metadata_builders == ["second"]


def test_a_rollout_does_not_move_the_generator_of_training() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    vllm_cpu.beside_the_generator_of_training(lambda _self: torch.manual_seed(0) and torch.rand(3))(None)
    assert torch.equal(torch.rand(2), expected)


def test_another_vllm_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ManifestError, match=rf"the vLLM at {tmp_path} is not a supported one: .*EngineArgs"):
        vllm_cpu.known_vllm("2.3.0")


def test_an_installed_package_can_be_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stand_ins.install(hiding=("json",))
    spec = importlib.util.find_spec("json.of_nobody")
    assert spec is not None
    assert isinstance(spec.loader, stand_ins._Finder)


def test_only_the_file_that_was_read_is_edited(tmp_path: Path) -> None:
    def edit() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, EDIT, tmp_path], capture_output=True, text=True, timeout=60, check=False)

    (tmp_path / "vllm").mkdir()
    operators = tmp_path / "vllm" / "_C.abi3.so"
    operators.write_bytes(b"\x7fELF")
    done = edit()
    assert done.returncode == 1
    assert hashlib.sha256(b"\x7fELF").hexdigest() in done.stderr
    assert operators.read_bytes() == b"\x7fELF"
