"""``examples/ms_swift_coca.py`` on the real ms-swift, in an environment of its own: ``make test-ms-swift``."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

swift = pytest.importorskip("swift", reason="ms-swift has an environment of its own: run `make test-ms-swift`")
MODEL = os.environ.get("MS_SWIFT_MODEL", "")
if not Path(MODEL, "config.json").is_file():
    pytest.skip("MS_SWIFT_MODEL names no warm start of the demo: run `make test-ms-swift`", allow_module_level=True)
EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"tokenizer": str(Path(MODEL).resolve()), "decimals": 2, "eps": 0.05, "grader": "exact"}
os.environ["COCA"] = json.dumps(OPTIONS)
sys.path.insert(0, str(EXAMPLES))

import ms_swift_coca as plugin  # noqa: E402
from swift.rl_core import advantage  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from coca_mindspeed import coca_advantages, training_method  # noqa: E402
from coca_mindspeed.data.arithmetic import arithmetic_records  # noqa: E402
from coca_mindspeed.errors import CocaError  # noqa: E402

#: The layout of the demo's chat template, for ms-swift's own encoder.
TEMPLATE = """
from swift.template import TemplateMeta, register_template
register_template(TemplateMeta("demo", prefix=[], prompt=["{{QUERY}}="], chat_sep=None, suffix=[["eos_token_id"]],
                               system_prefix=[]))
"""


def test_a_changed_ms_swift_is_refused(tmp_path):
    packages = Path(swift.__file__).parents[1]
    plugin.check_swift(packages)
    for target in plugin.FINGERPRINTS:
        file = Path(*target.partition(":")[0].split(".")).with_suffix(".py")
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(packages / file, tmp_path / file)
    plugin.check_swift(tmp_path)
    for target in plugin.FINGERPRINTS:
        module, _, name = target.partition(":")
        file = tmp_path / Path(*module.split(".")).with_suffix(".py")
        source = file.read_text(encoding="utf-8")
        definition = rf"^( *)def {name.split('.')[-1]}\("
        changed = re.sub(definition, lambda found: f"{found[1]}@staticmethod\n{found[0]}", source, count=1, flags=re.M)
        file.write_text(changed, encoding="utf-8")
        with pytest.raises(CocaError, match=name):
            plugin.check_swift(tmp_path)
        file.write_text(source, encoding="utf-8")


def test_token_advantages_are_those_of_the_library():
    """Three groups of four, with an invalid confidence, an ungradable answer and a group of equal rewards."""
    texts = [
        f"<confidence>{s}</confidence>{answer}" for s in ("0.10", "0.70", "0.95", "0.50") for answer in (1, 2, 345)
    ]
    texts[5] = "7" * 9
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    rows = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": ""}]
    columns = {
        "messages": [rows] * 12,
        "answer": ["1", "1", "2", "2", "1", "1", "1", "1", "9", "9", "9", "9"],
        "response_token_ids": ids,
    }
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
    expected = coca_advantages(padded, lengths, matrix[:, 0], tokenizer, 4, decimals=2, eps=0.05)
    assert expected.advantages.any()
    for shift in (0, 3):  # HF's frame, and Megatron's, in which the prompt stands before the response
        mask = torch.zeros(12, shift + padded.shape[1], dtype=torch.int64)
        mask[:, shift:] = torch.arange(padded.shape[1]) < lengths[:, None]
        spread = advantage.expand_advantage_to_per_token(found, mask)
        torch.testing.assert_close(spread[:, shift:], expected.advantages)
        assert not spread[:, :shift].any()


@pytest.mark.parametrize("functions", [1, 4])
def test_other_reward_functions_are_refused(functions):
    with pytest.raises(ValueError, match="coca_segment"):
        advantage.compute_advantages(torch.zeros(8, functions), torch.ones(functions), 4)


def test_a_teacher_is_refused():
    with pytest.raises(CocaError, match="teacher"):
        advantage.expand_advantage_to_per_token(torch.zeros(2, 3), torch.ones(2, 4), teacher_kl_coef=0.1)


def test_a_training_brings_the_confidence_to_the_accuracy(tmp_path):
    system = {"role": "system", "content": training_method("coca").system_prompt}
    with (tmp_path / "train.jsonl").open("w", encoding="utf-8") as file:
        for record in arithmetic_records(4000, "train", seed=0):
            messages = [system, {"role": "user", "content": record.question}]
            file.write(json.dumps({"messages": messages, "answer": record.answer, "category": "math"}) + "\n")
    (tmp_path / "template.py").write_text(TEMPLATE, encoding="utf-8")
    options = {
        "rlhf_type": "grpo",
        "model": OPTIONS["tokenizer"],
        "model_type": "qwen2",
        "template": "demo",
        "torch_dtype": "float32",
        "tuner_type": "full",
        "external_plugins": [tmp_path / "template.py", EXAMPLES / "ms_swift_coca.py"],
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
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
