"""Probe: a two-layer MLP on the frozen model's hidden states, trained on the correctness of its answers."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coca_mindspeed.baselines.early_stopping import Fit, FitConfig, fit_with_early_stopping
from coca_mindspeed.errors import DataError
from coca_mindspeed.utils.files import whole_directory, write_json


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of a probe with ``width`` hidden units; ``layer`` as in :func:`.target_model.prompt_states`."""

    layer: int = -1
    width: int = 128
    fit: FitConfig = field(default_factory=FitConfig)


class Probe(nn.Module):
    """``sigmoid(W2 gelu(W1 z + b1) + b2)`` of standardised hidden states z."""

    mean: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int, width: int, layer: int) -> None:
        super().__init__()
        self.hidden_size, self.width, self.layer = hidden_size, width, layer
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("scale", torch.ones(hidden_size))
        self.inner = nn.Linear(hidden_size, width)
        self.outer = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[n]`` of correctness from hidden states, float32 ``[n, hidden]``."""
        standardised = (states - self.mean) / self.scale
        logits: Tensor = self.outer(nn.functional.gelu(self.inner(standardised))).squeeze(-1)
        return logits

    @torch.no_grad()
    def confidence(self, states: Tensor) -> Tensor:
        """Probability ``[n]`` of a correct answer."""
        return self.forward(states).sigmoid()


def train_probe(
    states: Tensor,
    correct: Tensor,
    config: ProbeConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[Probe, Fit]:
    """Train a probe on ``states`` float32 ``[n, hidden]`` and ``correct`` bool ``[n]``.

    ``seed`` draws weights, split and order; the global random state is not used.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(states.shape[1], config.width, config.layer)
    probe.mean.copy_(states.mean(dim=0))
    probe.scale.copy_(states.std(dim=0, correction=0).clamp(min=1e-6))
    fit = fit_with_early_stopping(probe, lambda rows: probe(states[rows]), correct, config.fit, seed, progress)
    return probe, fit


def save_probe(probe: Probe, fit: Fit, directory: Path) -> None:
    """Write ``probe.safetensors`` and ``probe.json`` atomically."""
    shape = {"hidden_size": probe.hidden_size, "width": probe.width, "layer": probe.layer}
    with whole_directory(directory) as writing:
        write_json(writing / "probe.json", {**shape, "fit": asdict(fit)})
        save_file(probe.state_dict(), writing / "probe.safetensors")


def load_probe(directory: Path) -> Probe:
    """Read a probe; raises DataError if the directory holds none, or it is damaged."""
    try:
        shape = json.loads((directory / "probe.json").read_text(encoding="utf-8"))
        probe = Probe(shape["hidden_size"], shape["width"], shape["layer"])
        probe.load_state_dict(load_file(directory / "probe.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{directory}: does not hold a probe that can be read: {error}") from error
    return probe
