"""The nodes of a cluster run, as every node's environment describes them."""

import socket
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, NamedTuple

from coca_mindspeed.errors import Problem, raise_problems

_LOCAL = "127.0.0.1"
_DIGITS = 10
# Other launchers export these on every node: the number of nodes (or processes), and this one's rank among them.
_OTHER_LAUNCHERS = {
    "SLURM_NNODES": "SLURM_NODEID",
    "PET_NNODES": "PET_NODE_RANK",
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
}


class Nodes(NamedTuple):
    """The number of nodes, this node's rank (0: the head), the head's address and port, and a wait in seconds."""

    total: int
    rank: int
    address: str
    port: int
    timeout: int

    @property
    def head(self) -> str:
        """Address and port of the head."""
        return f"{self.address}:{self.port}"


def read_nodes(environment: Mapping[str, str]) -> Nodes:
    """Read the nodes from ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR``, ``RAY_PORT`` and ``CLUSTER_TIMEOUT``.

    Numbers are decimal, whatever zeros they begin with.  Raises UsageError for a variable that cannot be, or if
    another launcher's variable names several nodes and ``NNODES`` is not set: each would train a run of its own.
    """

    def number(name: str, default: int, low: int, high: int | None = None) -> int:
        text = environment.get(name) or str(default)
        value = _whole_number(text)
        allowed = f"from {low} on" if high is None else f"from {low} to {high}"
        _require("node-number", name, text, value >= low and (high is None or value <= high), f"a number {allowed}")
        return value

    if not environment.get("NNODES"):
        _refuse_unsaid_nodes(environment)
    count = number("NNODES", 1, 1)
    rank = number("NODE_RANK", 0, 0, count - 1)
    port, timeout = number("RAY_PORT", 6766, 1, 65535), number("CLUSTER_TIMEOUT", 600, 0)
    address = environment.get("MASTER_ADDR", "").strip()
    alone = ":" not in address or _is_ip_address(address)
    _require("head-address", "MASTER_ADDR", address, alone, "an address without a port, which RAY_PORT sets")
    if count > 1:
        wanted = f"an address of the node with NODE_RANK=0 that the other {count - 1} of NNODES={count} reach"
        _require("no-head", "MASTER_ADDR", address or None, bool(address), wanted)
        _require("head-address", "MASTER_ADDR", address, not means_this_machine(address), f"{wanted}, not this machine")
    return Nodes(count, rank, address or _LOCAL, port, timeout)


def _whole_number(text: str) -> int:
    """The number of a few ASCII digits; -1 for any other text, and for a number that no cluster has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text.lstrip("0")) < _DIGITS else -1


def _refuse_unsaid_nodes(environment: Mapping[str, str]) -> None:
    for name, rank in _OTHER_LAUNCHERS.items():
        text = environment.get(name, "").strip()
        if text and _whole_number(text) not in (0, 1):
            fix = (
                f"export NNODES={text} NODE_RANK=${rank} MASTER_ADDR=ADDRESS_OF_RANK_0 on every node, or NNODES=1 for "
                "a run on this node alone"
            )
            problem = Problem("unsaid-nodes", name, text, "names several nodes, and NNODES is not set", fix)
            raise_problems([problem], usage=True)


def _is_ip_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _require(code: str, key: str, value: str | None, holds: bool, expected: str) -> None:
    if not holds:
        raise_problems([Problem(code, key, value, f"expected {expected}")], usage=True)


def means_this_machine(host: str, addresses: Callable[..., Any] = socket.getaddrinfo) -> bool:
    """Whether a name or address means the machine that uses it (loopback, or no address), whichever that is.

    A host's own name often does, by its ``/etc/hosts``.  False for a name that is not known here.
    """
    try:
        found = {ip_address(str(entry[4][0]).partition("%")[0]) for entry in addresses(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(address.is_loopback or address.is_unspecified for address in found)
