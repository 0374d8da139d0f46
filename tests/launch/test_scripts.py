"""Every launch script: --dry-run, --smoke; and the whole sequence with stubs for Ray and the driver."""

import functools
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import hydra
import pytest
import yaml

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run, ready_made_runs
from coca_mindspeed.mindspeed.start.driver import CHECKOUTS
from coca_mindspeed.upstream.claim import Claimant
from coca_mindspeed.upstream.launch import Launch, ending_by_signals, stopping_by_signals
from coca_mindspeed.utils.process import InterruptedRunError
from coca_mindspeed.utils.saving import StopRequest
from tests.launch.scripts_for_tests import ROOT, call, call_here, commands, ended, own_address, shell, written
from tests.mindspeed.builders import checkpoint, model_config, write
from tests.support.waiting import until
from tests.tables import read_table

OTHERS = ("lib", "convert_weights", "run", "verl")
SCRIPTS = sorted(path for path in (ROOT / "launch").glob("*.sh") if path.stem not in OTHERS)
RUN = ROOT / "launch" / "run.sh"
SEVEN = ROOT / "launch" / "qwen25_7b_910b.sh"
CONVERT = ROOT / "launch" / "convert_weights.sh"


def test_a_dry_run_composes_once(monkeypatch, capsys):
    """Command, plan, doctor and YAML have the values of one composition."""
    composed = []

    def compose_once(*arguments, **options):
        composed.append(arguments)
        return hydra.compose(*arguments, **options)

    monkeypatch.setattr("coca_mindspeed.config.compose.compose", compose_once)
    monkeypatch.setattr("coca_mindspeed.mindspeed.native.compose", compose_once)
    assert main(["launch", "qwen25_7b_910b", "--dry-run", "optimizer.lr=3e-6"]) == 0
    assert len(composed) == 1
    shown = capsys.readouterr().out
    assert (
        yaml.safe_load(shown.partition("coca-mindspeed.json\n")[2].partition("\n+ ")[0])["actor_config"]["lr"] == 3e-6
    )


def test_every_run_for_ascend_has_a_script_and_nothing_else():
    assert [path.stem for path in SCRIPTS] == [name for name in ready_made_runs() if "_910" in name]
    for path in SCRIPTS:
        lines = path.read_text().splitlines()
        assert len(lines) == 5
        assert lines[4] == f'launch {path.stem} "$@"'
        assert path.stat().st_mode & stat.S_IXUSR


def test_dry_run_shows_the_plan_and_every_command():
    shown = call(
        SEVEN, "--dry-run", "--output", "/nowhere/run", "method=sequential", NNODES="2", MASTER_ADDR="10.0.0.1"
    )
    assert shown.returncode == 0, shown.stderr
    doctor, ray, cluster, *stages = commands(shown.stdout)
    assert "doctor qwen25_7b_910b method=sequential hardware.nodes=2" in doctor
    assert "8}" in ray
    assert "600 16 NPU" in cluster
    files = [f"/nowhere/run/stage{stage}/coca-mindspeed.json" for stage in (0, 1)]
    assert stages == [f"+ {step} {file}" for file in files for step in ("write", "train")]
    documents = [part.partition("\n+ ")[0] for part in shown.stdout.split("coca-mindspeed.json\n")[1::2]]
    assert [yaml.safe_load(text)["coca"]["stage"] for text in documents] == [0, 1]
    assert not Path("/nowhere").exists()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (SEVEN, []),
        (CONVERT, ["hf2mcore", "qwen25_7b_910b"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.stem,
)
def test_a_python_without_packages_is_named_with_them(script, arguments, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    ran = call(script, *arguments, PYTHON=str(bare))
    assert ran.returncode == 1
    [line] = ran.stderr.splitlines()
    assert {"hydra-core", "torch"} <= set(line.replace(",", "").split())


def test_smoke_trains_the_same_configuration_on_the_tiny_model(tmp_path, no_pictures):
    """The command that the script shows is called here, which saves the start of Python."""
    options = ["--smoke", "--output", str(tmp_path / "run"), "trainer.device=cpu", "--dry-run"]
    options += ["rollout.prompts=2", "rollout.group_size=2", "data.train_size=40", "data.evaluate_size=8"]
    options += ["warm_up.steps=2", "evaluation.preflight=0"]
    ran = call_here(ROOT / "launch" / "qwen25_7b_taco_910b.sh", *options)
    assert ran.returncode == 0, ran.stderr
    shown = shlex.split(ran.stdout.splitlines()[0])
    assert shown[:6] == ["+", sys.executable, "-m", "coca_mindspeed.cli", "train", "qwen25_7b_taco_910b"]
    assert main(shown[4:]) == 0
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]


@pytest.fixture
def own_yaml(tmp_path):
    """A YAML file of a user's own, called from another directory than the repository."""
    write(tmp_path / "mine" / "longer.yaml", "defaults: [qwen25_3b_910b, _self_]\nrollout: {max_new_tokens: 6144}\n")
    return functools.partial(call_here, cwd=tmp_path)


def test_a_yaml_of_ones_own(own_yaml, tmp_path):
    """It is launched, has a smoke run, and its weights are converted."""
    shown = own_yaml(RUN, "--dry-run", "mine/longer.yaml", "rollout.prompts=64")
    assert shown.returncode == 0, shown.stderr
    doctor, ray, _, _, train = commands(shown.stdout)
    file = tmp_path / "mine/longer.yaml"
    assert f"doctor {file} rollout.prompts=64" in doctor
    assert "8}" in ray
    assert train == "+ train runs/longer/stage0/coca-mindspeed.json"
    assert "2048 + 6144" in shown.stdout
    shown = own_yaml(RUN, "mine/longer.yaml", "--smoke", "--dry-run", "trainer.steps=3000")
    assert f"train {tmp_path}/mine/longer.yaml " in shown.stdout
    assert " --output runs/smoke/longer-2" in shown.stdout
    words = shown.stdout.split()  # what is typed wins over the sizes of a smoke run
    assert words.index("trainer.steps=3000") > words.index("trainer.steps=2")
    shown = own_yaml(CONVERT, "mcore2hf", "mine/longer.yaml", "--dry-run", "--output", "out")
    assert shown.returncode == 0, shown.stderr
    assert f" {tmp_path}/out/hf" in shown.stdout  # where it was typed


@pytest.mark.parametrize(
    ("script", "code", "arguments", "environment", "named"), read_table(__file__, "refused_calls.tsv")
)
def test_refused_calls_end_with_a_code_and_name_the_cause(
    own_yaml, verls_keys, script, code, arguments, environment, named
):
    variables = dict(variable.split("=", 1) for variable in environment.split())
    refused = own_yaml(ROOT / "launch" / f"{script}.sh", *arguments.split(), **variables)
    assert refused.returncode == int(code)
    assert named in refused.stderr
    assert "main_ppo" not in refused.stdout


def test_a_python_that_is_not_there():
    refused = call(SEVEN, "--dry-run", PYTHON="/nowhere/python")
    assert refused.returncode == 1
    assert "PYTHON=/nowhere/python" in refused.stderr


def test_without_npus_the_doctor_stops_the_run(stand_in):
    if Path("/dev/davinci0").exists():
        pytest.skip("this machine has NPUs")
    folder, environment = stand_in
    refused = call_here(SEVEN, "--output", str(folder / "run"), **{**environment, "SKIP_DOCTOR": ""})
    assert refused.returncode == 1
    assert "torch_npu" in refused.stdout
    assert f"bash {SEVEN} --smoke" in refused.stderr
    assert not (folder / "ray").exists()


@pytest.mark.parametrize(("stages", "code"), [(1, 1), (2, 0)])
def test_stages_run_and_the_exit_code_of_the_training_comes_back(stand_in, stages, code):
    folder, environment = stand_in
    method = ["coca", "sequential"][stages - 1]
    fails = {"DRIVER_FAILS": "1"} if code else {}
    ended = call(SEVEN, f"method={method}", "--output", str(folder / "run"), **fails, **environment)
    assert ended.returncode == code, ended.stderr
    [log] = (folder / "run" / "logs").iterdir()
    for line, shown in (("a line of the training", ended.stdout), ("a warning of the training", ended.stderr)):
        assert log.read_text().count(line) == shown.count(line) == stages
    assert log.read_text().splitlines()[-1] in (ended.stdout + ended.stderr).splitlines()
    assert ("a worker died" in log.read_text()) == (code == 1)  # the last message of this process
    assert (f"every iteration of {folder}/run is done" in ended.stdout) == (code == 0)
    assert [line.split()[0] for line in (folder / "ray").read_text().splitlines()] == ["started", "stopped"]
    files = [folder / f"run/stage{stage}/coca-mindspeed.json" for stage in range(stages)]
    called = [f"127.0.0.1:{environment['RAY_PORT']} {file}" for file in files]
    assert (folder / "driver").read_text().splitlines() == called
    assert all(file.is_file() for file in files)


def test_a_trial_is_two_iterations_of_the_run_itself(stand_in):
    folder, environment = stand_in
    typed = ("rollout.prompts=64", "checkpoint.interval=1", "data.epochs=0.5", "optimizer.warmup_steps=20")
    ran = call(SEVEN, "--trial", *typed, "--output", str(folder / "run"), **environment)
    assert ran.returncode == 0, ran.stderr
    assert f"check qwen25_7b_910b --metrics {folder}/run/stage0/metrics.jsonl" in ran.stdout
    # Typed overrides win, but for a length in epochs and a warm-up.
    written = json.loads((folder / "run/stage0/coca-mindspeed.json").read_text())["settings"]
    training, section = written["megatron_training"], written["coca"]
    assert (training["train_iters"], training["global_batch_size"], training["save_interval"]) == (2, 64, 1)
    assert (section["eval_interval"], written["actor_config"]["lr_warmup_fraction"]) == (0, 0)


def heed_signals():
    """A shell cannot trap the signals that the test runner was told to ignore (SIGHUP by ``nohup``)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("where", "sent"),
    [
        ("driver", signal.SIGHUP),
        ("training", signal.SIGINT),  # --smoke
        ("cluster", signal.SIGTERM),
    ],
)
def test_a_signal_stops_everything_that_was_started(stand_in, where, sent):
    folder, environment = stand_in
    variable = {"driver": "DRIVER_SLEEPS", "cluster": "CLUSTER_SLEEPS"}.get(where, "UNUSED")
    process = subprocess.Popen(
        ["bash", str(SEVEN), *["--smoke"] * (where == "training"), "--output", str(folder / "run")],
        env={**os.environ, **environment, variable: "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_signals,
    )
    file = folder / ("driver" if where == "driver" else "training")
    written(file)
    process.send_signal(sent)
    process.send_signal(signal.SIGTERM)  # as a scheduler does
    assert process.wait(timeout=300) == 128 + sent  # the child would sleep for longer
    if where != "driver":
        assert ended(int(file.read_text().split()[0]))
    if where != "training":
        assert (folder / "ray").read_text().splitlines()[-1] == "stopped"
        assert len(list((folder / "run" / "logs").iterdir())) == 1


def test_ctrl_c_lets_the_training_end_after_its_step(stand_in):
    """A terminal sends it to the whole process group; Ray is ended afterwards."""
    folder, environment = stand_in
    (folder / "run").mkdir()
    (folder / "run/stop").touch()  # of an earlier start
    process = subprocess.Popen(
        ["bash", str(SEVEN), "--output", str(folder / "run")],
        env={**os.environ, **environment, "DRIVER_STEPS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
        start_new_session=True,
    )
    written(folder / "driver")
    until(lambda: not (folder / "run/stop").exists())
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "stopped after step 7" in errors
    assert (folder / "ray").read_text().splitlines()[-1] == "stopped"
    assert not (folder / "run/stop").exists()


@pytest.mark.parametrize("answer", [None, 0, 7])
def test_a_run_that_another_process_asks_to_stop(tmp_path, answer):
    """Exit code 130 if it has stopped; 0 if its last step was done."""
    request = StopRequest.of(tmp_path)
    stopped = nullcontext() if answer is None else pytest.raises(InterruptedRunError)
    with stopped as raised, stopping_by_signals(Launch("run", output=tmp_path)):
        request.ask()
        if answer is not None:
            request.answer(answer)
    assert answer is None or raised.value.exit_code == 130
    assert not request.is_asked()


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_that_has_lost_its_directory_ends_at_once_and_stops_no_other(tmp_path, handlers, lost):
    request = StopRequest.of(tmp_path)
    claim = vars(Claimant.this_process().claim()) | ({"host": "another"} if lost else {})
    (tmp_path / "running.json").write_text(json.dumps(claim))
    ends, run = pytest.raises(SystemExit) if lost else nullcontext(), Launch("run", output=tmp_path)
    with ends as ended_at_once, ending_by_signals(), stopping_by_signals(run):
        signal.raise_signal(signal.SIGTERM)
        assert request.is_asked()
    assert not lost or ended_at_once.value.code == 143
    assert not request.is_asked()


def test_a_second_start_into_one_output_is_refused(stand_in):
    folder, environment = stand_in
    output = ["--output", str(folder / "run")]
    process = subprocess.Popen(["bash", str(SEVEN), *output], env={**os.environ, **environment, "DRIVER_SLEEPS": "1"})
    try:
        written(folder / "driver")
        again = call(SEVEN, *output, **environment)
        assert again.returncode == 1
        assert f"--output {folder}/run" in again.stderr
        assert (folder / "ray").read_text().count("started") == 1
    finally:
        process.send_signal(signal.SIGTERM)
        until(lambda: (folder / "run/stop").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 143  # the second one ends it at once
    assert not (folder / "run" / "running.json").exists()


@pytest.mark.parametrize("name", ["run", "verl", "convert_weights"])
def test_help_is_printed_whatever_else_is_typed_before_it(name):
    shown = call(ROOT / "launch" / f"{name}.sh", "--resume", "a.b=1", "--help")
    assert shown.returncode == 0
    usage = " ".join(shown.stdout.split())  # argparse breaks a long line
    assert usage.startswith(f"usage: bash {ROOT}/launch/{name}.sh ")
    assert shown.stderr == ""


def test_a_port_that_is_taken_and_a_head_that_is_not_there(stand_in):
    folder, environment = stand_in
    output = "--output", str(folder / "run")
    nodes = {"NNODES": "2", "NODE_RANK": "01", "MASTER_ADDR": own_address(), "CLUSTER_TIMEOUT": "1"}
    refused = call(SEVEN, *output, **environment, **nodes)
    assert refused.returncode == 1
    assert f"{nodes['MASTER_ADDR']}:{environment['RAY_PORT']}" in refused.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(environment["RAY_PORT"])))
        taken.listen()
        refused = call(SEVEN, *output, **environment)
    assert refused.returncode == 1
    assert "RAY_PORT" in refused.stderr


@pytest.mark.parametrize("head_stays", [True, False])
def test_a_worker_ends_well_only_where_its_head_has_ended_the_cluster(stand_in, head_stays):
    """Ray ends with code 1 in both cases; a signal asks the head to stop, and Ray goes on meanwhile."""
    folder, environment = stand_in
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": own_address(), "RAY_EXIT": "1"}
    with socket.create_server((nodes["MASTER_ADDR"], int(environment["RAY_PORT"]))) as head:
        worker = subprocess.Popen(
            ["bash", str(SEVEN), "--output", str(folder / "run")],
            env={**os.environ, **environment, **nodes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        written(folder / "ray")
        if not head_stays:
            worker.send_signal(signal.SIGTERM)
            until(lambda: (folder / "run/stop").exists())
            head.close()
        (folder / "go").touch()
        said, errors = worker.communicate(timeout=300)
    assert worker.returncode == (1 if head_stays else 0), errors
    assert ("the head has ended the cluster" in said) != head_stays
    assert ("Ray has ended on this node with code 1" in errors) == head_stays


def test_a_run_that_is_done_starts_nothing(stand_in):
    folder, environment = stand_in
    checkpoint(folder / "run/stage0/checkpoints", 4, iteration="4")
    length = ["data.epochs=null", "trainer.steps=4", "evaluation.interval=0"]
    ended = call_here(SEVEN, "--resume", *length, "--output", str(folder / "run"), **environment)
    assert ended.returncode == 0, ended.stderr
    assert f"every iteration of {folder}/run is done" in ended.stdout
    assert not (folder / "ray").exists()


def sourced(ascend: Path, then: str, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    """What a launch script's shell is like after CANN's and ATB's scripts."""
    found = f"find_python; ascend_environment; {then}"
    return shell(found, PYTHON=str(python), ASCEND_INSTALL_PATH=str(ascend))


def ascend_scripts(folder: Path, cann: str, atb: str) -> Path:
    write(folder / "ascend-toolkit/set_env.sh", cann)
    write(folder / "nnal/atb/set_env.sh", atb)
    return folder


def test_commands_that_fail_in_canns_script_do_not_end_ours(tmp_path):
    cann = "false\nexport NOTHING=$NOT_SET\nfalse | cat\nexport ASCEND_TOOLKIT_HOME=/cann\n"
    ascend = ascend_scripts(tmp_path, cann, 'export ATB_ARGUMENTS="$#"\nreturn 3\n')
    went = sourced(ascend, 'echo "$ASCEND_TOOLKIT_HOME $ATB_ARGUMENTS"')
    assert went.returncode == 0, went.stderr
    assert went.stdout.splitlines()[-1] == "/cann 0"
    assert f"launch: {ascend}/nnal/atb/set_env.sh ended with code 3" in went.stderr
    for mistake in ("false; echo still here", "echo $NOT_SET; echo still here"):
        ended = sourced(ascend, mistake)
        assert ended.returncode == 1  # our own mistakes end the script as before
        assert "still here" not in ended.stdout


def test_runs_and_conversions_know_the_cpu_shim(tmp_path):
    assert sourced(tmp_path, 'echo "$COCA_MINDSPEED_CPU_SHIM"').stdout.split() == ["tests.support.mindspeed_host"]


def test_the_order_of_cann_toolkit_and_environment(tmp_path, monkeypatch):
    ascend = ascend_scripts(tmp_path, "export ASCEND_TOOLKIT_HOME=/old\n", "export ATB_HOME_PATH=/atb\n")
    for name in ("ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    shown = 'echo "$ASCEND_TOOLKIT_HOME $ATB_HOME_PATH"'
    assert sourced(ascend, shown).stdout.splitlines()[-1] == "/old /atb"
    write(tmp_path / "cann/set_env.sh", "export ASCEND_TOOLKIT_HOME=/new\n")
    assert sourced(ascend, shown).stdout.splitlines()[-1] == "/new /atb"
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/mine")
    monkeypatch.setenv("ATB_HOME_PATH", "/my_atb")
    assert sourced(ascend, shown).stdout.splitlines()[-1] == "/mine /my_atb"


@pytest.mark.parametrize(("machine", "preloaded"), [("aarch64", True), ("x86_64", False)])
def test_scikit_learns_openmp_is_loaded_first_on_aarch64(tmp_path, monkeypatch, machine, preloaded):
    library, programs = write(tmp_path / "libgomp-1.so"), tmp_path / "bin"
    for name, text in (
        ("uname", f"echo {machine}"),
        ("python", f'case "$*" in *libgomp*) echo "{library}" ;; *) exec "{sys.executable}" "$@" ;; esac'),
    ):
        write(programs / name, f"#!/bin/bash\nunset LD_PRELOAD\n{text}\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    went = sourced(tmp_path, 'echo "preloaded ${LD_PRELOAD:-nothing}"; unset LD_PRELOAD', programs / "python")
    assert (str(library) in went.stdout.splitlines()[-1]) == preloaded, went.stderr


def test_canns_and_atbs_scripts_find_the_python_that_trains(tmp_path):
    for name in ("python", "python3"):
        write(tmp_path / "env" / name, '#!/usr/bin/env bash\necho "the one that trains"\n').chmod(0o755)
    atb = 'export ATB_PYTHON=$(python3 -c "import torch")\n'
    chosen = os.path.relpath(tmp_path / "env" / "python", ROOT)
    went = sourced(ascend_scripts(tmp_path / "ascend", "", atb), 'cd /; echo "$ATB_PYTHON"; "$PYTHON"', chosen)
    assert went.returncode == 0, went.stderr
    assert went.stdout.splitlines()[-2:] == ["the one that trains"] * 2


def test_a_converter_that_fails_leaves_the_original_models_modes(tmp_path):
    model, output, home = tmp_path / "model", tmp_path / "run", tmp_path / "home"
    files = [write(model / name, "old") for name in ("tokenizer.json", "model.safetensors")]
    files.append(write(model / "config.json", model_config(compose_run("qwen25_3b_910b").run)))
    for file in files:
        file.chmod(0o444)
    checkpoint(output / "stage0/checkpoints", 4, iteration="10")
    for package in CHECKOUTS.values():
        (home / package).mkdir(parents=True)
    write(
        home / "convert_ckpt.py",
        "import os, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--save-dir') + 1])\n"
        "[path.chmod(0o640) for path in folder.iterdir()]\n"
        "sys.exit(5 if os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS') == '1' else 6)\n",  # Megatron refuses TP > 1 else
    )
    arguments = ["mcore2hf", "qwen25_3b_910b", "--output", str(output), f"model.path={model}"]
    failed = call(CONVERT, *arguments, **dict.fromkeys(CHECKOUTS, str(home)))
    assert failed.returncode == 5, failed.stderr
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o444}


@pytest.mark.parametrize(
    ("arguments", "tp", "pp"),
    [
        ("hf2mcore qwen3_8b_910b", 4, 1),
        ("mcore2hf qwen25_3b_910b --iteration 50", 1, 1),
    ],
)
def test_conversion_shows_its_commands(arguments, tp, pp):
    shown = call_here(CONVERT, *arguments.split(), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    converter = next(line for line in shown.stdout.splitlines() if "convert_ckpt.py" in line)
    assert f"--target-tensor-parallel-size {tp} --target-pipeline-parallel-size {pp} " in converter
    assert ("--model-type-hf qwen3 --spec mindspeed_llm.tasks.models.spec.qwen3_spec" in converter) == (tp == 4)
    finish = shown.stdout.splitlines()[-1]
    assert ("/hf-50.converting" in converter) == shlex.split(finish)[-1].endswith("/hf-50") == ("50" in arguments)


def test_conversion_names_all_missing_checkouts_and_how_to_get_them():
    refused = call_here(CONVERT, "hf2mcore", "qwen25_3b_910b", **dict.fromkeys(CHECKOUTS, ""))
    assert refused.returncode == 1
    assert all(variable in refused.stderr for variable in CHECKOUTS)
    assert refused.stderr.count("git clone ") == len(CHECKOUTS)
    assert "docs/ascend.md" in refused.stderr
