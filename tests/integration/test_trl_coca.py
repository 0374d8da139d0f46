"""``CocaTrainer`` and its example in TRL's own environment (``make test-trl``)."""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import shutil
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL has an environment of its own: run `make test-trl`")

import datasets  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

from coca_mindspeed import coca_advantages, method_settings, parse_response, segment_objective, training_method  # noqa: E402
from coca_mindspeed.config.compose import compose_run  # noqa: E402
from coca_mindspeed.config.schema import WarmUpConfig  # noqa: E402
from coca_mindspeed.data.arithmetic import arithmetic_records  # noqa: E402
from coca_mindspeed.data.export import export_records, record_of, trl_row  # noqa: E402
from coca_mindspeed.data.records import Record, write_records  # noqa: E402
from coca_mindspeed.errors import ConfigError, DataError  # noqa: E402
from coca_mindspeed.integrations.settings import check_sources  # noqa: E402
from coca_mindspeed.integrations.trl import CocaTrainer  # noqa: E402
from coca_mindspeed.local.inputs import load_data  # noqa: E402
from coca_mindspeed.local.load import load_policy  # noqa: E402
from coca_mindspeed.local.run import warm_start  # noqa: E402
from coca_mindspeed.local.sft import warm_up  # noqa: E402
from coca_mindspeed.local.tiny_model import write_tiny_model  # noqa: E402
from coca_mindspeed.scoring.health import HealthWarnings, gap_problem  # noqa: E402
from coca_mindspeed.upstream.manifest import ManifestError, matching_manifest  # noqa: E402
from tests.support import thoughts  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_coca.py"
spec = importlib.util.spec_from_file_location("trl_coca", EXAMPLE)
example = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = example
spec.loader.exec_module(example)

pytestmark = pytest.mark.timeout(1800)  # with the warm-up of a model; on a busy machine 10 minutes are not enough

METHOD = {"confidence_decimals": 2, "max_confidence_tokens": 6, "advantage_eps": 0.05}
#: In the library's words.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo's warm start."""
    torch.set_num_threads(1)
    config = compose_run("demo").run
    records, _ = load_data(config.data)
    return warm_start(config, tmp_path_factory.mktemp("demo"), records, torch.device("cpu"), show_progress=False)


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory):
    """A tiny model that answers behind a thought."""
    directory = tmp_path_factory.mktemp("thinking")
    write_tiny_model(directory, 0, thoughts.CHARACTERS)
    policy = load_policy(directory, compose_run("demo").run.model, torch.device("cpu"))
    records = thoughts.behind_thoughts(arithmetic_records(4000, "train", 0))
    warm_up(policy, records, method_settings(), WarmUpConfig(steps=300), 0)
    policy.model.save_pretrained(directory)
    return directory


def trainer_of(model, tmp_path, method=None, **given):
    method = METHOD | (method or {})
    given.setdefault("train_dataset", example.sums(64, "train", **method))
    given.setdefault("eval_dataset", example.sums(500, "evaluate", **method))
    given.setdefault("coca", {"method": method})
    trainer = example.demo_trainer(model, tmp_path / "trl", 2, **given)
    trainer.model.train()
    return trainer


def questions(trainer, prompts, group=8):
    """Rows as TRL's sampler gives them: each prompt ``group`` times, one after the other."""
    return [row for row in trainer.train_dataset.select(range(prompts)) for _ in range(group)]


def gold(row):
    return record_of(row, "row").answer


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"steps_per_generation": 1}, 1),  # TRL's default: one step samples and updates, without old log-probs
        ({"steps_per_generation": 2}, 1),  # TRL's own pass, for old ones
        ({"steps_per_generation": 1, "mask_truncated_completions": True}, 1),
        ({"steps_per_generation": 2, "mask_truncated_completions": True}, 2),  # its old ones are of masked prompts
    ],
)
def test_the_entropy_bonus_is_of_the_weights_that_sampled(model, tmp_path, options, passes):
    options = options | {"max_completion_length": 8}  # some responses are cut off
    trainer = trainer_of(model, tmp_path, {"entropy_bonus": 0.1}, options=options)
    made, lengths = [], []
    compute, reward = trainer._get_per_token_logps_and_entropies, trainer._calculate_rewards

    @functools.wraps(compute)
    def computed(*given, **named):
        made.append(compute(*given, **named))
        return made[-1]

    def rewarded(inputs, prompts, completions, sampled):
        lengths.extend(map(len, sampled))
        return reward(inputs, prompts, completions, sampled)

    trainer._get_per_token_logps_and_entropies, trainer._calculate_rewards = computed, rewarded
    output = trainer._generate_and_score_completions(questions(trainer, 8))
    assert len(made) == passes
    ids, lengths = output["completion_ids"], torch.tensor(lengths)
    inside = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    assert (inside.sum() > output["completion_mask"].sum()) == ("mask_truncated_completions" in options)
    log_probs = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([output["prompt_ids"], ids], dim=1),
        torch.cat([output["prompt_mask"], inside], dim=1),
        ids.shape[1],
    )[0]
    correct = torch.tensor(list(trainer._logs["rewards"]["correct"]))
    given = ids, lengths, correct, trainer.processing_class, 8
    bonus = coca_advantages(*given, method=method_settings(**METHOD, entropy_bonus=0.1), log_probs=log_probs).advantages
    torch.testing.assert_close(output["advantages"], bonus, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(bonus, coca_advantages(*given, method=method_settings(**METHOD)).advantages)
    first = trainer._logs["extra"]["confidence_advantage"][0]
    assert first == pytest.approx(float(bonus[0, 0]), abs=1e-5)


@pytest.mark.parametrize("method", [{"name": "joint"}, {"name": "coca"}, {"thinking": True}], ids=str)
def test_advantages_and_metrics_are_those_of_the_library(request, tmp_path, method):
    thinking = "thinking" in method
    model, method = request.getfixturevalue("thinking_model" if thinking else "model"), METHOD | method
    options = {"pad_to_multiple_of": 32, "max_completion_length": 30 if thinking else 16}
    trainer = trainer_of(model, tmp_path, {**method, "advantage_scale": "batch"}, options=options)
    output = trainer._generate_and_score_completions(questions(trainer, 8))
    ids, lengths = output["completion_ids"], output["completion_mask"].sum(dim=1)
    assert ids.shape[1] == 32
    correct = torch.tensor(list(trainer._logs["rewards"]["correct"]))
    text = trainer.processing_class
    settings = method_settings(**method, advantage_scale="batch")
    expected = coca_advantages(ids, lengths, correct, text, 8, method=settings)
    torch.testing.assert_close(output["advantages"], expected.advantages)
    logged = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    found = {name: logged[name] for name in expected.metrics}
    assert found == pytest.approx(expected.metrics, rel=0, abs=0, nan_ok=True)
    assert logged["advantage/deviation"] > 0
    stated = [None if math.isnan(value) else value for value in trainer._logs["extra"]["confidence"]]
    responses = text.batch_decode(ids, True)
    assert stated == [parse_response(each, decimals=2, thinking=thinking).confidence for each in responses]
    assert (expected.metrics.get("response/open_thought_share", 1) < 0.5) == thinking
    if thinking:
        trainer.train()
        assert trainer.state.global_step == 4
        last = next(row for row in reversed(trainer.state.log_history) if "rollout/ece" in row)
        assert last["response/thought_length"] > 8


def test_the_loss_of_trl_is_the_papers(model, tmp_path):
    trainer = trainer_of(model, tmp_path)
    batch = trainer._generate_and_score_completions(questions(trainer, 8))
    mask, width = batch["completion_mask"].bool(), batch["completion_ids"].shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    log_probs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, width)[0]
    # Old log-probs on both sides of the clip.
    noise = 0.3 * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(0))
    batch["old_per_token_logps"] = log_probs.detach() + noise
    first = torch.arange(width) < 6
    masks = {"confidence": mask & first, "answer": mask & ~first}
    ours = segment_objective(log_probs, batch["old_per_token_logps"], batch["advantages"], masks, clip=0.2).loss
    trainer.model.eval()  # outside of train(), TRL knows no accumulation; the model has no dropout
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(ours.item(), rel=1e-5, abs=1e-6)  # terms of order 1 cancel
    assert abs(loss.item()) > 1e-3
    parameters = list(trainer.model.parameters())
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("more", "stages"), [({}, [0, 0, 1, 1]), ({"stage_shares": [1, 3]}, [0, 1, 1, 1])])
def test_the_stages_of_a_method_follow_the_steps(model, tmp_path, more, stages):
    """``caliber`` trains its answer in the second stage only."""
    record = Record("1", "sums", "arithmetic", "1+0", "1", metadata={"grader": "exact"})
    row = trl_row(record, training_method("caliber").system_prompt, 0)
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "steps_per_generation": 1, "max_steps": 4}
    trainer = trainer_of(
        *(model, tmp_path, {"name": "caliber"}),
        coca={"method": METHOD | {"name": "caliber"}, **more},
        train_dataset=datasets.Dataset.from_list([row] * 8),
        options=options,
    )
    tokenizer, found = trainer.processing_class, []
    texts = [f"<confidence>0.{i}0</confidence>{i % 2}<confidence>0.{i}5</confidence>" for i in range(4)]
    sampled = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    trainer._generate_single_turn = lambda *_, **__: (sampled, None)

    class Seen(TrainerCallback):
        def on_step_end(self, *_, **__):
            extra = trainer._logs["extra"]
            found.append([any(extra[f"{name}_advantage"]) for name in ("confidence", "answer", "confidence_after")])

    trainer.add_callback(Seen())
    trainer.train()
    assert found == [[True, bool(stage), bool(stage)] for stage in stages]


def test_first_sight_repeated_and_held_out(model, tmp_path, monkeypatch):
    """A rollout is an epoch, an evaluation two batches; answers are right in training, wrong on held-out questions."""
    record = Record("1", "sums", "arithmetic", "1+0", "1", metadata={"grader": "exact"})
    asked = [record, dataclasses.replace(record, question="0+1")]
    prompt = training_method("coca").system_prompt
    rows, held_out = (datasets.Dataset.from_list([trl_row(one, prompt, 0)] * 2) for one in asked)
    options = {"num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 1, "max_steps": 6}
    options |= {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 2, "logging_steps": 1}
    trainer = trainer_of(model, tmp_path, train_dataset=rows, eval_dataset=held_out, options=options)
    tokenizer = trainer.processing_class

    def responses(prompts, *_, **__):
        right, stated = int(trainer.model.training), "80" if trainer.model.training else f"{len(evaluated) + 6}0"
        evaluated.extend([] if right else [stated])
        text = f"<confidence>0.{stated}</confidence>{right}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        return [ids] * len(prompts), None

    evaluated, steps = [], []
    trainer._generate_single_turn = responses
    after_step = HealthWarnings.after_step
    monkeypatch.setattr(HealthWarnings, "after_step", lambda self, *row: (steps.append(row), after_step(self, *row))[1])
    trainer.train()
    assert evaluated == ["60", "70", "80", "90"]  # TRL evaluates at the end, too
    first = next(row for row in trainer.state.log_history if "eval_held_out/accuracy" in row)
    expected = {"eval_held_out/accuracy": 0.0, "eval_held_out/confidence": 0.65, "eval_held_out/gap_error": 0.05}
    assert {key: first[key] for key in expected} == pytest.approx(expected)
    train = [row for row in trainer.state.log_history if "rollout/ece" in row]
    assert [row["first_sight/accuracy"] for row in train] == [1.0, *[None] * 5]
    assert [row["repeated/accuracy"] for row in train] == [None, *[1.0] * 5]
    assert [row["rollout/times_asked"] for row in train] == [1, 1, 2, 3, 4, 5]
    assert [number for number, row in steps if "held_out/accuracy" in row] == [6]
    assert gap_problem([row for _, row in steps]).keys() == {"held_out_gap"}


QWEN3 = (
    "{% for m in messages %}{{ m.content }}{% endfor %}=<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "options", "coca", "accepted"),
    [
        (QWEN3, {}, {}, False),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, {}, True),
        (QWEN3, {}, {"method": {"thinking": True}}, True),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, {"method": {"thinking": True}}, False),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}=", {}, {}, False),
    ],
)
def test_the_chat_template_is_checked(model, tmp_path, template, options, coca, accepted):
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template = template
    given = {"processing_class": tokenizer, "options": options, "coca": coca | {"grader": "exact"}}
    prompt = method_settings(**coca.get("method", {})).system_prompt
    for name, split in (("train_dataset", "train"), ("eval_dataset", "evaluate")):
        rows = [trl_row(record, prompt, row) for row, record in enumerate(arithmetic_records(64, split, 0))]
        given[name] = datasets.Dataset.from_list(rows)
    with contextlib.nullcontext() if accepted else pytest.raises(ConfigError) as refusal:
        trainer_of(model, tmp_path, **given)
    assert accepted or str(model) in str(refusal.value)


@pytest.mark.parametrize(("end", "accepted"), [("=", True), ("<think>\n", False), ("<think></think>", True)])
def test_a_rendered_prompt_opens_no_thought(model, tmp_path, end, accepted):
    prompt = training_method("coca").system_prompt + "1+1" + end
    data = datasets.Dataset.from_list([{"prompt": prompt}] * 8)
    with contextlib.nullcontext() if accepted else pytest.raises(ConfigError, match="<think>"):
        trainer_of(model, tmp_path, train_dataset=data, reward_funcs=lambda completions, **_: [1.0] * len(completions))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_that_does_not_ask_for_the_confidence_is_refused(model, tmp_path, streamed):
    asking, other = example.sums(2, "train"), example.sums(2, "train", name="rlcr")
    data = other.to_iterable_dataset() if streamed else datasets.concatenate_datasets([asking, other])
    with pytest.raises(DataError, match=f"train_dataset: row {1 if streamed else 3}"):
        trainer_of(model, tmp_path, train_dataset=data)


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        *(("loss_type", name, True) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")),
        ("loss_type", "vespo", False),
        ("importance_sampling_level", "sequence", False),
        ("off_policy_mask_threshold", 0.05, False),
        ("top_entropy_quantile", 0.5, False),
    ],
)
def test_the_answers_log_probs_do_not_weigh_the_confidences_tokens(model, tmp_path, option, value, accepted):
    """Advantages of shape [B, T] reach each token alone; it fails if TRL drops them, or one of the options changes."""
    trainer = trainer_of(model, tmp_path)
    trainer.model.eval()
    setattr(trainer, option, value)
    tokens = torch.arange(10)[None].expand(4, -1)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(4, 10, generator=generator)
    first, random = tokens < 4, torch.rand(4, 10, generator=generator)
    mask = torch.ones_like(tokens)
    batch = {"prompt_ids": tokens[:, :2], "prompt_mask": mask[:, :2], "completion_ids": tokens, "completion_mask": mask}

    def weights(change):
        """The gradient of the loss with respect to the log-prob of each token."""
        log_probs = (random + change * ~first).requires_grad_()
        entropies = random + change * ~first
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropies, None)
        old = {"old_per_token_logps": random - 0.1, "num_items_in_batch": mask.sum()}
        loss = trainer._compute_loss(trainer.model, {**batch, **old, "advantages": advantages})
        return torch.autograd.grad(loss, log_probs)[0]

    before, after = weights(0.0), weights(-0.3)
    if accepted:
        assert (before.sign() == -advantages.sign()).all()
    assert torch.allclose(before[first.expand_as(before)], after[first.expand_as(before)]) == accepted


def test_a_reward_function_of_ones_own(model, tmp_path):
    """It sees answers without confidences; ungradable ones take no part; other numbers are refused."""
    seen, verdicts = [], [[None, *[True, False] * 7, True], [0.5] * 16]

    def own(completions, solution, **_):
        seen.extend(each[0]["content"] for each in completions)
        assert len(solution) == len(completions)
        return verdicts.pop(0)

    trainer = trainer_of(model, tmp_path, reward_funcs=own)
    rows = questions(trainer, 2)
    output = trainer._generate_and_score_completions(rows)
    texts = trainer.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    assert seen == [parse_response(text, decimals=2).answer for text in texts]
    assert not output["advantages"][0].any()
    assert output["advantages"][1:8].any()
    assert trainer._metrics["train"]["grading/ungradable_share"] == [1 / 16]
    with pytest.raises(ConfigError, match=r"own: .*0\.5"):
        trainer._generate_and_score_completions(rows)


class FakeVllm:
    """Stands in for TRL's client of a vLLM server."""

    def __init__(self, **_):
        self.synced = 0

    def update_named_params(self, metadata, weights):
        self.synced += len(list(weights))

    def init_communicator(self, **_):
        pass

    def reset_prefix_cache(self):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts, *, n=1, **_):
        sampled = [ids for _ in prompts for ids in SAMPLED[:n]]
        return {
            "prompt_ids": prompts,
            "completion_ids": sampled,
            "logprobs": [[[-0.5]] * len(ids) for ids in sampled],
        }


SAMPLED = []


def test_the_boundary_is_found_on_the_ids_that_vllm_sampled(model, tmp_path, monkeypatch):
    """A special token inside the confidence has no text: decoded and tokenised again, the boundary would move."""
    for name, value in {"is_vllm_available": lambda *_: True, "VLLMClient": FakeVllm}.items():
        monkeypatch.setattr(vllm_generation, name, value, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # TRL adds RANK and others
    monkeypatch.setattr(vllm_generation, "SamplingParams", lambda **given: given, raising=False)
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_mode": "token_truncate"}
    trainer = trainer_of(model, tmp_path, options=options)
    tokenizer = trainer.processing_class
    texts = [f"<confidence>0.{i}5</confidence>{i}" for i in range(8)]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    SAMPLED[:] = [[ids[0], tokenizer.pad_token_id, *ids[1:], tokenizer.eos_token_id] for ids in encoded]
    rows = questions(trainer, 2)
    output = trainer._generate_and_score_completions(rows)
    ids = output["completion_ids"]
    assert ids.tolist() == [sampled for _ in range(2) for sampled in SAMPLED]
    assert trainer.vllm_generation.vllm_client.synced > 0
    boundary = len(encoded[0])  # with the special token, without the digit of the answer
    advantages = output["advantages"]
    correct = [str(i % 8) == gold(row) for i, row in enumerate(rows)]
    lengths = torch.full((16,), ids.shape[1])
    expected = coca_advantages(ids, lengths, correct, tokenizer, 8, method=method_settings(**METHOD))
    assert expected.masks["confidence"].sum(dim=1).tolist() == [boundary] * 16
    torch.testing.assert_close(advantages, expected.advantages)
    assert advantages[:, boundary - 1].any()
    assert output["importance_sampling_ratio"].shape == ids.shape


@pytest.mark.parametrize(
    ("options", "given", "key"),
    [
        ({"importance_sampling_level": "sequence"}, {}, "importance_sampling_level"),
        ({"use_vllm": True}, {}, "vllm_importance_sampling_mode"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"}, {}, "vllm_importance_sampling_mode"),
        ({"loss_type": "vespo"}, {}, "loss_type"),
        ({"off_policy_mask_threshold": 0.5}, {}, "off_policy_mask_threshold"),
        ({"top_entropy_quantile": 0.2}, {}, "top_entropy_quantile"),
        ({"scale_rewards": "batch"}, {}, "scale_rewards"),
        ({"scale_rewards": False}, {}, "scale_rewards"),
        ({"reward_weights": [1.0]}, {}, "reward_weights"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {}, "multi_objective_aggregation"),
        ({"num_generations_eval": 1}, {}, "num_generations_eval"),
        ({}, {"coca": {"method": {"clip": 0.3}}}, "coca.method.clip"),
        ({}, {"coca": {"method": {"loss_aggregation": "sum"}}}, "coca.method.loss_aggregation"),
        ({}, {"coca": {"method": {"name": "coco"}}}, "coca.method.name"),
        ({}, {"coca": {"stage": 1}}, "coca.stage"),
        ({}, {"coca": {"stage_shares": [1, 1]}}, "coca.stage_shares"),
        ({}, {"coca": {"grader": "exact"}, "reward_funcs": len}, "coca.grader"),
        ({}, {"tools": [len]}, "tools"),
        ({}, {"reward_funcs": [len, sum]}, "reward_funcs"),
        ({}, {"eval_dataset": example.sums(8, "train")}, "eval_dataset"),
    ],
)
def test_options_that_contradict_are_refused(tmp_path, options, given, key):
    """Before the model, which does not exist here, is loaded."""
    base = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]) as refusal:
        CocaTrainer("absent", args=GRPOConfig(**base, **options), train_dataset=example.sums(8, "train"), **given)
    assert {problem.key for problem in refusal.value.problems} <= {key}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1+1"}], "train_dataset: no column 'record'"),
        ([trl_row(Record("a", "d", "math", "1+1", "2"), None, 0), {"record": "{}"}], "train_dataset: row 2"),
        ([trl_row(Record("a", "d", "math", "1+1", ""), None, 0)], "train_dataset: row 1"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        CocaTrainer("absent", train_dataset=datasets.Dataset.from_list(rows))


def test_rows_keep_their_records_in_datasets(tmp_path):
    records = [
        Record("1", "sums", "math", "1+1", "2", metadata={"big": 2**70}),
        Record("2", "dates", "factual", "When?", "1999-01-01", metadata={"aliases": ["Zürich", "\u2028"]}),
        Record("3", "sums", "math", "1+2", "3", system=""),
    ]
    write_records(tmp_path / "records.jsonl", records)
    export_records("trl", tmp_path / "records.jsonl", tmp_path / "rows.jsonl", "be sure")
    files = {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")}
    rows = datasets.load_dataset("json", split="train", **files)
    assert [record_of(row, "row") for row in rows] == records


def one_of_two(rank, model, port, path):
    """A process of the test below: its half of fixed samples, six rows of three groups of four."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.save(on_fixed_samples(model, path, 6, rank), path / f"{rank}.pt")


def on_fixed_samples(model, path, rows, rank):
    torch.set_num_threads(1)
    options = {"num_generations": 4, "per_device_train_batch_size": rows, "steps_per_generation": 1}
    trainer = trainer_of(model, path / f"{rows}-{rank}", {"advantage_scale": "batch"}, options=options)
    tokenizer = trainer.processing_class
    stated = ["0.10", "0.95", "0.50", "0.70", "0.05", "9", "0.33", "0.80", "1.00", "0.61", "0.40", "0.42"]
    texts = [f"<confidence>{s}</confidence>{i % 2}" + "7" * (i > 6) for i, s in enumerate(stated)]
    mine = slice(rank * rows, (rank + 1) * rows)
    sampled = [
        tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts[mine]
    ]
    trainer._generate_single_turn = lambda *_, **__: (sampled, None)
    record = Record("1", "sums", "arithmetic", "1+0", "1", metadata={"grader": "exact"})
    output = trainer._generate_and_score_completions([trl_row(record, None, 0)] * rows)
    return output["advantages"], {name: values[-1] for name, values in trainer._metrics["train"].items()}


def test_two_processes_share_groups_and_the_deviation_of_the_batch(model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, (model, port, tmp_path), nprocs=2)
    halves = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    whole, metrics = on_fixed_samples(model, tmp_path, 12, 0)
    width = whole.shape[1]
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part, _ in halves]
    torch.testing.assert_close(torch.cat(padded), whole, rtol=0, atol=0)
    assert whole.any(dim=1).sum() > 8
    ours = [name for name in metrics if name.split("/")[0] in ("rollout", "advantage", "group", "reward")]
    assert "advantage/deviation" in ours
    for _, of_half in halves:
        assert {name: of_half[name] for name in ours} == {name: metrics[name] for name in ours}


def test_a_resumed_training_ends_where_an_uninterrupted_one_does(model, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 2}

    def train(place, **given):
        trainer = trainer_of(model, tmp_path / place, options=options, train_dataset=example.sums(256, "train"))
        trainer.train(**given)
        return trainer

    whole = train("whole")
    checkpoint = tmp_path / "whole" / "trl" / "checkpoint-2"
    resumed = train("resumed", resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    logged = [row for row in resumed.state.log_history if row.get("step") == 4 and "rollout/ece" in row]
    assert logged
    assert logged[0]["rollout/ece"] == whole.state.log_history[1]["rollout/ece"]


def test_it_learns_calibration(model, tmp_path):
    trainer = example.demo_trainer(model, tmp_path / "trl", 40)
    before = example.evaluated(trainer)
    trainer.train()
    after = example.evaluated(trainer)
    assert before["ece"] > 0.4
    assert after["ece"] < before["ece"] / 2
    assert after["accuracy"] > before["accuracy"] - 0.05
    assert after["invalid_share"] < 0.02


def test_the_arguments_of_the_documentation_are_accepted(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    code = re.search(r"args=(GRPOConfig\(.*?\n    \)),\n", text, re.DOTALL)[1]
    arguments = eval(code.replace("runs/trl", str(tmp_path)), {"GRPOConfig": partial(GRPOConfig, bf16=False)})  # noqa: S307
    assert (arguments.num_generations, arguments.loss_type) == (16, "luspo")


def test_a_trl_is_taken_by_its_sources_and_not_by_its_version(tmp_path, monkeypatch):
    """The installed TRL under another version is accepted; a tampered copy is refused by the name of what changed."""
    shutil.copytree(Path(trl.__file__).parent, tmp_path / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "trl" / "VERSION").write_text("9.9.9")
    assert matching_manifest(tmp_path, package="trl").release == "1.16.0"
    monkeypatch.setattr(trl, "__version__", "9.9.9")
    check_sources("trl")
    for name, old, new in (
        ("trainer/grpo_trainer.py", "advantages = advantages.unsqueeze(1)", "advantages = advantages.mean(1)"),
        ("kernels/chunked_logprob.py", "class ChunkedLogProbFunction(", "class ChunkedLogProbFunction(object, "),
    ):
        file = tmp_path / "trl" / name
        text = file.read_text()
        file.write_text(text.replace(old, new))
        with pytest.raises(ManifestError, match="_compute_loss" if "grpo" in name else "ChunkedLogProbFunction"):
            matching_manifest(tmp_path, package="trl")
        file.write_text(text)
