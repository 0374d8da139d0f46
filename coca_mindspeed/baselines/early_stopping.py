"""Fitting a binary predictor of correctness with early stopping."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from coca_mindspeed.errors import DataError

_MIN_EXAMPLES = 10


@dataclass(frozen=True)
class FitConfig:
    """AdamW with early stopping: ``validation`` is the held-out fraction, ``patience`` in epochs without progress."""

    lr: float = 1e-3
    weight_decay: float = 1e-2
    batch: int = 256
    epochs: int = 100
    patience: int = 8
    validation: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.validation < 1:
            raise ValueError(f"validation should be between 0 and 1, found {self.validation}")


@dataclass(frozen=True)
class Fit:
    """Validation losses (nats) by epoch, the first one before training, and the best epoch."""

    losses: list[float]
    best_epoch: int


def fit_with_early_stopping(
    model: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    labels: Tensor,
    config: FitConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> Fit:
    """Minimise the cross-entropy of ``labels`` (bool ``[n]``) in place; the weights of the best epoch are kept.

    ``logits_of`` maps indices int64 ``[b]`` of examples to logits ``[b]``, with gradient.  ``seed`` draws the
    validation split and the order; ``progress`` is called after each epoch with its number and the validation loss.

    Raises:
        DataError: fewer than ten examples.
    """
    n = len(labels)
    if n < _MIN_EXAMPLES:
        raise DataError(f"a predictor of correctness needs at least {_MIN_EXAMPLES} answered questions, found {n}")
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=random)
    held_out, rest = order.tensor_split([max(1, round(n * config.validation))])
    targets = labels.float()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)

    def validation_loss() -> float:
        with torch.no_grad():
            logits = torch.cat([logits_of(part).float().cpu() for part in held_out.split(config.batch)])
        return float(binary_cross_entropy_with_logits(logits, targets[held_out]))

    losses = [validation_loss()]
    best, best_epoch = copy.deepcopy(model.state_dict()), 0
    for epoch in range(1, config.epochs + 1):
        for part in rest[torch.randperm(len(rest), generator=random)].split(config.batch):
            logits = logits_of(part)
            loss = binary_cross_entropy_with_logits(logits.float(), targets[part].to(logits.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(validation_loss())
        progress(epoch, losses[-1])
        if losses[-1] < losses[best_epoch]:
            best, best_epoch = copy.deepcopy(model.state_dict()), epoch
        elif epoch - best_epoch >= config.patience:
            break
    model.load_state_dict(best)
    return Fit(losses, best_epoch)
