"""Rollout by vLLM: its process, what goes there and back, and what is refused; vLLM itself is a stand-in here."""

import dataclasses
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from coca_mindspeed.commands.check_local import check_local
from coca_mindspeed.config.model_size import GIB
from coca_mindspeed.errors import ConfigError
from coca_mindspeed.local.footprint import footprint
from coca_mindspeed.local.lora import merged_weights
from coca_mindspeed.local.memory_check import MemoryCheck, memory_problems
from coca_mindspeed.local.sampling_engine import RolloutError
from coca_mindspeed.local.vllm_check import cache_bytes_of_one, refuse_unsuited_model, require_vllm
from coca_mindspeed.local.vllm_rollout import VllmRollout, start_vllm
from coca_mindspeed.local.vllm_wire import receive, send
from tests.local import rollout_by_vllm as expected
from tests.local.runs_for_tests import small_session

STAND_IN = Path(__file__).with_name("stand_in_vllm")


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.delenv("VLLM_PYTHON", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return expected.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    return expected.write_model(tmp_path_factory.mktemp("warm"), warm_up_steps=60)


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory):
    """A run that was never stopped."""
    output = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_IN))
        patch.delenv("VLLM_PYTHON", raising=False)
        expected.trains(warm, output, largest_gap=1e-3)
    return output


@pytest.fixture
def distinct(model):
    """A policy far from the weights that the stand-in starts with, as every trained model is."""
    policy = expected.policy_of(model)
    with torch.no_grad():
        policy.model.model.embed_tokens.weight.mul_(4)
    return policy, model


# ---- what it does


def test_greedy_tokens_and_log_probs_are_the_policys_before_and_after_a_step(stand_in, tmp_path, model, monkeypatch):
    # A file beside the user with a common name stands in nobody's way.
    (tmp_path / "vllm.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    expected.agrees_before_and_after_a_step(expected.policy_of(model), model, tmp_path / "log")


def test_a_run_has_gradients_and_a_small_gap(whole):
    """Asserted where it is made."""
    assert (whole / "vllm.log").exists()


def test_a_killed_trainer_takes_vllm_along_and_resumes_to_the_same_bytes(stand_in, tmp_path, warm, whole):
    expected.a_killed_trainer_takes_vllm_along_and_resumes_to_the_same_bytes(warm, whole, tmp_path / "run")


def test_a_vllm_that_dies_is_named(stand_in, tmp_path, warm):
    expected.a_vllm_that_dies_is_named(warm, tmp_path / "run")


# ---- what it refuses once it runs


@pytest.mark.parametrize(
    ("manner", "message"),
    [
        ("refusing", r"^rollout\.engine=vllm: vLLM has failed: ValueError: this architecture is not known; its output"),
        ("deaf", "vLLM's log-probs differ from the policy's by .* nats .* does not compute this model"),
    ],
)
def test_a_vllm_that_does_something_else_is_refused_at_the_start(
    stand_in, distinct, tmp_path, monkeypatch, manner, message
):
    monkeypatch.setenv("STAND_IN", manner)
    policy, model = distinct
    with pytest.raises(ConfigError, match=message):
        start_vllm(expected.run_of(model), policy, model, 44, tmp_path / "log")


def test_keys_and_values_of_old_weights_would_show(stand_in, distinct, tmp_path, monkeypatch):
    """The control of what is asserted above: a prefix cache that is not emptied."""
    monkeypatch.setenv("STAND_IN", "remembering")
    policy, model = distinct
    with expected.rollout_of(policy, model, tmp_path / "log") as (rollout, config):
        assert expected.gap(policy, expected.sample(rollout, config), config).largest < 1e-4
        expected.move(policy)
        rollout.weights_changed()
        assert expected.gap(policy, expected.sample(rollout, config), config).mean > 0.05


@dataclasses.dataclass
class Answers:
    """A process that answers whatever it is asked with the same tensors."""

    tensors: list

    def ask(self, message, tensors=(), following=()):
        list(following)
        return self.tensors


@pytest.mark.parametrize(
    ("tokens", "log_probs", "lengths", "message"),
    [
        ([5, 6, 7], [-1.0, -1.0, -1.0], [1, 2], "answered with 2 responses where 3 were asked for"),
        ([5, 6], [-1.0, -1.0], [1, 0, 1], "responses of 0 to 1 tokens; 1 to 12 were asked for"),
        ([5] * 15, [-1.0] * 15, [1, 1, 13], "responses of 1 to 13 tokens"),
        ([5, 6, 99], [-1.0] * 3, [1, 1, 1], "vocabulary of 19 does not have"),
        ([5, 6, -1], [-1.0] * 3, [1, 1, 1], "vocabulary of 19 does not have"),
        ([5, 6, 7], [-1.0, -torch.inf, -1.0], [1, 1, 1], "that it has sampled is -inf"),
    ],
)
def test_answers_that_cannot_be_are_refused(model, tokens, log_probs, lengths, message):
    answer = Answers([torch.tensor(tokens), torch.tensor(log_probs), torch.tensor(lengths)])
    rollout = VllmRollout(expected.policy_of(model), answer, torch.float32)
    with pytest.raises(RolloutError, match=message):
        rollout.sample([[5]], expected.run_of(model).rollout, group_size=3, generator=torch.Generator().manual_seed(0))


def handed_over(policy, dtype=torch.float32):
    """Names and weights that are sent to vLLM."""
    sent = {}

    class Listening(Answers):
        def ask(self, message, tensors=(), following=()):
            sent.update({message["name"]: tensors for message, tensors in following})

    VllmRollout(policy, Listening([]), dtype)._hand_over()
    assert sent.pop(None) == []
    return {name: weight for name, [weight] in sent.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_go_once_and_in_vllms_dtype(model, dtype):
    policy = expected.policy_of(model)
    sent, state = handed_over(policy, dtype), policy.model.state_dict()
    assert set(state) - set(sent) == {"lm_head.weight"}
    for name, weight in sent.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, state[name].to(dtype))


def test_both_go_where_they_are_not_tied(tmp_path):
    policy = expected.policy_of(expected.write_model(tmp_path / "model", tied=False))
    assert set(handed_over(policy)) == set(policy.model.state_dict())


def test_adapters_arrive_merged(model):
    pytest.importorskip("peft")
    policy = expected.policy_of(model, rank=4)
    plain = handed_over(policy)
    expected.move(policy)
    sent = handed_over(policy)
    assert set(sent) == set(plain) == set(handed_over(expected.policy_of(model)))
    merged = merged_weights(policy)
    assert all(torch.equal(weight, merged[name]) for name, weight in sent.items())
    assert not torch.equal(sent["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])


def test_messages_arrive_as_they_were():
    ours, theirs = multiprocessing.Pipe()
    tensors = [torch.arange(6).view(2, 3).T, torch.randn(3).bfloat16(), torch.empty(0, 4), torch.tensor(2.5)]
    send(ours, {"order": "sample", "never": None}, tensors)
    message, received = receive(theirs)
    assert message == {"order": "sample", "never": None}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, received, strict=True))
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)


# ---- what is refused before anything is loaded


def test_without_vllm_the_extra_is_named_and_nothing_is_written(tmp_path, model, monkeypatch):
    monkeypatch.setattr("coca_mindspeed.local.session.load_policy", lambda *_: pytest.fail("the model was loaded"))
    output = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"needs the extra 'vllm' \(pip install 'coca-mindspeed\[vllm\]'\), and this"):
        small_session(output, f"model.path={model}", "rollout.engine=vllm")
    assert not output.exists()


def test_environments_that_will_not_do(tmp_path, model, monkeypatch):
    def told(python=None, **settings):
        overrides = ["rollout.engine=vllm"] + ([f"rollout.vllm.python={python}"] if python else [])
        with pytest.raises(ConfigError) as error:
            require_vllm(expected.compose_run("demo", overrides).run, torch.device("cpu"))
        return str(error.value)

    assert f"the environment of rollout.vllm.python={sys.executable} has no vLLM" in told(sys.executable)
    assert (
        told(tmp_path / "none") == f"rollout.vllm.python={tmp_path}/none: cannot be started: No such file or directory"
    )
    assert "is no Python that works" in told("/bin/false")
    assert "does not say which vLLM it has" in told("/bin/true")
    old = tmp_path / "old"
    (old / "vllm").mkdir(parents=True)
    (old / "vllm" / "__init__.py").write_text("raise ImportError('it is not to be imported')")
    (old / "vllm-0.9.1.dist-info").mkdir()
    (old / "vllm-0.9.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1+cpu\n")
    monkeypatch.setenv("PYTHONPATH", str(old))
    assert told() == "rollout.engine=vllm: this environment has vLLM 0.9.1+cpu; 0.32 or newer is needed"
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    config = expected.compose_run("demo", ["rollout.engine=vllm"]).run
    require_vllm(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="works beside a CPU or a CUDA device"):
        require_vllm(config, torch.device("xpu"))


def test_weights_that_would_all_be_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^rollout\.importance_cap=2: is for rollout\.engine=vllm"):
        small_session(tmp_path / "run", "rollout.importance_cap=2.0")
    with pytest.raises(ConfigError, match=r"importance_cap"):  # what is below 1 would scale every term
        small_session(tmp_path / "run", "rollout.importance_cap=0.9")


def test_models_and_caches_that_will_not_do(stand_in, tmp_path, model):
    with pytest.raises(ConfigError, match=r"the built-in tiny model has attention heads of 16, and vLLM's for CPUs"):
        small_session(tmp_path / "run", "rollout.engine=vllm")
    assert not (tmp_path / "run" / "config.yaml").exists()
    config = expected.run_of(model, "rollout.vllm.kv_cache_gib=0.0001")
    architecture = expected.policy_of(model).model.config
    # 44 tokens are a block of 128, and one block is vLLM's own; one head of 32, keys and values, two layers, float32.
    assert cache_bytes_of_one(config, architecture, 44) == 2 * 128 * 32 * 2 * 2 * 4
    with pytest.raises(ConfigError, match=r"kv_cache_gib=0\.0001: one sequence of 44 tokens .* that works is 0\.01"):
        refuse_unsuited_model(config, architecture, torch.device("cpu"), 44)


def test_what_it_takes_is_in_the_plan(stand_in, model, capsys):
    cache = "rollout.vllm.kv_cache_gib=0.5"
    config = expected.run_of(model, cache)
    architecture = expected.policy_of(model).model.config
    need = footprint(config, architecture)
    by_itself = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "local"})})
    assert need.cache == GIB // 2
    assert need.vllm == need.cache + 4 * need.parameters
    assert need.peak_of_update == footprint(by_itself, architecture).peak_of_update + need.vllm
    # Adapters are merged there, and numbers may be half as long.
    adapted = expected.run_of(model, cache, "rollout.vllm.dtype=bfloat16", "model.lora.rank=4")
    assert footprint(adapted, architecture).vllm == need.cache + 2 * need.parameters
    check_local(config, "demo", quiet=False)
    shown = capsys.readouterr().out
    assert "vLLM's keys and values" in shown
    assert "vLLM's cache holds 4096 sequences of 44 tokens" in shown
    [problem] = memory_problems(MemoryCheck(need, 0, need.peak_of_update - GIB // 4), config, architecture)
    assert problem.endswith("it fits with rollout.vllm.kv_cache_gib=0.2")
