"""The doctor on machines made of folders: a good one, and everything that can be wrong with it, one thing at a time."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from coca_mindspeed.cli import doctor as command
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.doctor import machine_checks as doctor
from coca_mindspeed.mindspeed.doctor import run_checks as prompt_lengths
from coca_mindspeed.mindspeed.doctor import run_checks as run_findings
from coca_mindspeed.mindspeed.doctor.machine import Machine, git_commit, megatron_version
from coca_mindspeed.mindspeed.start.releases import CONVERTER, STACKS, UNPINNED, is_version
from coca_mindspeed.mindspeed.weights.checkpoints import checkpoint_layout, newest_iteration
from coca_mindspeed.upstream.manifest import ManifestError


class FakeMachine(Machine):
    """A machine with the packages of release 2.3.0."""

    packages: ClassVar[dict[str, str]] = {
        **STACKS["2.3.0"].packages,
        **dict.fromkeys((*UNPINNED, *CONVERTER), "1.0"),
    }

    def package_version(self, name: str) -> str | None:
        return self.packages.get(name)

    def cpus(self) -> int:
        return 192

    def architecture(self) -> str:
        return "x86_64"

    def free_bytes(self, path: Path) -> int:
        return 10**15

    def open_files(self) -> int:
        return 65536

    def open_files_at_most(self) -> int:
        return 65536


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def checkpoint(directory: Path, tp: int, pp: int = 1, iteration: str = "release") -> Path:
    folder = "release" if iteration == "release" else f"iter_{int(iteration):07d}"
    write(directory / "latest_checkpointed_iteration.txt", iteration)
    for t in range(tp):
        for p in range(pp):
            name = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            write(directory / folder / name / "model_optim_rng.pt")
    return directory


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeMachine, RunConfig]:
    """A machine on which nothing is missing, and a run that fits it."""
    root = tmp_path / "root"
    write(root / "usr/local/Ascend/driver/version.info", "Version=25.3.0.1\nPackage=1\n")
    cann = root / "cann"
    write(cann / "aarch64-linux" / "ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    for index in range(8):
        write(root / "dev" / f"davinci{index}")
    write(root / "dev" / "davinci_manager")
    homes = {name: tmp_path / name for name in doctor.HOMES}
    write(homes["MEGATRON_HOME"] / "megatron/core/package_info.py", "MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    for variable, package, commit in (
        ("MINDSPEED_HOME", "mindspeed", STACKS["2.3.0"].mindspeed[0]),
        ("MINDSPEED_LLM_HOME", "mindspeed_llm", STACKS["2.3.0"].mindspeed_llm[0]),
    ):
        (homes[variable] / package).mkdir(parents=True)
        write(homes[variable] / ".git/HEAD", commit + "0" * 33 + "\n")

    def matching(root: Path) -> object:
        if root != homes["MINDSPEED_RL_HOME"]:
            raise ManifestError("the MindSpeed-RL is not a supported one: cli.train_grpo:train differs")
        return type("Manifest", (), {"release": "2.3.0"})()

    monkeypatch.setattr(doctor, "matching_manifest", matching)
    environment = {
        **{name: str(path) for name, path in homes.items()},
        "ASCEND_TOOLKIT_HOME": str(cann),
        "ATB_HOME_PATH": "/atb",
        "LD_PRELOAD": str(write(root / "libjemalloc.so.2")),
        "HCCL_SOCKET_IFNAME": socket.if_nameindex()[0][1],
    }
    run = compose_run("qwen25_7b_910b").run
    shapes = run.model.architecture
    assert shapes is not None
    model = tmp_path / "model"
    config = {key: getattr(shapes, name) for name, key in run_findings._HF_KEYS.items()}
    write(model / "config.json", json.dumps(config))
    layout = "{{ messages[0].content }}<|im_end|>"
    write(model / "tokenizer_config.json", json.dumps({"eos_token": "<|im_end|>", "chat_template": layout}))
    train = write(tmp_path / "train.jsonl", '{"question": "q", "answer": "a"}\n' * 200)
    overrides = [
        *(f"model.path={model}", f"model.megatron_path={checkpoint(tmp_path / 'weights', 4)}"),
        *(f"data.train={train}", f"data.evaluate={train}"),
    ]
    return FakeMachine(environment, root), compose_run("qwen25_7b_910b", overrides).run


def problems(machine: Machine, run: RunConfig | None) -> dict[str, str]:
    return {finding.name: finding.fix for finding in doctor.examine_machine(machine, run) if not finding.ok}


def test_a_good_machine_is_well(good):
    machine, run = good
    findings = doctor.examine_machine(machine, run)
    assert problems(machine, run) == {}
    names = [finding.name for finding in findings]
    for wanted in (
        "NPU driver",
        "CANN",
        "torch_npu",
        "vllm_ascend",
        "ray",
        "Megatron-LM",
        "weights",
        "data.train",
        "plan",
    ):
        assert wanted in names
    assert problems(machine, None) == {}


@pytest.mark.parametrize(
    ("variable", "value", "name", "fix"),
    [
        ("ASCEND_TOOLKIT_HOME", "/nowhere", "CANN", "install CANN 8.5.0"),
        ("ATB_HOME_PATH", "", "ATB (NNAL)", "nnal"),
        ("LD_PRELOAD", "", "jemalloc", "libjemalloc2"),
        ("LD_PRELOAD", "/nowhere/libjemalloc.so.2", "jemalloc", "libjemalloc2"),
        ("HCCL_SOCKET_IFNAME", "eth99", "HCCL_SOCKET_IFNAME", "export HCCL_SOCKET_IFNAME=one of"),
        ("MINDSPEED_RL_HOME", "/edited", "MindSpeed-RL", "cli.train_grpo:train differs"),
        ("MINDSPEED_RL_HOME", "", "MindSpeed-RL", "set MINDSPEED_RL_HOME"),
        ("MEGATRON_HOME", "", "megatron", "set MEGATRON_HOME"),
        ("MINDSPEED_HOME", "/nowhere", "mindspeed", "set MINDSPEED_HOME"),
    ],
)
def test_one_thing_wrong_in_the_environment(good, variable, value, name, fix):
    machine, run = good
    found = problems(replace(machine, environment={**machine.environment, variable: value}), run)
    assert list(found) == [name]
    assert fix in found[name]


def test_on_the_host_platform_nothing_of_an_npu_is_asked_for(good, monkeypatch):
    machine, run = good
    overrides = ["hardware=host", "hardware.npus_per_node=4", f"model.path={run.model.path}"]
    host = compose_run(
        "qwen25_7b_910b", [*overrides, f"data.train={run.data.train}", "data.evaluate=null", "evaluation.interval=0"]
    ).run
    here = replace(machine, environment={name: machine.environment[name] for name in doctor.HOMES})
    names = [finding.name for finding in doctor.examine_machine(here, host)]
    assert problems(here, host) == {}
    assert "CANN" not in names
    assert "weights" not in names
    monkeypatch.setattr(FakeMachine, "packages", {})
    assert "requirements/mindspeed-host.txt" in problems(here, host)["ray"]


@pytest.mark.parametrize(("version", "good_"), [("0.9.1.post2+cpu", True), ("0.11.0+cpu", False), (None, False)])
def test_vllm_without_an_npu_is_asked_for_where_a_run_names_it(good, monkeypatch, version, good_):
    machine, run = good
    overrides = ["hardware=host", "hardware.npus_per_node=4", "mindspeed_rl.coca.rollout=vllm"]
    paths = [f"model.path={run.model.path}", f"data.train={run.data.train}", "data.evaluate=null"]
    host = compose_run("qwen25_7b_910b", [*overrides, *paths, "evaluation.interval=0"]).run
    monkeypatch.setattr(FakeMachine, "packages", {**FakeMachine.packages, "vllm": version})
    here = replace(machine, environment={name: machine.environment[name] for name in doctor.HOMES})
    found = problems(here, host)
    assert list(found) == ([] if good_ else ["vllm"])
    assert good_ or "requirements/mindspeed-vllm.sh" in found["vllm"]


def test_versions_that_do_not_belong_together(good, monkeypatch):
    machine, run = good
    wrong = {**FakeMachine.packages, "torch_npu": "2.6.0", "vllm": "0.11.0", "triton-ascend": "3.2.0"}
    monkeypatch.setattr(FakeMachine, "packages", wrong)
    found = problems(machine, run)
    assert set(found) == {"torch_npu", "vllm", "triton-ascend"}
    assert "pip uninstall triton-ascend" in found["triton-ascend"]


def test_packages_that_training_and_conversion_import(good, monkeypatch):
    machine, run = good
    few = {name: version for name, version in FakeMachine.packages.items() if name not in (*UNPINNED, *CONVERTER)}
    monkeypatch.setattr(FakeMachine, "packages", {**few, "tensordict": "0.8.1"})
    found = problems(machine, run)  # its weights are there: nothing is left to convert
    assert set(found) == {"codetiming", "tensordict"}
    assert "requirements.txt" in found["codetiming"]
    unconverted = run.model_copy(
        update={
            "mindspeed_rl": {**run.mindspeed_rl, "actor_config": {**run.mindspeed_rl["actor_config"], "load": "/no"}}
        }
    )
    found = problems(machine, unconverted)
    assert set(found) == {"codetiming", "tensordict", "weights", "peft", "accelerate"}
    assert "--no-deps peft" in found["peft"]
    assert {"peft", "accelerate"} <= set(problems(machine, None))


def test_what_the_launch_scripts_do_by_themselves_is_said(good, monkeypatch):
    machine, run = good
    bare = {name: machine.environment[name] for name in doctor.HOMES}
    fresh = replace(machine, environment=bare)
    monkeypatch.setattr(FakeMachine, "open_files", lambda _self: 1024)
    found = problems(fresh, run)
    assert set(found) == {"CANN", "ATB (NNAL)", "jemalloc", "open files"}
    assert "install CANN 8.5.0" in found["CANN"]
    assert "apt install libjemalloc2" in found["jemalloc"]
    ascend = machine.root / "usr/local/Ascend"
    scripts = {"CANN": ascend / "cann/set_env.sh", "ATB (NNAL)": ascend / "nnal/atb/set_env.sh"}
    for path in (*scripts.values(), machine.root / "usr/lib64/libjemalloc.so.2"):
        write(path)
    found = problems(fresh, run)
    for name in ("CANN", "ATB (NNAL)", "jemalloc", "open files"):
        assert "nothing to do for the launch scripts" in found[name]
    for name, path in scripts.items():
        assert found[name].endswith(f"source {path}")
    other = replace(machine, environment={**bare, "ASCEND_INSTALL_PATH": str(machine.root)})
    assert "install CANN 8.5.0" in problems(other, run)["CANN"]
    monkeypatch.setattr(FakeMachine, "open_files_at_most", lambda _self: 4096)
    assert "raise the hard limit" in problems(fresh, run)["open files"]


def test_copies_in_mindspeed_rls_folder_are_told_and_do_no_harm(good):
    machine, run = good
    (Path(machine.environment["MINDSPEED_RL_HOME"]) / "mindspeed_llm").mkdir(parents=True)
    findings = {finding.name: finding for finding in doctor.examine_machine(machine, run)}
    assert findings["MindSpeed-RL"].ok
    assert findings["MindSpeed-RL"].found.endswith("not used: its copies of mindspeed_llm")


def test_prompts_that_are_too_long(good, tmp_path, monkeypatch):
    machine, run = good
    asked = []

    class Counter:
        def __init__(self, model: Path, system_prompt: str | None, variables: dict) -> None:
            assert variables == {}
            assert model == tmp_path / "model"
            assert system_prompt is not None
            assert "<confidence>" in system_prompt

        def __call__(self, record) -> int:
            asked.append(record.id)
            return len(record.question) // 2

    monkeypatch.setattr(prompt_lengths, "PromptCounter", Counter)
    rows = [("short", "q" * 500), ("bytes", "é" * 1500), ("long", "q" * 4100), ("longer", "q" * 5000)]
    lines = (json.dumps({"id": name, "question": question, "answer": "a"}) for name, question in rows)
    write(tmp_path / "train.jsonl", "\n".join(lines) + "\n")
    found = {finding.name: finding for finding in doctor.examine_machine(machine, run)}
    assert set(asked) == {"bytes", "long", "longer"}  # a short prompt cannot be too long, whatever the tokenizer
    assert found["prompts of data.train"].found == "2 longer, the longest 2500 (record 'longer')"
    assert "--max-tokens 2048" in found["prompts of data.train"].fix
    roomy = run.model_copy(update={"rollout": run.rollout.model_copy(update={"max_prompt_tokens": 2500})})
    assert run_findings._prompts(roomy, "data.train", tmp_path / "train.jsonl").ok
    monkeypatch.undo()
    assert "tokenizer" in run_findings._prompts(run, "data.train", tmp_path / "train.jsonl").fix


def test_files_of_the_machine(good):
    machine, run = good
    write(machine.root / "usr/local/Ascend/driver/version.info", "Version=24.1.0\n")
    (machine.root / "dev/davinci7").unlink()
    write(Path(machine.environment["MEGATRON_HOME"]) / "megatron/core/package_info.py", "MAJOR=0\nMINOR=8\nPATCH=0\n")
    write(Path(machine.environment["MINDSPEED_LLM_HOME"]) / ".git/HEAD", "ref: refs/heads/master\n")
    write(Path(machine.environment["MINDSPEED_LLM_HOME"]) / ".git/refs/heads/master", "f" * 40 + "\n")
    found = problems(machine, run)
    assert set(found) == {"NPU driver", "NPUs", "Megatron-LM", "mindspeed_llm"}
    assert found["mindspeed_llm"].startswith("git checkout 62d4640")


def test_what_the_run_needs(good, tmp_path):
    machine, run = good
    checkpoint(tmp_path / "weights", 4, 2)
    config = json.loads((tmp_path / "model/config.json").read_text())
    write(tmp_path / "model/config.json", json.dumps({**config, "hidden_size": 5}))
    (tmp_path / "train.jsonl").unlink()
    found = problems(machine, run)
    assert set(found) == {"weights", "model.path", "data.train", "data.evaluate"}
    assert "hidden_size is 5, model.architecture.hidden 3584" in found["model.path"]
    assert "convert_weights.sh hf2mcore" in found["weights"]
    refused = run.model_copy(update={"hardware": run.hardware.model_copy(update={"memory_gib": 20.0})})
    assert "training needs about" in problems(machine, refused)["plan"]


@pytest.mark.parametrize("commits", [("674226a", "62d4640"), ("ac9f0e7", "a2c0733")])
def test_the_tested_commits_and_those_of_upstreams_guides(good, commits):
    machine, run = good
    for variable, commit in zip(("MINDSPEED_HOME", "MINDSPEED_LLM_HOME"), commits, strict=True):
        write(Path(machine.environment[variable]) / ".git/HEAD", commit + "0" * 33 + "\n")
    assert problems(machine, run) == {}


def test_a_grader_that_cannot_be_built_here(good, monkeypatch):
    machine, run = good
    code = compose_run(
        "qwen25_7b_taco_910b",
        [
            *(f"model.path={run.model.path}", f"model.megatron_path={run.model.megatron_path}"),
            *(f"data.train={run.data.train}", "data.evaluate=null", "evaluation.interval=0"),
        ],
    ).run
    monkeypatch.setattr("coca_mindspeed.grading.code.sandbox.shutil.which", lambda _name: None)
    found = problems(machine, code)
    assert set(found) == {"grader"}
    assert "bwrap is not installed" in found["grader"]
    unsandboxed = {"coca": {"grader": "code", "grading": {"allow_unsandboxed": True}}}
    accepted = code.model_copy(update={"mindspeed_rl": code.mindspeed_rl | unsandboxed})
    assert "record 'train-1' of 'train': metadata['tests'] should be an object" in run_findings._grader(accepted).fix
    tests = {"tests": {"kind": "asserts", "code": "assert f(1) == 1"}}
    write(Path(run.data.train), json.dumps({"question": "q", "answer": "", "category": "code", "metadata": tests}))
    assert run_findings._grader(accepted).ok


def test_too_few_cpus_for_rays_placement_groups(good, monkeypatch):
    machine, run = good
    monkeypatch.setattr(FakeMachine, "cpus", lambda _self: 76)  # 8 for each of 8 NPUs, and 13
    found = problems(machine, run)
    assert set(found) == {"CPUs"}
    assert "num_cpus_for_placement_group" in found["CPUs"]
    monkeypatch.setattr(FakeMachine, "cpus", lambda _self: 77)
    assert problems(machine, run) == {}


def test_room_for_the_checkpoints_that_are_kept(good, monkeypatch, tmp_path):
    machine, run = good
    one = 14 * 7_615_616_512
    monkeypatch.setattr(FakeMachine, "free_bytes", lambda _self, _path: 3 * one - 1)
    (finding,) = [f for f in doctor.examine_machine(machine, run, output=tmp_path / "run") if not f.ok]
    assert (finding.name, finding.wanted) == ("free space", "320 GB or more (3 checkpoints)")
    (tmp_path / "run/stage0/checkpoints/iter_0000050").mkdir(parents=True)  # of a run that is resumed
    assert all(f.ok for f in doctor.examine_machine(machine, run, output=tmp_path / "run"))
    monkeypatch.undo()
    assert Machine().free_bytes(tmp_path / "not/made/yet") > 0


@pytest.mark.parametrize(
    ("eos", "layout", "well"),
    [
        ("<|im_end|>", "{{ m }}<|im_end|>", True),
        ({"content": "<|eot_id|>"}, [{"name": "default", "template": "{{ m }}<|eot_id|>"}], True),
        ("</s>", "{{ m + eos_token }}", True),
        ("<|end_of_text|>", "{{ m }}<|eot_id|>", False),  # Llama 3 as it was published first
        ("</s>", None, True),
        ("</s>", "{{ m }}\n", True),  # plain text
    ],
)
def test_a_token_that_is_never_sampled_is_not_trained(good, tmp_path, eos, layout, well):
    machine, run = good
    marks = {str(n): {"content": mark} for n, mark in enumerate(("<|im_end|>", "<|eot_id|>", "<|end_of_text|>"))}
    config = {"eos_token": eos, "chat_template": layout, "added_tokens_decoder": marks}
    write(tmp_path / "model/tokenizer_config.json", json.dumps(config))
    found = problems(machine, run)
    assert set(found) == (set() if well else {"end of text"})
    if not well:
        write(tmp_path / "model/chat_template.jinja", "{{ m }}<|end_of_text|>")
        assert problems(machine, run) == {}


def test_scikit_learns_openmp_on_aarch64(good, monkeypatch, tmp_path):
    machine, run = good
    library = write(tmp_path / "scikit_learn.libs/libgomp-947d5fa1.so.1.0.0")
    monkeypatch.setattr("coca_mindspeed.mindspeed.doctor.machine.sysconfig.get_path", lambda _name: str(tmp_path))
    assert problems(machine, run) == {}
    monkeypatch.setattr(FakeMachine, "architecture", lambda _self: "aarch64")
    assert str(library) in problems(machine, run)["libgomp of scikit-learn"]
    preloaded = {**machine.environment, "LD_PRELOAD": f"{machine.environment['LD_PRELOAD']}:{library}"}
    assert problems(replace(machine, environment=preloaded), run) == {}
    library.unlink()
    assert problems(machine, run) == {}


def test_what_the_hooks_refuse_is_no_plan_that_holds(good):
    machine, run = good
    rl = run.mindspeed_rl["rl_config"] | {"entropy_coeff": 0.1}
    refused = run.model_copy(update={"mindspeed_rl": run.mindspeed_rl | {"rl_config": rl}})
    assert "rl_config.entropy_coeff" in problems(machine, refused)["plan"]


def test_several_nodes_need_named_interfaces(good):
    machine, run = good
    two = run.model_copy(update={"hardware": run.hardware.model_copy(update={"nodes": 2})})
    assert "GLOO_SOCKET_IFNAME" in problems(machine, two)


def test_this_machine_is_told_the_truth(capsys):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["qwen25_7b_910b", "--only-problems"])) in (0, 1)
    assert "as wanted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("2.5.1", "2.5.1", True),
        ("2.5.1.post1", "2.5.1", True),
        ("2.5.1+cpu", "2.5.1", True),
        ("0.9.1rc2", "0.9.1", True),
        ("2.5.10", "2.5.1", False),
        ("2.5", "2.5.1", False),
        ("12.5.1", "2.5.1", False),
    ],
)
def test_builds_of_a_version(found, wanted, same):
    assert is_version(found, wanted) is same


def test_layouts_of_checkpoints(tmp_path):
    layout = checkpoint_layout(checkpoint(tmp_path / "a", 2, 2, "20"))
    assert (layout.tp, layout.pp) == (2, 2)
    assert newest_iteration(tmp_path / "a") == 20
    assert newest_iteration(checkpoint(tmp_path / "b", 1)) is None
    assert newest_iteration(tmp_path / "none") is None
    (tmp_path / "a/iter_0000020/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(ConfigError, match="has 3 of the 2 x 2 ranks' folders"):
        checkpoint_layout(tmp_path / "a")
    write(tmp_path / "b/latest_checkpointed_iteration.txt", "twenty")
    with pytest.raises(ConfigError, match="expected an iteration's number, found 'twenty'"):
        newest_iteration(tmp_path / "b")
    with pytest.raises(ConfigError, match="is not a Megatron checkpoint"):
        checkpoint_layout(tmp_path / "none")
    write(tmp_path / "c/latest_checkpointed_iteration.txt", "5")
    with pytest.raises(ConfigError, match="holds no weights"):
        checkpoint_layout(tmp_path / "c")


def test_commits_and_versions_are_read_without_running_anything(tmp_path):
    assert git_commit(tmp_path) is None
    write(tmp_path / ".git/HEAD", "ref: refs/heads/main\n")
    assert git_commit(tmp_path) is None
    write(tmp_path / ".git/packed-refs", f"# pack-refs\n{'a' * 40} refs/heads/main\n")
    assert git_commit(tmp_path) == "a" * 40
    write(tmp_path / "worktree/.git", "gitdir: ../.git\n")
    assert git_commit(tmp_path / "worktree") == "a" * 40
    assert megatron_version(tmp_path) is None
