"""The doctor for verl on simulated machines, whose packages are listings by verl's tables of versions."""

import json
from types import SimpleNamespace

import pytest

from coca_mindspeed import cli
from coca_mindspeed.config.compose import find_verl_run
from coca_mindspeed.upstream.machine import Machine
from coca_mindspeed.verl.doctor import examine_verl_machine, find_stack, stack_names, stacks
from tests.mindspeed.builders import write
from tests.tables import read_table

SPACE = SimpleNamespace(free=10**12, total=10**12)
LISTINGS = {name: values for name, *values in read_table(__file__, "listings.tsv")}


def machine(tmp_path, name, **changes):
    """A machine of a listing, with the devices, driver and CANN that its stack names."""
    wanted, devices, packages, environment, _ = LISTINGS[name]
    stack = next(stack for stack in stacks() if stack.name == wanted)
    kind, number = devices.split()
    for index in (*range(int(number)), "_manager", "ctl"):
        write(tmp_path / "dev" / f"{kind}{index}")
    (tmp_path / "dev" / "shm").mkdir()
    write(tmp_path / "usr/local/Ascend/driver/version.info", f"Version={stack.driver}\n")
    write(tmp_path / "cann/aarch64-linux/ascend_toolkit_install.info", f"version={stack.cann.lstrip('>=')}\n")
    given = {"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann"), "ATB_HOME_PATH": "/atb", "HCCL_SOCKET_IFNAME": "eth0"}
    given |= dict(pair.split("=", 1) for pair in environment.split())
    values = {
        "environment": given,
        "cpus": 192,
        "open_files": 65536,
        "package_version": dict(pair.split("=", 1) for pair in packages.split()).get,
        "disk_usage": lambda _: SPACE,
        "interfaces": ("lo", "eth0"),
        "python": "3.11.9",
        "port_is_free": lambda _: True,
    }
    return Machine(root=tmp_path, **{**values, **changes})


def wrong(findings):
    return [f"{problem.code}:{problem.key.replace(' ', '_')}" for ok, problem in findings if not ok]


@pytest.mark.parametrize("name", LISTINGS)
def test_listings(tmp_path, name):
    wanted, *_, expected = LISTINGS[name]
    here = machine(tmp_path, name)
    engine = "sglang" if wanted.endswith("sglang") else "vllm"
    assert find_stack(here, engine).name == wanted
    found = examine_verl_machine(here, stack_name=wanted)
    assert wrong(found) == expected.split()
    assert all(problem.fix for ok, problem in found if not ok)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": "3.13.1"}, ["python:Python"]),
        ({"open_files": 1024}, ["open-files:open_files"]),
        ({"disk_usage": lambda _: SimpleNamespace(free=10**9, total=10**9)}, ["shared-memory:/dev/shm"]),
        ({"environment": {}}, ["cann:CANN", "atb:ATB_(NNAL)"]),
    ],
)
def test_other_items_of_an_ascend_machine(tmp_path, changes, expected):
    assert wrong(examine_verl_machine(machine(tmp_path, "a3", **changes))) == expected


@pytest.mark.parametrize(
    ("name", "overrides", "free", "expected"),
    [
        ("cuda", [], 10**12, []),
        ("cuda", ["trainer.n_gpus_per_node=16"], 10**12, ["gpus:GPUs"]),
        ("a3", ["trainer.n_gpus_per_node=16"], 10**12, []),
        ("a3", [], 10**12, ["npus:NPUs"]),  # 8 of 16
        ("cuda", ["algorithm.use_kl_in_reward=true"], 10**12, ["objective:algorithm.use_kl_in_reward"]),
        ("cuda", [], 10**4, ["disk:free_space"]),
        ("cuda", ["trainer.nnodes=2"], 10**12, ["port:RAY_PORT"]),
        ("cuda", ["actor_rollout_ref.rollout.name=sglang"], 10**12, ["package:sglang"]),
    ],
)
@pytest.mark.usefixtures("verls_keys")
def test_a_machine_for_a_run(tmp_path, name, overrides, free, expected):
    write(tmp_path / "model" / "model.safetensors", "x" * 1000)  # three checkpoints of six times this
    file = find_verl_run("coca_qwen25_7b")
    assert file is not None
    space = SimpleNamespace(free=free, total=10**12)
    here = machine(tmp_path, name, disk_usage=lambda _: space, port_is_free=lambda _: False)
    run = file, [f"actor_rollout_ref.model.path={tmp_path / 'model'}", *overrides]
    assert wrong(examine_verl_machine(here, run, output=tmp_path / "run")) == expected


@pytest.mark.usefixtures("verls_keys")
def test_the_command_prints_findings_and_refuses_options_of_the_other_engine(capsys):
    assert cli.main(["doctor", "--verl", "auto", "--json"]) == 1  # this machine has no accelerator
    assert {"verl", "torch", "/dev/shm"} <= {item["key"] for item in json.loads(capsys.readouterr().out)}
    assert cli.main(["doctor", "coca_qwen25_7b", "--only-problems"]) == 1
    assert "GPUs" in capsys.readouterr().out
    assert cli.main(["doctor", "coca_qwen25_7b", "--release", "2.3.0"]) == 2
    assert cli.main(["doctor", "qwen25_7b_910b", "--verl", stack_names()[0]]) == 2


def test_stacks_are_of_one_accelerator_and_engine():
    assert {(stack.accelerator, stack.engine) for stack in stacks()} == {
        (accelerator, engine) for accelerator in ("npu", "cuda") for engine in ("vllm", "sglang")
    }
