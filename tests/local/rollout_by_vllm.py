"""What a rollout by vLLM must show: by a stand-in in the default suite, by vLLM itself in `make test-vllm-rollout`."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from coca_mindspeed.algorithm.importance import engine_gap
from coca_mindspeed.config.compose import compose_run
from coca_mindspeed.config.schema import LoraConfig, ModelConfig, WarmUpConfig
from coca_mindspeed.data.embedded.arithmetic import arithmetic_records
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.local.checkpoint import export_model, list_checkpoints
from coca_mindspeed.local.lora import add_adapters
from coca_mindspeed.local.policy import load_policy
from coca_mindspeed.local.rescoring import rescored
from coca_mindspeed.local.session import open_session
from coca_mindspeed.local.tiny_model import tiny_config, tiny_tokenizer
from coca_mindspeed.local.vllm_rollout import start_vllm
from coca_mindspeed.local.warm_up import warm_up
from tests.local.runs_for_tests import SMALL, result, rows

PROMPTS = [[9, 6, 11], [12, 7, 13, 5, 10, 6, 12], [14], [15, 16]]
# A machine that is busy with other work takes long over anything; what is waited for here takes a moment.
PATIENCE_S = 120
BY_VLLM = ("rollout.engine=vllm", "rollout.vllm.eager=true", "rollout.vllm.kv_cache_gib=0.05")


def write_model(directory: Path, *, tied: bool = True, warm_up_steps: int = 0) -> Path:
    """The tiny model with two heads of 32 in the place of its four of 16, which vLLM's kernels for CPUs do not know."""
    config = tiny_config()
    config.num_attention_heads, config.num_key_value_heads = 2, 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if tied:
            model = Qwen2ForCausalLM(config)
        else:
            shape = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
            shape |= {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=128, **shape))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # zeros in a fresh model, which would hide a mistake
                    parameter.normal_(0, 0.2)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    if warm_up_steps:
        policy = load_policy(directory, ModelConfig(), torch.device("cpu"))
        config = compose_run("demo", []).run
        records = arithmetic_records(200, "train", 0)
        warm_up(policy, records, config.method.training_method, WarmUpConfig(steps=warm_up_steps), 0)
        export_model(policy, directory)
    return directory


def policy_of(directory: Path, rank: int | None = None):
    policy = load_policy(directory, ModelConfig(), torch.device("cpu"))
    add_adapters(policy, LoraConfig(rank=rank), seed=0)
    return policy


def run_of(directory: Path, *overrides: str):
    return compose_run("demo", [*overrides_of(directory), "rollout.max_new_tokens=12", *overrides]).run


def overrides_of(directory: Path) -> list[str]:
    return [f"model.path={directory}", *BY_VLLM, *python()]


def python() -> list[str]:
    """The environment of the vLLM that is tested; none: the stand-in's, on this one's path."""
    return [f"rollout.vllm.python={os.environ['VLLM_PYTHON']}"] if "VLLM_PYTHON" in os.environ else []


@contextmanager
def rollout_of(policy, directory: Path, log: Path, *overrides: str):
    config = run_of(directory, "rollout.prompts=4", "rollout.group_size=3", "trainer.minibatches=2", *overrides)
    with closing(start_vllm(config, policy, directory, 44, log)) as rollout:
        yield rollout, config


def sample(rollout, config, seed: int = 0, prompts=PROMPTS, **changes):
    settings = config.rollout.model_copy(update=changes)
    generator = torch.Generator().manual_seed(seed)
    return rollout.sample(prompts, settings, group_size=config.rollout.group_size, generator=generator)


def gap(policy, samples, config):
    known = rescored(policy, samples, config)
    return engine_gap(known.log_probs, samples.engine_log_probs, samples.inside)


@torch.no_grad()
def greedy(policy, prompt, tokens: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + tokens and text[-1] not in policy.eos_ids:
        logits = policy.model(input_ids=torch.tensor([text])).logits[0, -1]
        text.append(int(policy.logits_of_policy(logits, 1.0).argmax()))
    return text[len(prompt) :]


def move(policy, lr: float = 0.05) -> None:
    """A real step of the optimizer, after a real backward pass."""
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=lr)
    logits = policy.model(input_ids=torch.tensor([[9, 6, 11, 2, 5], [12, 7, 13, 3, 1]])).logits
    logits.log_softmax(-1)[..., 7].sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def agrees_before_and_after_a_step(policy, directory: Path, log: Path) -> None:
    """Greedy tokens and all log-probs are the policy's; with weights that were not handed over they are not."""
    with rollout_of(policy, directory, log) as (rollout, config):
        for _ in range(2):
            samples = sample(rollout, config, temperature=0.0)
            for row, (ids, length) in enumerate(zip(samples.token_ids.tolist(), samples.lengths, strict=True)):
                assert ids[:length] == greedy(policy, PROMPTS[row // 3], 12)
                assert set(ids[length:]) <= {policy.pad_id}
                assert bool(samples.finished[row]) == (ids[length - 1] in policy.eos_ids)
            drawn = sample(rollout, config)
            assert gap(policy, drawn, config).largest < 1e-4
            assert policy.pad_id not in drawn.token_ids[drawn.inside]
            hot = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.7})})
            assert gap(policy, sample(rollout, hot), hot).largest < 1e-4
            again, other = sample(rollout, config), sample(rollout, config, seed=1)
            assert torch.equal(drawn.token_ids, again.token_ids)
            assert drawn.token_ids.tolist() != other.token_ids.tolist()
            # By seeds of their own: the first prompt's responses do not depend on who else is asked.
            alone = sample(rollout, config, prompts=PROMPTS[:1])
            width = alone.token_ids.shape[1]
            assert torch.equal(drawn.token_ids[:3, :width], alone.token_ids)
            move(policy)
            assert gap(policy, sample(rollout, config), config).mean > 0.05  # not told, and so still the old weights
            rollout.weights_changed()


def whole_run(directory: Path, output: Path, *overrides: str, resume: bool = False):
    """A short training, held-out questions included, on a model that was warmed up."""
    small = [setting for setting in SMALL if not setting.startswith("warm_up.")]
    settings = [*small, *overrides_of(directory), *overrides]
    with closing(open_session(compose_run("demo", settings), output, resume=resume, show_progress=False)) as session:
        pid = session.trainer.rollout.pid
        session.trainer.run(session.resume_from)
        assert len(session.trainer.final_evaluation()) == 35
    assert not Path(f"/proc/{pid}").exists()
    return rows(output / "metrics.jsonl")


def trains(directory: Path, output: Path, largest_gap: float) -> None:
    """Steps with a gradient, and a gap that stays as small as rounding after every update."""
    metrics = whole_run(directory, output, "rollout.importance_cap=2.0")
    assert len(metrics) == 6
    assert sum(row["objective/grad_norm"] > 1e-3 for row in metrics) >= 4
    for row in metrics:
        assert 0 < row["rollout/log_prob_gap"] <= row["rollout/log_prob_gap_max"] < largest_gap
        assert row["rollout/importance"] == pytest.approx(1, abs=10 * largest_gap)
        assert row["rollout/importance_weight"] == pytest.approx(1, abs=10 * largest_gap)
        assert row["rollout/entropy"] > 0
    timing = rows(output / "timing.jsonl")
    assert all(row["seconds/rescoring"] > 0 and row["seconds/rollout"] > 0 for row in timing)
    # Before the first step there was one, and an evaluation has its own.
    already = [True, *("seconds/evaluation" in row for row in timing[:-1])]
    assert [row["seconds/weights_to_vllm"] == 0 for row in timing] == already
    assert already.count(False) >= 2


def a_run_without_hand_overs_shows_it(directory: Path, output: Path, monkeypatch) -> None:
    """The control of :func:`trains`: the same run, in which one update is not told to vLLM."""
    from coca_mindspeed.local.vllm_rollout import VllmRollout

    told = []
    original = VllmRollout.weights_changed
    monkeypatch.setattr(
        VllmRollout, "weights_changed", lambda self: (told.append(1), len(told) != 2 and original(self))[1]
    )
    gaps = [row["rollout/log_prob_gap"] for row in whole_run(directory, output, "evaluation.interval=0")]
    assert len(gaps) == 6
    assert gaps[2] > 100 * max(gaps[:2] + gaps[3:])


_KILLED = """
import os, signal, sys
from coca_mindspeed.cli import main
from coca_mindspeed.local.trainer import Trainer
step = Trainer._step
def killed(self, number, *rest):
    if number == 3:
        print(self.rollout.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number, *rest)
Trainer._step = killed
main(sys.argv[1:])
"""


def a_killed_trainer_takes_vllm_along_and_resumes_to_the_same_bytes(directory: Path, whole: Path, output: Path) -> None:
    """``whole`` holds the same run, never stopped."""
    small = [setting for setting in SMALL if not setting.startswith("warm_up.")]
    settings = [*small, *overrides_of(directory), "rollout.importance_cap=2.0"]
    command = [sys.executable, "-c", _KILLED, "train", "demo", *settings, "--output", str(output), "--quiet"]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_until_gone(int(killed.stdout.split()[-1]))
    assert [checkpoint.step for checkpoint in list_checkpoints(output / "checkpoints")] == [2]
    whole_run(directory, output, "rollout.importance_cap=2.0", resume=True)
    assert result(output) == result(whole)


def a_vllm_that_dies_is_named(directory: Path, output: Path) -> None:
    """It is killed after step 3, with a checkpoint behind it."""
    small = [setting for setting in SMALL if not setting.startswith("warm_up.")]
    composed = compose_run("demo", [*small, *overrides_of(directory), "evaluation.interval=0"])
    with closing(open_session(composed, output, resume=False, show_progress=False)) as session:
        _kill_vllm_before_step_4(session.trainer)
        with pytest.raises(TrainingError) as told:
            session.trainer.run()
    message = str(told.value)
    assert message.startswith("step 4: vLLM's process ")
    assert "ended by SIGKILL" in message
    assert f"{output / 'vllm.log'}" in message
    assert f"the last good checkpoint is {output / 'checkpoints' / 'step_000002'}; go on with --resume" in message


def _kill_vllm_before_step_4(trainer) -> None:
    step = trainer._step

    def killing(number, *rest):
        if number == 3:
            os.kill(trainer.rollout.pid, signal.SIGKILL)
        return step(number, *rest)

    trainer._step = killing


def wait_until_gone(pid: int) -> None:
    """Wait until a process that is nobody's child here runs no more; a zombie runs no more."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has outlived the trainer by {PATIENCE_S} s: {json.dumps(state)}")
