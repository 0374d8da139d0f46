"""Hooks in slime's own functions, of the checkout ``SLIME_HOME`` (``make test-slime``); stand-ins: ``stubs``."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.nn.utils.rnn import pad_sequence

pytest.importorskip("ray", reason="slime's tests have an environment of their own: run `make test-slime`")
HOME = os.environ.get("SLIME_HOME", "")
if not (Path(HOME) / "slime").is_dir():
    pytest.skip("SLIME_HOME names no checkout of slime: run `make test-slime`", allow_module_level=True)

from tests.integration.slime import stubs  # noqa: E402

stubs.install(HOME)

import slime.backends.megatron_utils.loss as loss  # noqa: E402
import slime.rollout.sglang_rollout as sglang_rollout  # noqa: E402
from slime.backends.megatron_utils import cp_utils, data  # noqa: E402
from slime.ray import rollout as ray_rollout  # noqa: E402
from slime.rollout.data_source import RolloutDataSource  # noqa: E402
from slime.utils import arguments, async_utils, misc  # noqa: E402
from slime.utils.data import process_rollout_data  # noqa: E402

try:
    from slime.observability import train_metric_utils as train_log
    from slime.observability.rollout_metrics import log_rollout_data
except ImportError:  # before the folder
    train_log, log_rollout_data = data, ray_rollout._log_rollout_data  # noqa: SLF001

from coca_mindspeed import segment_objective  # noqa: E402
from coca_mindspeed.errors import ConfigError  # noqa: E402
from coca_mindspeed.integrations import slime as hooks  # noqa: E402
from coca_mindspeed.upstream.manifest import ManifestError, load_manifests, matching_manifest  # noqa: E402
from tests.support.slime_rollout import (  # noqa: E402
    CORRECT,
    GRADER,
    GROUP,
    METHOD,
    OPTIONS,
    TOKENIZER,
    library_advantages,
    rows,
)

KEYS = (
    "tokens",
    "total_lengths",
    "response_lengths",
    "loss_masks",
    "log_probs",
    "advantages",
    "returns",
    "rollout_log_probs",
    "rollout_mask_sums",
    "group_mask_sums",  # its name in 0.3.0
)
VOCABULARY = len(TOKENIZER)


async def _no_engine(args, rollout_id):
    return []


sglang_rollout.abort = _no_engine


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    """Of this process alone; slime 0.3.0 asks it for its rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slime")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "grader.py").write_text(GRADER)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows()))
    return folder


def parsed(folder, *more, method=(), **section):
    """Options by slime's own parser and validation; those that Megatron's parser has are set."""
    coca = {"grader": f"{folder / 'grader.py'}:grade", "method": METHOD | dict(method), **section}
    (folder / "coca.yaml").write_text(yaml.safe_dump({"coca": coca}))
    given = OPTIONS | {
        "hf_checkpoint": folder / "model",
        "ref_load": folder / "model",
        "prompt_data": folder / "rows.jsonl",
        "input_key": "prompt",
        "label_key": "label",
        "custom_config_path": folder / "coca.yaml",
        "custom_generate_function_path": "tests.integration.slime.stubs.generate",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": GROUP,
        "rollout_max_response_len": 64,
        "num_rollout": 1,
        "rollout_num_gpus": 1,
        "actor_num_gpus_per_node": 1,
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
    }
    command = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command += ["--apply-chat-template", *more]
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    arguments.get_slime_extra_args_provider()(parser)
    args, unread = parser.parse_known_args(command)
    with mock.patch.object(sys, "argv", ["train.py", *command]):
        vars(args).update(vars(arguments._pre_parse_mode()))  # noqa: SLF001
    if "--global-batch-size" in unread:
        args.global_batch_size = int(unread[unread.index("--global-batch-size") + 1])
    of_megatron = {
        "global_batch_size": 2 * GROUP,
        "micro_batch_size": 2,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "allgather_cp": False,
        "load": None,
        "save": None,
        "save_interval": None,
        "seed": 1,
        "calculate_per_token_loss": "--calculate-per-token-loss" in more,
        "sglang_server_concurrency": 8,
        "sglang_dp_size": 1,
        "rollout_num_gpus_per_engine": 1,
        "recompute_loss_function": False,
        "num_layers": 2,
        "vocab_size": VOCABULARY,
    }
    for name, value in of_megatron.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    arguments.slime_validate_args(args)
    return args


def rollout(args):
    """Sample, reward and log as slime's rollout does; the samples in its order, and what was logged."""
    misc.SingletonMeta._instances.clear()  # noqa: SLF001  it keeps the first options
    source = RolloutDataSource(args)
    output, _ = async_utils.run(sglang_rollout.generate_rollout_async(args, 0, source.get_samples))
    samples = [sample for group in output.samples for sample in group]
    logged = {}
    ray_rollout.logging_utils.log = lambda args, metrics, **_: logged.update(metrics)
    extra = dict(output.metrics or {})
    log_rollout_data(0, args, samples, extra, 1.0)
    return samples, logged


def packed(args, samples, dp=1, cp=1):
    """The manager's conversion and split: references for the ranks."""
    manager = object.__new__(ray_rollout.RolloutManager)
    manager.args = args
    for name in ("reward_post_process", "convert_samples_to_train_data"):
        path = getattr(args, f"custom_{name}_path")
        setattr(manager, f"custom_{name}_func", path and misc.load_function(path))
    sizes = {"dp_size": dp, "cp_size": cp, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    manager.set_train_parallel_config(sizes)
    return manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))


def of_rank(args, references, dp_rank, weights):
    """A rank's data, with the old log-probs of ``weights``, and its advantages by slime."""
    rank = dict(process_rollout_data(args, references, dp_rank, len(references)))
    rank["partition"] = references[dp_rank].inner["partition"]  # which slime 0.3 removes
    rank["tokens"] = [torch.as_tensor(ids).long() for ids in rank["tokens"]]
    rank["loss_masks"] = [torch.as_tensor(mask).int() for mask in rank["loss_masks"]]
    (sums,) = (key for key in rank if key.endswith("_mask_sums"))
    rank[sums] = torch.as_tensor(rank[sums]).float()
    lengths = list(zip(rank["total_lengths"], rank["response_lengths"], strict=True))
    rank["rollout_log_probs"] = [
        torch.as_tensor(cp_utils.slice_log_prob_with_cp(list(map(float, one)), *sizes)).float()
        for one, sizes in zip(rank["rollout_log_probs"], lengths, strict=True)
    ]
    with torch.no_grad():
        rank["log_probs"] = log_probs_of(args, rank, weights)
    loss.compute_advantages_and_returns(args, rank)
    return rank


def logits_of(args, tokens, weights):
    """float32 ``[1, T, V]`` of a bigram model, for this rank's part of the sequences."""
    cut = (args.qkv_format,) if hasattr(args, "qkv_format") else ()
    ids = torch.cat([cp_utils.slice_with_cp(one, 0, *cut) for one in tokens])
    return weights[ids][None]


def log_probs_of(args, rank, weights):
    _, found = loss.get_log_probs_and_entropy(
        logits_of(args, rank["tokens"], weights),
        args=args,
        unconcat_tokens=rank["tokens"],
        total_lengths=rank["total_lengths"],
        response_lengths=rank["response_lengths"],
        with_entropy=False,
    )
    return found["log_probs"]


def slimes_loss(args, references, weights, old, cp):
    """Loss and gradient of all steps of a rollout, added up over ranks as Megatron does; and the ranks' advantages."""
    total, tokens, advantages = weights.new_zeros(()), 0, {}
    for dp_rank in range(len(references)):
        for cp_rank in range(cp):
            stubs.PARALLEL.cp_rank = cp_rank
            rank = of_rank(args, references, dp_rank, old)
            for index, part in zip(rank["partition"], rank["advantages"], strict=True):
                advantages.setdefault(index, []).append(part)
            taken = iter(rank["micro_batch_indices"])
            for microbatches, responses in zip(rank["num_microbatches"], rank["global_batch_sizes"], strict=True):
                for _ in range(microbatches):
                    rows_ = next(taken)
                    batch = {key: [rank[key][row] for row in rows_] for key in KEYS if key in rank}
                    batch["unconcat_tokens"] = batch["tokens"]
                    logits = logits_of(args, batch["tokens"], weights)
                    scaled, normalizer, _ = loss.loss_function(args, batch, microbatches, responses, logits)
                    if args.calculate_per_token_loss:
                        total, tokens = total + scaled, tokens + int(normalizer)
                    else:  # Megatron's mean over microbatches and ranks
                        total = total + scaled / microbatches / (len(references) * cp)
    total = total / tokens if args.calculate_per_token_loss else total
    return total, torch.autograd.grad(total, weights)[0], advantages


def librarys_loss(samples, advantages, masks, weights, old, **options):
    """The same by :func:`segment_objective`; its log-probs are those of whole sequences."""

    def log_probs(table):
        whole = [torch.tensor(sample.tokens) for sample in samples]
        found = [torch.log_softmax(table[ids[:-1]], -1).gather(-1, ids[1:, None])[:, 0] for ids in whole]
        lengths = [sample.response_length for sample in samples]
        return pad_sequence([one[len(one) - n :] for one, n in zip(found, lengths, strict=True)], batch_first=True)

    objective = segment_objective(log_probs(weights), log_probs(old).detach(), advantages, masks, **options)
    return objective.loss, torch.autograd.grad(objective.loss, weights)[0]


CASES = [
    ("sum over tokens", (), 1, 1, {}),
    ("two data-parallel ranks, dynamic batch", ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "40"), 2, 1, {}),
    ("two context-parallel ranks", (), 1, 2, {}),
    ("two by two, mean over the tokens", ("--calculate-per-token-loss",), 2, 2, {}),
    ("two steps a rollout", ("--global-batch-size", "4"), 2, 1, {}),
    ("entropy bonus, scale of the batch", (), 1, 1, {"entropy_bonus": 0.02, "advantage_scale": "batch"}),
    ("paper's form", (), 1, 2, {"separate_format": False}),
    ("weights for the sampler", ("--use-tis",), 2, 2, {}),
    ("slime's mean of each response", ("--custom-pg-loss-reducer-function-path", ""), 2, 1, {}),
]


@pytest.mark.parametrize(("name", "more", "dp", "cp", "method"), CASES, ids=[case[0] for case in CASES])
def test_slime_takes_the_librarys_gradient(folder, name, more, dp, cp, method):
    args = parsed(folder, *more, method=method)
    args.custom_pg_loss_reducer_function_path = args.custom_pg_loss_reducer_function_path or None
    samples, _ = rollout(args)
    torch.manual_seed(1)
    old = torch.randn(VOCABULARY, VOCABULARY)
    weights = (old + 0.3 * torch.randn(VOCABULARY, VOCABULARY)).requires_grad_()
    verdicts = [sample.metadata[hooks.VERDICT] for sample in samples]
    expected, of_tokens = library_advantages(samples, verdicts, **method)
    with stubs.parallel(dp, cp):
        total, gradient, parts = slimes_loss(args, packed(args, samples, dp, cp), weights, old, cp)
        for index, of_sample in parts.items():
            sizes = len(samples[index].tokens), samples[index].response_length
            for rank, part in enumerate(of_sample):
                stubs.PARALLEL.cp_rank = rank
                assert torch.equal(part, cp_utils.slice_log_prob_with_cp(of_tokens[index], *sizes))
        assert sum(len(part) for parts_ in parts.values() for part in parts_) == sum(map(len, of_tokens))
    weighted = expected.advantages.clone()
    if args.use_tis:
        with torch.no_grad():
            rank = of_rank(args, packed(args, samples), 0, old)
            place = {index: row for row, index in enumerate(rank["partition"])}
            for row, sample in enumerate(samples):
                ratio = (rank["log_probs"][place[row]] - rank["rollout_log_probs"][place[row]]).exp()
                weighted[row, : sample.response_length] *= ratio.clamp(args.tis_clip_low, args.tis_clip)
    if args.custom_pg_loss_reducer_function_path is None:
        weighted /= torch.tensor([sample.response_length for sample in samples])[:, None]
    aggregation = "token_mean" if args.calculate_per_token_loss else "sum"
    options = {"aggregation": aggregation, "responses": args.global_batch_size}
    loss_, wanted = librarys_loss(samples, weighted, expected.masks, weights, old, **options)
    error = float((gradient - wanted).abs().max())
    difference = float((total - loss_).abs())
    largest = float(wanted.abs().max())
    print(f"{name}: advantages 0, loss {difference:.1e} of {float(loss_):.3f}, gradient {error:.1e} of {largest:.3f}")
    assert difference <= 2e-6 * max(1.0, abs(float(loss_)))
    assert error <= 1e-6 * max(0.1, largest)
    assert largest > 1e-3


def test_slime_logs_our_metrics_and_accuracy(folder, monkeypatch):
    args = parsed(folder)
    samples, logged = rollout(args)
    verdicts = [sample.metadata[hooks.VERDICT] for sample in samples]
    by_question = {sample.metadata["record"]: [] for sample in samples}
    for sample, verdict in zip(samples, verdicts, strict=True):
        by_question[sample.metadata["record"]].append(verdict)
    assert sorted(map(str, by_question.values())) == sorted(map(str, (CORRECT[:GROUP], CORRECT[GROUP:])))
    expected, of_tokens = library_advantages(samples, verdicts)
    assert logged["rollout/coca/rollout/accuracy"] == pytest.approx(expected.metrics["rollout/accuracy"])
    assert logged["rollout/coca/rollout/invalid_share"] == 0.25
    of_ranks = []
    monkeypatch.setattr(train_log, "gather_log_data", lambda name, args, number, metrics: of_ranks.append(metrics))
    rank = of_rank(args, packed(args, samples), 0, torch.zeros(VOCABULARY, VOCABULARY))
    train_log.log_rollout_data(0, args, rank)
    shown = {name: value[0] / value[1] if isinstance(value, tuple) else value for name, value in of_ranks[0].items()}
    assert shown["rewards"] == pytest.approx(sum(float(one.mean()) for one in of_tokens) / len(of_tokens))
    assert shown["raw_reward"] == pytest.approx(sum(verdict is True for verdict in verdicts) / len(verdicts))


def test_slimes_evaluation_takes_the_rewards(folder):
    more = f"--eval-prompt-data sums {folder / 'rows.jsonl'} --eval-interval 1 --eval-max-response-len 64".split()
    args = parsed(folder, *more, "--n-samples-per-eval-prompt", str(GROUP))
    misc.SingletonMeta._instances.clear()  # noqa: SLF001
    output, _ = async_utils.run(sglang_rollout.eval_rollout(args, 0))
    (scores,) = getattr(output, "data", output).values()
    assert sorted(scores["rewards"]) == [0.0] * 6 + [1.0] * 2


def test_an_aborted_response_is_left_out_and_cispo_takes_the_advantages(folder):
    args = parsed(folder, "--advantage-estimator", "cispo" if hasattr(loss, "compute_cispo_loss") else "grpo")
    samples, _ = rollout(args)
    aborted = samples[0]
    aborted.status, aborted.reward = type(aborted).Status.ABORTED, None
    verdicts = [None, *(sample.metadata[hooks.VERDICT] for sample in samples[1:])]
    _, of_tokens = library_advantages(samples, verdicts)
    rank = of_rank(args, packed(args, samples), 0, torch.zeros(VOCABULARY, VOCABULARY))
    found = dict(zip(rank["partition"], rank["advantages"], strict=True))
    assert all(torch.equal(found[index], one) for index, one in enumerate(of_tokens))
    assert not of_tokens[0].any()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (("--normalize-advantages",), "normalize_advantages"),
        (("--advantage-estimator", "gspo"), "advantage_estimator"),
        (("--advantage-estimator", "ppo"), "advantage_estimator"),
        (("--use-opsm",), "use_opsm"),
        (("--custom-tis-function-path", "examples.mis.f"), "custom_tis_function_path"),
        (("--mask-offpolicy-in-partial-rollout", "--partial-rollout"), "mask_offpolicy_in_partial_rollout"),
        (("--custom-convert-samples-to-train-data-path", "x.y"), "custom_convert_samples_to_train_data_path"),
        (("--disable-compute-advantages-and-returns",), "compute_advantages_and_returns"),
        (("--use-opd", "--opd-type", "sglang"), "use_opd"),
        (("--reward-key", "score"), "reward_key"),
        (("--loss-type", "custom_loss"), "loss_type"),
        (("--rollout-batch-size", "3"), "global_batch_size"),
        (("--custom-advantage-function-path", "x.y"), "custom_advantage_function_path"),
        (("--rollout-top-k", "20"), "rollout_top_k"),
    ],
)
def test_slimes_options_have_the_names_that_are_refused(folder, more, key):
    args = parsed(folder, *more)
    with pytest.raises(ConfigError) as refusal:
        hooks.check(args)
    assert [problem.key for problem in refusal.value.problems] == [key]


def test_a_tampered_slime_is_refused_by_the_name_of_what_changed(tmp_path):
    manifests = load_manifests(package="slime")
    assert matching_manifest(Path(HOME), package="slime") in manifests
    shutil.copytree(Path(HOME) / "slime", tmp_path / "slime")
    file = tmp_path / "slime" / "backends" / "megatron_utils" / "cp_utils.py"
    text = file.read_text()
    changed = text.replace("return log_prob\n", "return log_prob * 1\n", 1)
    assert changed != text
    file.write_text(changed)
    with pytest.raises(ManifestError, match="slice_log_prob_with_cp"):
        matching_manifest(tmp_path, package="slime")
