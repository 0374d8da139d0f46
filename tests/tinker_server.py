"""A stub of a server with Tinker's API: a small model, scripted responses, and the loss ``importance_sampling``."""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch


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
