"""Messages between the trainer and the process that holds vLLM: JSON, and tensors behind it, as bytes over a socket.

No pickle: the other end may be another environment's Python, with other releases of everything.  For the same reason
this module imports nothing but torch and the standard library.
"""

import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.int64, torch.float32, torch.bfloat16)}


def send(connection: Connection, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
    """Send a message and the tensors that belong to it (int64, float32 or bfloat16, of any device)."""
    shapes = [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors]
    connection.send_bytes(json.dumps({**message, "tensors": shapes}).encode())
    for tensor in tensors:
        if tensor.numel():
            connection.send_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def receive(connection: Connection) -> tuple[dict[str, Any], list[Tensor]]:
    """The next message and its tensors, on the CPU.

    Raises:
        EOFError: the other end is gone.
    """
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    tensors = []
    for name, *shape in message.pop("tensors"):
        tensor = torch.empty(shape, dtype=_DTYPES[name])
        if tensor.numel():
            buffer = tensor.view(-1).view(torch.uint8).numpy()
            received = connection.recv_bytes_into(buffer.data)
            if received != buffer.nbytes:
                raise EOFError(f"a tensor of {buffer.nbytes} bytes came as {received}")
        tensors.append(tensor)
    return message, tensors
