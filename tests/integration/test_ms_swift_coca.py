"""The external plugin on the real ms-swift, in an environment of its own: ``make test-ms-swift``."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

swift = pytest.importorskip("swift", reason="ms-swift has an environment of its own: run `make test-ms-swift`")
MODEL = os.environ.get("MS_SWIFT_MODEL", "")
if not Path(MODEL, "config.json").is_file():
    pytest.skip("MS_SWIFT_MODEL names no warm start of the demo: run `make test-ms-swift`", allow_module_level=True)
METHOD = {"confidence_decimals": 2, "advantage_eps": 0.05}
OPTIONS = {"tokenizer": str(Path(MODEL).resolve()), "method": METHOD, "grader": "exact"}
os.environ["COCA"] = json.dumps(OPTIONS)

from swift.rl_core import advantage  # noqa: E402
from swift.utils import import_external_file  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from coca_mindspeed import coca_advantages, method_settings, training_method  # noqa: E402
from coca_mindspeed.data.arithmetic import arithmetic_records  # noqa: E402
from coca_mindspeed.data.export import export_records, swift_row  # noqa: E402
from coca_mindspeed.data.records import Record, write_records  # noqa: E402
from coca_mindspeed.errors import CocaError, ConfigError, DataError  # noqa: E402
from coca_mindspeed.integrations.ms_swift import PLUGIN  # noqa: E402

plugin = import_external_file(str(PLUGIN))

#: The layout of the demo's chat template, for ms-swift's own encoder.
TEMPLATE = """
from swift.template import TemplateMeta, register_template
register_template(TemplateMeta("demo", prefix=[], prompt=["{{QUERY}}="], chat_sep=None, suffix=[["eos_token_id"]],
                               system_prefix=[]))
"""


def test_the_plugins_folder_hides_no_package():
    """ms-swift puts it first on sys.path."""
    names = {path.stem for path in PLUGIN.parent.iterdir() if path.suffix == ".py"}
    assert names == {"__init__", PLUGIN.stem}


def test_token_advantages_are_those_of_the_library():
    """Three groups of four, with an invalid confidence, an ungradable answer and a group of equal rewards."""
    texts = [
        f"<confidence>{s}</confidence>{answer}" for s in ("0.10", "0.70", "0.95", "0.50") for answer in (1, 2, 345)
    ]
    texts[5] = "7" * 9
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    gold = ["1", "1", "2", "2", "1", "1", "1", "1", "9", "9", "9", "9"]
    records = [Record(str(i), "sums", "math", "1+1", answer) for i, answer in enumerate(gold)]
    columns = {"record": [swift_row(each, None, 0)["record"] for each in records], "response_token_ids": ids}
    rewards = [plugin.orms[name]()(texts, **columns) for name in plugin.FUNCTIONS]
    assert (rewards[0][0], rewards[0][1], rewards[1][5]) == (1.0, 0.0, None)
    rewards[0][7] = None
    matrix = torch.tensor([[math.nan if r is None else r for r in row] for row in rewards]).T
    found, logged = advantage.compute_advantages(
        rewards_per_func=matrix, reward_weights=torch.tensor([1.0, 0.0, 0.0]), num_generations=4, scale_rewards="group"
    )
    assert logged.tolist() == [r or 0.0 for r in rewards[0]]
    lengths = torch.tensor([len(sampled) for sampled in ids])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(sampled) for sampled in ids], batch_first=True)
    expected = coca_advantages(
        padded, lengths, matrix[:, 0], tokenizer, 4, method=method_settings(confidence_decimals=2, advantage_eps=0.05)
    )
    assert expected.advantages.any()
    for shift in (0, 3):  # HF's frame, and Megatron's, in which the prompt stands before the response
        mask = torch.zeros(12, shift + padded.shape[1], dtype=torch.int64)
        mask[:, shift:] = torch.arange(padded.shape[1]) < lengths[:, None]
        spread = advantage.expand_advantage_to_per_token(found, mask)
        torch.testing.assert_close(spread[:, shift:], expected.advantages)
        assert not spread[:, :shift].any()


@pytest.mark.parametrize(
    ("prefix", "system", "error"),
    [
        ("", None, None),
        ("<think>\n\n</think>\n\n", training_method("coca").system_prompt, None),
        ("<think>\n", None, ConfigError),
        ("", "You are a pirate.", DataError),
    ],
)
def test_responses_are_read_without_what_the_template_puts_before_them(prefix, system, error):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["<confidence>0.10</confidence>2", "<confidence>0.70</confidence>3"]
    columns = {
        "record": [swift_row(Record("1", "sums", "math", "1+1", "2"), None, 0)["record"]] * 2,
        "response_token_ids": [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts],
    }
    if system is not None:
        chat = [{"role": "system", "content": system}, {"role": "user", "content": "1+1"}]
        columns["messages"] = [[*chat, {"role": "assistant", "content": text}] for text in texts]
    completions = [prefix + text for text in texts]
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        found = [plugin.orms[name]()(completions, **columns) for name in plugin.FUNCTIONS]
        assert found == [[1.0, 0.0], [0.1, 0.7], [6.0, 6.0]]


@pytest.mark.parametrize("functions", [1, 4])
def test_other_reward_functions_are_refused(functions):
    with pytest.raises(ConfigError, match="coca_segment"):
        advantage.compute_advantages(torch.zeros(8, functions), torch.ones(functions), 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("importance_sampling_level", "sequence"),
        ("rollout_importance_sampling_mode", "sequence_mask"),
        ("loss_type", "fipo"),
        ("loss_type", "real"),
        ("off_policy_sequence_mask_delta", 0.5),
        ("top_entropy_quantile", 0.2),
        ("use_liger_kernel", True),
        ("dynamic_sample", True),
        ("advantage_reweight", "rlsd"),
        ("scale_rewards", "batch"),
        ("advantage_estimator", "rloo"),
        ("kl_in_reward", True),
        (None, None),
    ],
)
def test_options_that_contradict_are_refused(option, value):
    args = {"importance_sampling_level": "token", "scale_rewards": "group", "advantage_estimator": "grpo"}
    args = types.SimpleNamespace(**{"kl_in_reward": False, **args, **({option: value} if option else {})})
    with pytest.raises(ConfigError) if option else contextlib.nullcontext() as refusal:
        plugin.Correct(args=args)
    if option:
        assert [problem.key for problem in refusal.value.problems] == [option]


def test_a_teacher_is_refused():
    with pytest.raises(CocaError, match="teacher"):
        advantage.expand_advantage_to_per_token(torch.zeros(2, 3), torch.ones(2, 4), teacher_kl_coef=0.1)


def test_a_training_brings_the_confidence_to_the_accuracy(tmp_path):
    write_records(tmp_path / "records.jsonl", arithmetic_records(4000, "train", seed=0))
    prompt = training_method("coca").system_prompt
    export_records("swift", tmp_path / "records.jsonl", tmp_path / "train.jsonl", prompt)
    (tmp_path / "template.py").write_text(TEMPLATE, encoding="utf-8")
    options = {
        "rlhf_type": "grpo",
        "model": OPTIONS["tokenizer"],
        "model_type": "qwen2",
        "template": "demo",
        "torch_dtype": "float32",
        "tuner_type": "full",
        "external_plugins": [tmp_path / "template.py", PLUGIN],
        "reward_funcs": plugin.FUNCTIONS,
        "reward_weights": [1, 0, 0],
        "dataset": tmp_path / "train.jsonl",
        "split_dataset_ratio": 0,
        "use_vllm": False,
        "loss_type": "dr_grpo",
        "importance_sampling_level": "token",
        "beta": 0,
        "num_generations": 8,
        "per_device_train_batch_size": 256,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "max_completion_length": 16,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "max_steps": 60,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": tmp_path / "out",
        "temperature": 1.0,
        "top_k": 0,
        "gradient_checkpointing": False,
    }
    arguments = [
        part
        for name, value in options.items()
        for part in (f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value]))
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("swift"), "rlhf", *arguments],
        env=environment,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    means = [
        [float(value) for value in re.findall(rf"'rewards/{name}/mean': '([0-9.e-]+)'", done.stdout)]
        for name in ("Correct", "Confidence", "Segment")
    ]
    assert [len(values) for values in means] == [60, 60, 60]
    gap = [abs(c - s) for c, s in zip(*means[:2], strict=True)]
    print(f"|confidence - accuracy|: {gap[0]:.3f} at the first step, {sum(gap[-5:]) / 5:.3f} at the last five")
    assert gap[0] > 0.4
    assert sum(gap[-5:]) / 5 < 0.1
    assert sum(means[2][-5:]) / 5 == pytest.approx(6, abs=0.2)
