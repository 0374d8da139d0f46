"""The doctor on simulated machines: a good one, and each item wrong in turn, by code, key and fix."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError, Problem
from coca_mindspeed.mindspeed import doctor
from coca_mindspeed.mindspeed.checkpoints import checkpoint_layout, newest_iteration
from coca_mindspeed.mindspeed.plan import ClusterPlan, make_plan
from coca_mindspeed.upstream.machine import Machine
from coca_mindspeed.upstream.manifest import ManifestError, manifest_of, stack_of
from tests.mindspeed.builders import checkpoint, model_config, write
from tests.tables import read_table

compose = functools.cache(lambda name, *overrides: compose_run(name, overrides).run)
PLANS: dict[int, tuple[RunConfig, ClusterPlan]] = {}  # with the run, so that no other one has its id
FILES = ("data.train=train.jsonl", "data.evaluate=evaluate.jsonl")
OVERRIDES = ("model.path=model", "model.megatron_path=weights", *FILES)
NO_VALIDATION = (*OVERRIDES[:3], "data.evaluate=null", "evaluation.interval=0")
TODAY = stack_of("2.3.0")


def plan_once(run: RunConfig) -> ClusterPlan:
    """The plan of a run whose files do not change."""
    if id(run) not in PLANS:
        PLANS[id(run)] = run, make_plan(run)
    return PLANS[id(run)][1]


def fake_machine(environment: dict[str, str], root: Path) -> Machine:
    """A machine with the packages of release 2.3.0."""
    space = SimpleNamespace(free=10**15, total=10**15)
    owned = ("10.0.0.1", "127.0.0.1", "fd00::1").__contains__
    machine = Machine(environment, root, 192, 65536, TODAY.packages.get, lambda _: space)
    return replace(machine, interfaces=("lo", "eth0", "enp1s0"), owns_address=owned, npu_smi=str)


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, RunConfig]:
    """A machine on which nothing is missing, and a run that fits it; paths are relative to the test's folder."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    write(root / "usr/local/Ascend/driver/version.info", "Version=25.3.0.1\nPackage=1\n")
    write(root / "cann/aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    for name in (*range(8), "_manager"):
        write(root / "dev" / f"davinci{name}")
    homes = {name: tmp_path / name for name in doctor.CHECKOUTS}
    write(homes["MEGATRON_HOME"] / "megatron/core/package_info.py", "MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    for package, commit in (("mindspeed", TODAY.mindspeed[0]), ("mindspeed_llm", TODAY.mindspeed_llm[0])):
        for folder in (package, ".git/objects", ".git/refs/heads"):
            (homes[f"{package.upper()}_HOME"] / folder).mkdir(parents=True)
        write(homes[f"{package.upper()}_HOME"] / ".git/HEAD", commit + "0" * 33 + "\n")

    def matching(root: Path) -> object:
        if root != homes["MINDSPEED_RL_HOME"]:
            raise ManifestError("the MindSpeed-RL is not a supported one: cli.train_grpo:train differs")
        return manifest_of("2.3.0")

    monkeypatch.setattr(doctor, "matching_manifest", matching)
    monkeypatch.setattr(doctor, "make_plan", plan_once)
    environment = {
        **{name: str(path) for name, path in homes.items()},
        **{"ASCEND_TOOLKIT_HOME": str(root / "cann"), "ATB_HOME_PATH": "/atb"},
        **{"LD_PRELOAD": str(write(root / "libjemalloc.so.2")), "HCCL_SOCKET_IFNAME": "eth0"},
    }
    run = compose("qwen25_7b_910b", *OVERRIDES)
    write("model/config.json", model_config(run))
    write("train.jsonl", '{"question": "q", "answer": "a"}\n' * 200)
    write("evaluate.jsonl", '{"question": "held out", "answer": "a"}\n')
    checkpoint(Path("weights"), 4)
    return fake_machine(environment, root), run


def examine(machine: Machine, run: RunConfig | None, output: Path | None = None) -> dict[str, Problem]:
    """Problems by key."""
    found = doctor.examine_machine(machine, run, output=output)
    return {finding.problem.key: finding.problem for finding in found if not finding.ok}


def with_changes(run: RunConfig, section: str, **changes: Any) -> RunConfig:
    return run.model_copy(update={section: getattr(run, section).model_copy(update=changes)})


def on_host(*more: str) -> RunConfig:
    return compose("qwen25_7b_910b", "hardware=host", "hardware.npus_per_node=4", *NO_VALIDATION, *more)


def bare(machine: Machine, **more: str) -> Machine:
    """The same machine with no variables but those of the checkouts."""
    return replace(machine, environment={name: machine.environment[name] for name in doctor.CHECKOUTS} | more)


@pytest.mark.parametrize(
    ("variables", "nodes", "found"),
    [
        ({"TMPDIR": f"/{'x' * 38}"}, 1, []),
        ({"TMPDIR": f"/{'x' * 39}", "RAY_TMPDIR": "/tmp"}, 1, []),
        ({"no_proxy": ""}, 2, []),
        ({"http_proxy": "http://p", "no_proxy": "localhost,127.0.0.1"}, 1, []),
        ({"http_proxy": "http://p", "NO_PROXY": "*"}, 2, []),
        ({"http_proxy": "http://p", "no_proxy": "10.0.0.1", "MASTER_ADDR": "10.0.0.1"}, 1, []),
        ({"http_proxy": "http://p", "no_proxy": "10.0.0.1", "MASTER_ADDR": "10.0.0.1"}, 2, ["no_proxy"]),
        ({"http_proxy": "http://p", "no_proxy": "10.0.0.0/24", "MASTER_ADDR": "10.0.0.1"}, 2, []),
        ({"http_proxy": "http://p", "no_proxy": "10.0.1.0/24", "MASTER_ADDR": "10.0.0.1"}, 2, ["no_proxy"]),
        ({"http_proxy": "http://p", "no_proxy": ".cluster,10.0.0.2", "MASTER_ADDR": "n1.cluster"}, 2, []),
    ],
)
def test_variables_that_ray_meets(good, variables, nodes, found):
    """The socket of a session below TMPDIR has at most 107 bytes; a proxy must not stand between the nodes."""
    machine, run = good
    environment = {**machine.environment, **variables}
    machine = replace(machine, environment=environment, address_towards=lambda _: "10.0.0.2")
    problems = examine(machine, with_changes(run, "hardware", nodes=nodes))
    assert [key for key in problems if key in ("TMPDIR", "RAY_TMPDIR", "no_proxy")] == found


def test_addresses_of_this_machine():
    assert Machine().address_towards("127.0.0.1") == "127.0.0.1"
    assert Machine().address_towards("no such host") is None
    assert [Machine().owns_address(each) for each in ("127.0.0.1", "192.0.2.99", "eth0")] == [True, False, False]


@pytest.mark.parametrize(("nodes", "variables", "keys"), read_table(__file__, "networks.tsv"))
def test_interfaces_and_addresses_of_a_node(good, nodes, variables, keys):
    machine, _ = good
    environment = {key: value for key, value in machine.environment.items() if key != "HCCL_SOCKET_IFNAME"}
    environment |= dict(variable.split("=", 1) for variable in variables.split())
    run = compose("qwen25_7b_910b", *OVERRIDES, f"hardware.nodes={nodes}")
    found = examine(replace(machine, environment=environment), run)
    assert [key for key, problem in found.items() if problem.code == "network"] == keys.split()


@pytest.mark.parametrize(("devices", "wanted", "visible", "ok"), read_table(__file__, "visible_devices.tsv"))
def test_devices_that_the_run_sees(good, devices, wanted, visible, ok):
    machine, _ = good
    for name in range(int(devices), 8):
        (machine.root / f"dev/davinci{name}").unlink()
    chosen = {} if visible == "unset" else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    machine = replace(machine, environment=machine.environment | chosen)
    found = examine(machine, compose("qwen25_7b_910b", *OVERRIDES, f"hardware.npus_per_node={wanted}"))
    assert ("NPUs" not in found) == (ok == "yes")
    assert "NPUs" not in found or found["NPUs"].fix


# Tables of npu-smi: two NPUs of an A2 node (one chip each), and one of an A3 node (two chips), with processes below.
A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.0                   Version: 25.3.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.0        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3401 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 95.4        37                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3400 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""
A3 = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 170.2       35                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3130 / 65536         |
| 0     Ascend910           | OK            | -           35                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2881 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
"""
IDLE = "| No running processes found in NPU {}                                                            |\n"
BUSY = "| {}       {}                 | {}       |                          | 37709                   |\n"


@pytest.mark.parametrize(
    ("text", "visible", "found"),
    [
        ("", None, None),  # npu-smi is not there
        (A2 + IDLE.format(0) + IDLE.format(1), None, None),
        (A2 + IDLE.format(0) + BUSY.format(1, 0, 1333928), None, "NPU 1 chip 0: 1333928"),
        (A2 + BUSY.format(0, 0, 41) + BUSY.format(0, 0, 42) + IDLE.format(1), None, "NPU 0 chip 0: 41, 42"),
        (A2 + IDLE.format(0) + BUSY.format(1, 0, 1333928), "0", None),
        (A2 + IDLE.format(0) + BUSY.format(1, 0, 1333928), "1", "NPU 1 chip 0: 1333928"),
        (A3 + BUSY.format(0, 1, 50), None, "NPU 0 chip 1: 50"),
        (A3 + BUSY.format(0, 1, 50), "0", None),
        (A3 + IDLE.format(0), None, None),
    ],
)
def test_npus_that_are_in_use(good, text, visible, found):
    machine, run = good
    chosen = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    machine = replace(machine, npu_smi=lambda: text, environment=machine.environment | chosen)
    problem = examine(machine, run).get("processes on NPUs")
    assert (problem and problem.value) == found


@pytest.mark.parametrize(("package", "wanted", "found", "ok"), read_table(__file__, "versions.tsv"))
def test_versions_that_a_manifest_may_name(good, monkeypatch, package, wanted, found, ok):
    machine, run = good
    if package == "CANN":
        changes = {"cann": wanted}
        write(machine.root / "cann/aarch64-linux/ascend_toolkit_install.info", f"version={found}\n")
    elif package == "NPU driver":
        changes = {"driver": wanted}
        write(machine.root / "usr/local/Ascend/driver/version.info", f"Version={found}\n")
    else:
        changes = {"packages": {**TODAY.packages, package: wanted}}
        machine = replace(machine, package_version={**TODAY.packages, package: found}.get)
    monkeypatch.setattr(doctor, "stack_of", lambda _release: replace(TODAY, **changes))
    assert (package not in examine(machine, run)) == (ok == "yes")


def test_good_machine(good):
    machine, run = good
    found = {finding.problem.key: finding for finding in doctor.examine_machine(machine, run)}
    assert all(finding.ok for finding in found.values())
    assert {"NPU driver", "CANN", "torch_npu", "vllm_ascend", "ray", "Megatron-LM", "weights"} <= found.keys()
    values = {key: found[key].problem.value for key in ("host memory", "/dev/shm", "cgroup memory limit")}
    assert values == {"host memory": "unknown", "/dev/shm": "unknown", "cgroup memory limit": "none"}
    # The commits of upstream's guides; copies of the others in MindSpeed-RL's folder are named.
    for package, commit in (("MINDSPEED", TODAY.mindspeed[1]), ("MINDSPEED_LLM", TODAY.mindspeed_llm[1])):
        write(f"{package}_HOME/.git/HEAD", commit + "0" * 33 + "\n")
    Path("MINDSPEED_RL_HOME/mindspeed_llm").mkdir(parents=True)
    found = {finding.problem.key: finding for finding in doctor.examine_machine(machine, None)}
    assert all(finding.ok for finding in found.values())
    assert "mindspeed_llm" in found["MindSpeed-RL"].problem.value


@pytest.mark.parametrize(
    ("variable", "value", "code", "key"),
    [
        ("ASCEND_TOOLKIT_HOME", "/nowhere", "cann", "CANN"),
        ("ATB_HOME_PATH", "", "atb", "ATB (NNAL)"),
        ("LD_PRELOAD", "/nowhere/libjemalloc.so.2", "jemalloc", "jemalloc"),
        ("HCCL_SOCKET_IFNAME", "eth99", "network", "HCCL_SOCKET_IFNAME"),
        ("RANK_TABLE_FILE", "/user/serverid/devindex/config/hccl.json", "rank-table", "RANK_TABLE_FILE"),
        ("MINDSPEED_RL_HOME", "/edited", "checkout", "MindSpeed-RL"),
        ("MINDSPEED_HOME", "/nowhere", "checkout", "mindspeed"),
        ("TMPDIR", f"/{'x' * 39}", "tmpdir", "TMPDIR"),
        ("RAY_TMPDIR", f"/{'ä' * 20}", "tmpdir", "RAY_TMPDIR"),
        ("http_proxy", "http://proxy:3128", "proxy", "no_proxy"),
        ("HTTPS_PROXY", "http://proxy:3128", "proxy", "no_proxy"),
    ],
)
def test_environment(good, variable, value, code, key):
    machine, run = good
    found = examine(replace(machine, environment={**machine.environment, variable: value}), run)
    assert [(problem.code, problem.key) for problem in found.values()] == [(code, key)]
    assert found[key].fix


def test_packages(good):
    machine, run = good
    builds = {name: f"{version}.post1" for name, version in TODAY.packages.items()}
    other = {"torch_npu": "2.6.0", "vllm": TODAY.packages["vllm"] + "0", "triton-ascend": "3.2.0"}
    assert set(examine(replace(machine, package_version={**builds, **other}.get), run)) == set(other)


def test_a_machine_without_the_launch_scripts_environment(good):
    machine = replace(bare(good[0]), open_files=4096)
    assert set(examine(machine, good[1])) == {"CANN", "ATB (NNAL)", "jemalloc", "open files"}
    assert examine(machine, on_host()) == {}  # no item of an NPU is examined for the CPU shim


def test_files_of_the_machine(good):
    machine, run = good
    write(machine.root / "usr/local/Ascend/driver/version.info", "Version=24.1.0\n")
    (machine.root / "dev/davinci7").unlink()
    write("MEGATRON_HOME/megatron/core/package_info.py", "MAJOR=0\nMINOR=8\nPATCH=0\n")
    write("MINDSPEED_LLM_HOME/.git/HEAD", "ref: refs/heads/master\n")
    write("MINDSPEED_LLM_HOME/.git/refs/heads/master", "f" * 40 + "\n")
    found = {key: (problem.code, problem.value) for key, problem in examine(machine, run).items()}
    assert found == {
        "NPU driver": ("driver", "24.1.0"),
        "NPUs": ("npus", 7),
        "Megatron-LM": ("commit", "0.8.0"),
        "mindspeed_llm": ("commit", "fffffff"),
    }
    assert "GLOO_SOCKET_IFNAME" in examine(machine, with_changes(run, "hardware", nodes=2))


def test_files_of_the_run(good, monkeypatch):
    machine, run = good
    monkeypatch.setattr(doctor, "make_plan", make_plan)
    checkpoint(Path("weights"), 4, 2)
    config = json.loads(Path("model/config.json").read_text())
    write("model/config.json", json.dumps({**config, "hidden_size": 5}))
    Path("train.jsonl").unlink()
    Path("evaluate.jsonl").unlink()
    found = examine(machine, run)
    codes = {
        "weights": "weights",
        "config.json: hidden_size": "model",
        "data.train": "no-data",
        "data.evaluate": "no-data",
    }
    assert {key: problem.code for key, problem in found.items()} == codes
    elsewhere = replace(machine, environment={**machine.environment, "NODE_RANK": "1"})
    # The first node reads them for all.
    assert found.keys() - examine(elsewhere, run).keys() == {"data.train", "data.evaluate"}
    assert found["config.json: hidden_size"].value == 5
    assert found["weights"].value == "TP 4, PP 2"
    rope = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}  # as transformers 5 writes it
    write("model/config.json", json.dumps({**config, "rope_parameters": rope}))
    assert {"config.json: rope_theta", "config.json: rope_parameters"} <= examine(machine, run).keys()
    Path("model/config.json").unlink()
    assert examine(machine, run)["model.path"].code == "no-model"


def test_problems_of_the_plan(good):
    machine, run = good
    found = examine(machine, with_changes(run, "hardware", memory_gib=20.0))
    assert "memory-training" in {problem.code for problem in found.values()}


def test_a_grader_that_cannot_be_built_here(good, monkeypatch):
    machine, _ = good
    code = compose("qwen25_7b_taco_910b", *NO_VALIDATION)
    monkeypatch.setattr("coca_sandbox.sandbox.shutil.which", lambda _name: None)
    assert set(examine(machine, code)) == {"grader"}
    accepted = with_changes(code, "data", grader="code", grader_options={"allow_unsandboxed": True})
    assert "grader" not in examine(machine, accepted)


@pytest.mark.parametrize(("cpus", "keys"), [(76, {"CPUs"}), (77, set())])  # 8 for each of 8 NPUs, and 13
def test_cpus(good, cpus, keys):
    machine, run = good
    assert set(examine(replace(machine, cpus=cpus), run)) == keys


@pytest.mark.parametrize(
    ("total", "limit", "shm", "found"),
    [
        (228.0, None, 64.0, []),
        (226.0, 128.0, 0.0625, ["host-memory", "cgroup-memory", "shared-memory"]),
    ],
)
def test_host_memory(good, total, limit, shm, found):
    """7.62e9 parameters: 12 + 8 x 2 / 4 bytes, and 8 x 2 / rollout TP: 227 GiB.

    Ray moves its object store to /tmp if /dev/shm has less than 10 GB.
    """
    machine, run = good
    write(machine.root / "proc/meminfo", f"MemTotal:       {int(total * 2**20)} kB\nMemFree:  1 kB\n")
    write(machine.root / "proc/self/cgroup", "0::/\n")
    write(machine.root / "sys/fs/cgroup/memory.max", "max\n" if limit is None else f"{int(limit * 2**30)}\n")
    (machine.root / "dev/shm").mkdir()
    space = SimpleNamespace(free=10**15, total=int(shm * 2**30))
    problems = examine(replace(machine, disk_usage=lambda _: space), run)
    assert [problem.code for problem in problems.values()] == found
    assert all("227 GiB" in problem.expected for key, problem in problems.items() if key != "/dev/shm")


def test_free_space(good, tmp_path):
    machine, run = good
    space = SimpleNamespace(free=3 * 14 * 7_615_616_512 - 1)
    machine = replace(machine, disk_usage=lambda _: space)
    assert examine(machine, run, tmp_path / "run") == {}  # too short for three checkpoints
    run = run.model_copy(
        update={
            "data": run.data.model_copy(update={"epochs": None}),
            "trainer": run.trainer.model_copy(update={"steps": 1000}),
        }
    )
    assert set(examine(machine, run, tmp_path / "run")) == {"free space"}
    (tmp_path / "run/stage0/checkpoints/iter_0000050").mkdir(parents=True)  # of a run that is resumed
    assert examine(machine, run, tmp_path / "run") == {}
    assert Machine().disk_usage(tmp_path / "not/made/yet").free > 0


def test_command(capsys):
    """Problems first, two lines each; ``--json`` for machines; exit code 1 on this machine without NPUs."""
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    status = [line.split()[0] for line in lines[:-1] if not line.startswith(" ")]
    assert status == sorted(status, key=lambda word: word == "ok")
    assert main(["doctor", "--json", "--only-problems"]) == 1
    items = json.loads(capsys.readouterr().out)
    (npus,) = (item for item in items if item["code"] == "npus")
    assert {"key": "NPUs", "value": 0, "ok": False}.items() <= npus.items()
    assert len(items) == len(status) - status.count("ok")


def test_layouts_of_checkpoints(tmp_path):
    layout = checkpoint_layout(checkpoint(tmp_path / "a", 2, 2, "20"))
    assert (layout.tp, layout.pp) == (2, 2)
    assert newest_iteration(tmp_path / "a") == 20
    assert newest_iteration(checkpoint(tmp_path / "b", 1)) is None
    assert newest_iteration(tmp_path / "none") is None
    (tmp_path / "a/iter_0000020/mp_rank_01_001/model_optim_rng.pt").unlink()
    write(tmp_path / "b/latest_checkpointed_iteration.txt", "twenty")
    write(tmp_path / "c/latest_checkpointed_iteration.txt", "5")
    for name, message in (
        ("a", "has 3 of the 2 x 2 ranks' folders"),
        ("b", "expected an iteration's number, found 'twenty'"),
        ("c", "holds no weights"),
        ("none", "is not a Megatron checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            checkpoint_layout(tmp_path / name)
