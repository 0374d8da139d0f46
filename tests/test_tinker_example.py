"""examples/tinker_coca.py against a stub server: one advantage per token, and the objective of the paper.

The stub has Tinker's API: a small model, scripted responses, and the loss ``importance_sampling``.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_mindspeed import coca_advantages, segment_objective, token_text
from coca_mindspeed.data.arithmetic import arithmetic_records
from coca_mindspeed.local.tiny_model import write_tiny_model


class Future(SimpleNamespace):
    """A result that is there already."""

    def result(self) -> Any:
        return self.value


class ModelInput(SimpleNamespace):
    @classmethod
    def from_ints(cls, tokens: list[int]) -> "ModelInput":
        return cls(tokens=list(tokens))


class TensorData(SimpleNamespace):
    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> "TensorData":
        return cls(tensor=tensor)


def tinker_module() -> Any:
    """The part of the package ``tinker`` that the example uses."""
    module: Any = ModuleType("tinker")
    module.types = SimpleNamespace(ModelInput=ModelInput, TensorData=TensorData)
    for name in ("Datum", "SamplingParams", "AdamParams"):
        setattr(module.types, name, type(name, (SimpleNamespace,), {}))
    return module


class Server:
    """Training client, sampling client and server in one; ``respond`` maps prompt ids and n to n lists of ids."""

    def __init__(self, model: Any, respond: Any) -> None:
        self.model, self._respond, self.batches, self.losses = model, respond, [], []
        self._optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def save_weights_and_get_sampling_client(self) -> "Server":
        return self

    def log_probs(self, inputs: list[int], targets: list[int]) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([inputs])).logits[0].log_softmax(-1)
        return logits.gather(-1, torch.tensor(targets)[:, None])[:, 0]

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Future:
        sequences = []
        for tokens in self._respond(prompt.tokens, num_samples):
            said = self.log_probs([*prompt.tokens, *tokens[:-1]], [*prompt.tokens[1:], *tokens])
            sequences.append(SimpleNamespace(tokens=tokens, logprobs=said[len(prompt.tokens) - 1 :].tolist()))
        return Future(value=SimpleNamespace(sequences=sequences))

    def forward_backward(self, data: list[Any], loss_fn: str) -> Future:
        assert loss_fn == "importance_sampling"
        self.batches.append(data)
        loss = torch.zeros(())
        for each in data:
            columns = {name: value.tensor for name, value in each.loss_fn_inputs.items()}
            assert {len(column) for column in columns.values()} == {len(each.model_input.tokens)}
            now = self.log_probs(each.model_input.tokens, columns["target_tokens"].tolist())
            loss = loss - ((now - columns["logprobs"]).exp() * columns["advantages"]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(float(loss.detach()))
        return Future(value=None)

    def optim_step(self, adam: Any) -> Future:
        self._optimizer.param_groups[0].update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Future(value=None)


#: Of each question the first and third response are right: the success rate is one half.
STATED = (0.5, 1.0, 0.9, 0.5)


@pytest.fixture
def example(monkeypatch):
    stub = tinker_module()
    monkeypatch.setitem(sys.modules, "tinker", stub)
    monkeypatch.setitem(sys.modules, "tinker.types", stub.types)
    spec = importlib.util.spec_from_file_location(
        "tinker_coca", Path(__file__).parents[1] / "examples" / "tinker_coca.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_by_token_advantages(example, tmp_path):
    write_tiny_model(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    records = arithmetic_records(2, "train", 0)
    prompts = example.encode_prompts(tokenizer, records, example.training_method("coca").system_prompt)

    def respond(prompt, number):
        right = records[prompts.index(prompt)].answer
        answers = [right if i % 2 == 0 else str(int(right) + 1) for i in range(number)]
        texts = [f"<confidence>{s}</confidence>{answer}" for s, answer in zip(STATED, answers, strict=True)]
        return [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]

    server = Server(model, respond)
    log = example.train(server, tokenizer, records, steps=6, prompts=2, group=4, max_tokens=16, lr=5e-3)
    assert [row["rollout/accuracy"] for row in log] == [0.5] * 6

    responses = [tokens for prompt in prompts for tokens in respond(prompt, 4)]
    lengths = torch.tensor([len(tokens) for tokens in responses])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in responses], batch_first=True)
    wanted = coca_advantages(ids, lengths, [True, False] * 4, token_text(tokenizer, len(tokenizer)), 4)
    for row, each in enumerate(server.batches[0]):
        inputs = {name: value.tensor for name, value in each.loss_fn_inputs.items()}
        before = len(prompts[row // 4]) - 1
        assert inputs["target_tokens"].tolist() == [*prompts[row // 4][1:], *responses[row]]
        assert not inputs["advantages"][:before].any()
        torch.testing.assert_close(inputs["advantages"][before:], wanted.advantages[row, : lengths[row]])
        confidence = wanted.masks["confidence"][row, : lengths[row]]
        assert inputs["advantages"][before:][confidence].unique().numel() == 1
        assert inputs["advantages"][before:][~confidence].unique().numel() == 1
    assert wanted.advantages[0, 0] > 0 > wanted.advantages[1, 0]  # 0.5 is calibrated, 1.0 is not
    assert wanted.advantages[3, 0] > 0 > wanted.advantages[3, lengths[3] - 1]  # calibrated, and wrong
    zeros = torch.zeros(ids.shape)
    objective = segment_objective(zeros, zeros, wanted.advantages, wanted.masks).loss * len(ids)
    assert server.losses[0] == pytest.approx(float(objective), abs=1e-3)

    first, last = (
        [sum(each.loss_fn_inputs["logprobs"].tensor[-int(n) :]).item() for each, n in zip(batch, lengths, strict=True)]
        for batch in (server.batches[0], server.batches[-1])
    )
    gained = torch.tensor(last) - torch.tensor(first)
    assert (gained[[0, 4]] > gained[[1, 5]]).all()  # right and calibrated against wrong and too sure
