"""Decisions by what a machine has: each outcome, whatever machine runs the test."""

import os
import sys
import types
from pathlib import Path

import pytest
import torch

from coca_mindspeed.config.schema import ModelConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.plan import free_bytes
from coca_mindspeed.local.policy import choose_device, resolve_dtype
from coca_mindspeed.local.static_decoder import static_by_default
from coca_mindspeed.utils import process


@pytest.fixture
def devices(monkeypatch):
    """A machine with so many CUDA devices and NPUs; None: torch_npu is not installed."""

    def have(cuda, npu):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        spec = None if npu is None else object()
        monkeypatch.setattr("coca_mindspeed.local.policy.importlib.util.find_spec", lambda _: spec)
        monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
        monkeypatch.setattr(torch, "npu", types.SimpleNamespace(device_count=lambda: npu), raising=False)

    return have


@pytest.fixture
def named_npu(monkeypatch):
    """The name `npu` is known to torch once torch_npu is imported; here a pair stands for a device."""
    monkeypatch.setattr(
        "coca_mindspeed.local.policy.torch.device",
        lambda name: types.SimpleNamespace(
            type=name.partition(":")[0], index=int(name.partition(":")[2]) if ":" in name else None
        ),
    )


# CUDA devices, NPUs, trainer.device, and the type that is chosen; None: refused.
CHOICES = [
    (0, None, "auto", "cpu"),
    (0, 0, "auto", "cpu"),
    (0, 2, "auto", "npu"),
    (1, None, "auto", "cuda"),
    (1, 2, "auto", "cuda"),
    (1, 2, "cpu", "cpu"),
    (2, None, "cuda:1", "cuda"),
    (1, None, "cuda:1", None),
    (0, None, "cuda", None),
    (0, 1, "npu", "npu"),
    (0, 2, "npu:1", "npu"),
    (0, 1, "npu:1", None),
    (0, 0, "npu", None),
    (0, None, "npu", None),
]


@pytest.mark.parametrize(("cuda", "npu", "name", "chosen"), CHOICES)
def test_device(devices, named_npu, cuda, npu, name, chosen):
    devices(cuda, npu)
    if chosen is None:
        with pytest.raises(ConfigError, match=r"^trainer\.device="):
            choose_device(name)
    else:
        assert choose_device(name).type == chosen


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_data_type_where_torch_cannot_tell_or_need_not(attention, monkeypatch):
    config = ModelConfig(compute_dtype="auto", attention=attention)
    assert resolve_dtype(config, types.SimpleNamespace(type="npu")) == "bfloat16"
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # an older torch
    assert resolve_dtype(config, torch.device("cpu")) == ("float32" if attention == "sdpa" else "bfloat16")


@pytest.mark.parametrize(
    ("meminfo", "left", "free"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    4 kB\n", None, 4096),
        ("MemTotal: 9 kB\nMemAvailable:    4 kB\n", 1000, 1000),
        ("MemTotal: 9 kB\nMemAvailable:    4 kB\n", 9999, 4096),
        (None, None, 3 * 512),
        (None, 1000, 1000),
    ],
)
def test_free_memory_of_a_cpu(meminfo, left, free, monkeypatch):
    def read(path, **_):
        if meminfo is None:
            raise FileNotFoundError(path)
        return meminfo

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 512}.__getitem__)
    monkeypatch.setattr("coca_mindspeed.local.plan.memory_left", lambda: left)
    assert free_bytes(torch.device("cpu")) == free


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_free_memory_of_an_accelerator(kind, monkeypatch):
    monkeypatch.setattr(torch, kind, types.SimpleNamespace(mem_get_info=lambda: (7, 9)), raising=False)
    assert free_bytes(types.SimpleNamespace(type=kind)) == 7


@pytest.mark.parametrize("folder", ["platlib", "purelib", None])
def test_openmp_of_scikit_learn(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(process.sysconfig, "get_path", lambda name: str(tmp_path / name))
    library = tmp_path / str(folder) / "scikit_learn.libs" / "libgomp-d22c30c5.so.1.0.0"
    if folder is not None:
        library.parent.mkdir(parents=True)
        library.touch()
        (library.parent / "libother.so").touch()
    assert process.find_libgomp_of_scikit_learn() == (library if folder else None)


@pytest.mark.parametrize("count", [None, 3])
def test_cpus_without_affinity(count, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert process.usable_cpus(tmp_path) == (count or 1)


@pytest.mark.parametrize(
    ("device", "architecture", "sharing", "attention", "static"),
    [
        ("cuda", "llama", "prefix", "sdpa", True),
        ("cuda", "llama", "prefix", "sdpa_grouped", True),
        ("cpu", "llama", "prefix", "sdpa", False),
        ("cuda", "bloom", "prefix", "sdpa", False),
        ("cuda", "llama", "prompts", "sdpa", False),
        ("cuda", "llama", "none", "sdpa", False),
        ("cuda", "llama", "prefix", "eager", False),
    ],
)
def test_decoding(device, architecture, sharing, attention, static):
    assert static_by_default(torch.device(device), architecture, sharing, attention) is static
