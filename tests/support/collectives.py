"""Record the collectives and point-to-point messages of a rank, and compare the records of all ranks.

A rank that skips, adds or reorders a collective hangs or corrupts the others on a real backend.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: ``(name, members, shapes and dtypes)``; the members of a message are ``[sender, receiver]``.
Call = tuple[str, list[int], list[str]]


class RecordCollectives(TorchDispatchMode):
    """Append every c10d operator that this thread calls, backward passes included, to ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs))
            tensors = [f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves if isinstance(leaf, torch.Tensor)]
            members = dist.get_process_group_ranks(_process_group(args))
            name = func.name().partition("::")[2].rstrip("_")
            if name in ("send", "recv"):
                own, peer = dist.get_rank(), members[args[2]]
                name, members = "message", [own, peer] if name == "send" else [peer, own]
            self.calls.append((name, members, tensors))
        return func(*args, **(kwargs or {}))


def _process_group(arguments: Sequence[Any]) -> dist.ProcessGroup:
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError):  # an object of another kind, such as a ReduceOp
                return dist.ProcessGroup.unbox(value)
    raise TypeError(f"expected a process group among the arguments of a collective, found {arguments}")


def differences(calls: Sequence[Sequence[Call]]) -> list[str]:
    """Compare the records of all ranks, in the order of ranks.

    The members of a group must issue the same collectives in the same order. Messages are compared for each sender and
    receiver, because two directions may be interleaved in any order.
    """
    channels: dict[tuple[bool, tuple[int, ...]], dict[int, list[Call]]] = defaultdict(dict)
    for rank, own in enumerate(calls):
        for name, members, tensors in own:
            channels[name == "message", tuple(members)].setdefault(rank, []).append((name, members, tensors))
    found = []
    for (_, ranks), by_rank in sorted(channels.items()):
        sequences = [by_rank.get(rank, []) for rank in ranks]
        for index in range(max(map(len, sequences))):
            issued = [sequence[index] if index < len(sequence) else None for sequence in sequences]
            if any(call != issued[0] for call in issued):
                found.append(f"ranks {ranks}, call {index}: {issued}")
                break
    return found
