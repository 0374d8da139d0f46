"""Rows carry the index of their record, so every process that looks one up has to have the records that were meant."""

import json
import pickle
import shlex
import shutil
import socket
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from coca_mindspeed.cli import main
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.run_marker import read_run_marker
from coca_mindspeed.data.records import Record, read_records, write_records
from coca_mindspeed.data.registry import conversion_command
from coca_mindspeed.errors import ConfigError, DataError
from coca_mindspeed.mindspeed import cluster_run, launch
from coca_mindspeed.mindspeed.cluster_run import ClusterRun
from coca_mindspeed.mindspeed.plan import make_plan
from coca_mindspeed.mindspeed.start import driver, records, verifiers
from coca_mindspeed.mindspeed.start.process import CocaSettings
from coca_mindspeed.mindspeed.start.records import (
    all_records,
    check_weights_on_nodes,
    differing_weights,
    encode_files,
    load_prompts,
    read_record_file,
    run_records,
    take_files,
    weights_digests,
)
from coca_mindspeed.mindspeed.start.run_file import StageFiles, mindspeed_values, stage_marker
from coca_mindspeed.utils.files import file_sha256
from tests.mindspeed.builders import NATIVE, checkpoint, write
from tests.tokenizers_for_tests import qwen_like


def write_sums(path, *answers):
    write_records(path, [Record(answer, "sums", "math", f"What is {answer}?", answer) for answer in answers])
    return path


CHAT = [{"role": "user", "content": "What is 1+1?"}]
LAYOUTS = {
    "problem": {"problem": "What is 1+1?", "answer": "2", "solution": "It is 2."},
    "alpaca": {"instruction": "What is 1+1?", "input": "", "output": "2"},
    "verl": {"prompt": CHAT, "ability": "math", "reward_model": {"style": "rule", "ground_truth": "2"}},
    "chat": {"messages": [*CHAT, {"role": "assistant", "content": "2"}]},
    "chat with a label": {"messages": [*CHAT, {"role": "assistant", "content": "2"}], "label": "good"},
    "number": {"query": "What is 1+1?", "label": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_refuses_another_layout_and_prints_the_command_that_converts_it(tmp_path, capsys, layout):
    file = tmp_path / "my data.jsonl"
    file.write_text(json.dumps(LAYOUTS[layout]) + "\n")
    check = ["check", "qwen25_7b_910b", "data.evaluate=null", "data.epochs=null", "trainer.steps=2", "--quiet"]
    assert main([*check, f"data.train='{file}'"]) == 1
    message = capsys.readouterr().err
    assert "data.columns" not in message  # a cluster refuses it
    command = shlex.split(message[message.index("coca-mindspeed data") :].partition("\n")[0], comments=True)
    assert main(command[1:]) == 0
    converted = tmp_path / "my data_records/train.jsonl"
    assert [(found.question, found.answer) for found in read_records(converted)] == [("What is 1+1?", "2")]
    assert main([*check, f"data.train='{converted}'"]) == 0


def test_columns_that_are_not_found_are_left_open(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n')
    columns = json.loads(shlex.split(conversion_command(file), comments=True)[5])
    assert columns == {"question": "COLUMN", "answer": "COLUMN"}
    assert "--columns" in conversion_command(tmp_path / "absent.jsonl")


def test_check_grades_the_gold_answers_against_themselves(tmp_path, capsys):
    train = write_sums(tmp_path / "train.jsonl", "1", "{2")
    check = ["check", "qwen25_7b_910b", f"data.train={train}", "data.evaluate=null"]
    assert main([*check, "data.epochs=null", "trainer.steps=2", "--quiet"]) == 1
    assert f"{train}:2: " in capsys.readouterr().err


def _other_weights(folder):
    """Weights that differ in their last bytes alone, beyond the first megabyte."""
    with (folder / "release/mp_rank_00/model_optim_rng.pt").open("r+b") as file:
        file.seek(3 * 2**20 - 1)
        file.write(b"x")


ELSEWHERE = {
    "other records": (lambda place: write_sums(place / "train.jsonl", "2"), None, None),  # the run carries its own
    "other weights": (lambda place: _other_weights(place / "weights"), "weights/release/mp_rank_00: ", "SHA-256"),
    "another time of download": (lambda place: write(place / "weights/.cache/download/x", "1"), None, None),
    "no weights": (lambda place: shutil.rmtree(place / "weights"), "weights/release: ", "not there"),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_the_weights_of_all_nodes_are_compared_before_a_model_is_built(tmp_path, monkeypatch, elsewhere):
    """Ray is stood in for: its second node has another file."""
    change, where, named = ELSEWHERE[elsewhere]
    weights = tmp_path / "weights"
    checkpoint(weights, 1)
    (weights / "release/mp_rank_00/model_optim_rng.pt").write_bytes(bytes(3 * 2**20))
    write(weights / ".cache/download/model.metadata", "a time")
    train = write_sums(tmp_path / "train.jsonl", "1")
    config = OmegaConf.create({"megatron_training": {"load": str(weights), "data_path": str(train)}})
    planned = weights_digests(driver.weight_folders(config))

    def options(*, num_cpus, scheduling_strategy):
        assert num_cpus == 0  # also where every CPU is reserved
        assert scheduling_strategy != "dead"  # Ray would fail, or wait for it
        if scheduling_strategy == "second":
            change(tmp_path)
        return SimpleNamespace(remote=differing_weights)

    nodes = [{"NodeID": name, "Alive": name != "dead"} for name in ("first", "dead", "second")]
    ray = SimpleNamespace(nodes=lambda: nodes, remote=lambda _: SimpleNamespace(options=options), get=list)
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    for name, module in (("ray", ray), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    if named is None:
        check_weights_on_nodes(planned)
        return
    with pytest.raises(DataError, match=named) as caught:
        check_weights_on_nodes(planned)
    assert f"{where}on {socket.gethostname()}" in str(caught.value)


def test_a_checkpoint_is_not_compared(tmp_path):
    """A node needs the part of its own ranks."""
    checkpoint(tmp_path / "run", 4, iteration="10")
    config = OmegaConf.create({"actor_config": {"load": str(tmp_path / "run")}})
    assert driver.weight_folders(config) == []


def test_a_run_is_not_resumed_on_other_questions_of_the_same_name(tmp_path):
    train = write_sums(tmp_path / "train.jsonl", *map(str, range(300)))
    held_out = write_sums(tmp_path / "held_out.jsonl", "3")
    overrides = (f"data.train={train}", f"data.evaluate={held_out}", "data.rows=300")
    run = compose_run("qwen25_7b_910b", overrides).run
    files = StageFiles(tmp_path / "run")

    def values(**options):
        return mindspeed_values(ClusterRun(run), make_plan(run).iterations, files, **options)

    begun = values()
    assert begun["coca"]["data_sha256"] == {str(path): file_sha256(path) for path in (train, held_out)}
    stage_marker(begun).write(files.results, resumed=False)
    checkpoint(files.checkpoints, 4, iteration="50")
    write_sums(held_out, "4")  # other held-out questions are another validation and the same run
    assert values(resume=True)["coca"]["data_sha256"][str(held_out)] == file_sha256(held_out)
    write_sums(train, *map(str, range(1, 301)))
    with pytest.raises(ConfigError) as caught:
        values(resume=True)
    assert [problem[:2] for problem in caught.value.problems] == [("another-run", "data.train.sha256")]
    train.unlink()  # a machine without the file
    assert values(resume=True)["coca"]["data_sha256"] == {str(held_out): file_sha256(held_out)}


@pytest.mark.parametrize(
    ("options", "stages"),
    [(["--dry-run"], 0), ([], 1), (["coca.method=caliber"], 2)],
    ids=["dry run", "start", "start of two stages"],
)
def test_the_starting_process_reads_each_file_once(options, stages, tmp_path, homes, monkeypatch):
    def train(training):
        trained.append(training)
        checkpoint(Path(training.config.actor_config.save), 4, iteration="500")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIP_DOCTOR", "1")
    write(homes["MINDSPEED_RL_HOME"] / "configs/envs/runtime_env.yaml", "env_vars: {}\n")
    for module, name, stub in (
        (driver, "matching_manifest", lambda _root: SimpleNamespace(release="2.3.0")),
        (driver, "train", train),
        (launch, "ray_cluster", lambda *_, **__: nullcontext()),
        (launch, "require_free_port", lambda _nodes: None),
        (launch, "open_log", lambda *_: None),
    ):
        monkeypatch.setattr(module, name, stub)
    trained, calls = [], Counter()

    def count(module, name, file_of):
        original = getattr(module, name)

        def counted(*arguments):
            calls[name, file_of(*arguments)] += 1
            return original(*arguments)

        monkeypatch.setattr(module, name, counted)

    count(records, "read_records", lambda path: path.name)
    count(records, "file_sha256", lambda path: path.name)
    count(records, "bounded_prompt_tokens", lambda _tokenizer, rows, *_: len(rows))
    count(verifiers, "build_grader", lambda *_: "all")
    count(cluster_run, "translate", lambda *_: "run")
    opened, original = Counter(), Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *how, **named: opened.update([path.name]) or original(path, *how, **named)
    )
    qwen_like().save_pretrained("model")
    write_sums(tmp_path / "train.jsonl", *map(str, range(40)))
    write_sums(tmp_path / "held_out.jsonl", *map(str, range(100, 110)))
    checkpoint(tmp_path / "weights", 4)
    file = write("grpo.yaml", NATIVE)
    changes = ["rl_config.verifier_function=[coca]", "megatron_training.tokenizer_name_or_path=model"]
    changes += ["coca.eval_data=held_out.jsonl", "coca.eval_interval=5", "coca.grader=exact"]
    assert main(["launch", str(file), *changes, *options]) == 0
    files = ["train.jsonl", "held_out.jsonl"]
    assert [opened[file] for file in files] == [2, 2]  # hashed and parsed
    expected = dict.fromkeys([(name, file) for name in ("read_records", "file_sha256") for file in files], 1)
    expected |= {("build_grader", "all"): 1, ("translate", "run"): 1}
    assert len(trained) == stages
    for training in trained:
        marker = read_run_marker(training.process.coca.output_dir, "mindspeed_rl")
        assert {use: digest["sha256"] for use, digest in marker.data.items()} == {
            use: file_sha256(tmp_path / file) for use, file in zip(("train", "evaluate"), files, strict=True)
        }
        prompt = marker.prompt
        method = "caliber" if stages > 1 else "coca"
        assert (prompt.method, prompt.max_new_tokens, prompt.compute_dtype) == (method, 2048, "bfloat16")
    if stages:
        assert all([file.prompts is None for file in training.files.values()] == [False] * 2 for training in trained)
        expected |= {("bounded_prompt_tokens", 40): 1, ("bounded_prompt_tokens", 10): 1}
    assert calls == expected


@pytest.mark.parametrize("tokenizer_is_here", [True, False])
def test_a_process_of_the_training_uses_the_records_that_the_starting_one_has_read(tmp_path, tokenizer_is_here):
    """Without the files, of which the node of the process may have others, or none."""
    if tokenizer_is_here:
        qwen_like().save_pretrained(tmp_path / "model")
    train = write_sums(tmp_path / "train.jsonl", *map(str, range(700, 740)))
    files = encode_files(tmp_path / "model", {str(train): read_record_file(train)}, CocaSettings(), 400)
    expected, rows = list(read_records(train)), [f"What is {sum_}?" for sum_ in range(700, 740)]
    train.unlink()
    carried = pickle.loads(pickle.dumps(files))  # noqa: S301 - as Ray does
    assert (carried[str(train)].prompts is not None) == tokenizer_is_here
    take_files(carried)
    tokenizer = qwen_like()
    prompts = load_prompts(train, tokenizer, CocaSettings(), 400)
    assert all_records()[str(train)] == run_records(str(train)) == tuple(expected)
    assert len(prompts) == len(rows)
    assert all(row in tokenizer.decode(ids) for row, ids in zip(rows, prompts, strict=True))


def test_a_start_without_its_records_is_refused(tmp_path, monkeypatch, capsys):
    """Also where the doctor is not asked: the starting process reads them for all others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIP_DOCTOR", "1")
    arguments = ["launch", "qwen25_7b_910b", "data.train=absent.jsonl", "data.evaluate=null", "data.rows=4000"]
    assert main(arguments) == 1
    assert "data.train" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
