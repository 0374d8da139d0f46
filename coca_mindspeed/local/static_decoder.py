"""A decoder of fixed shapes for CUDA: one row a response, one CUDA graph for each bucket of rows and columns.

A small model's decoding step is bound by the launches of its kernels.  A graph launches all of them at once, but needs
tensors that stay where they are, sizes that do not depend on data, and no wait for the device.
"""

import itertools
import math
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from coca_mindspeed.local.plain import DynamicLayer
from coca_mindspeed.local.policy import Policy, Sharing
from coca_mindspeed.local.prefill import PreallocatedCache, Prefill
from coca_mindspeed.utils.text_formats import read_yaml

#: ``model_type`` of the architectures that a test decodes by this; without windows, and with PyTorch's attention.
STATIC = frozenset(read_yaml(Path(__file__).with_name("architectures.yaml"))["static"])
ROW_BUCKET, COLUMN_BUCKET = 32, 128  # buckets are multiples
_KEPT_SHARE = 1 / 16  # of the device's memory; a larger decoder is freed after each rollout and captured again


class CaptureError(RuntimeError):
    """A decoding step cannot be captured as a CUDA graph."""


def decodes_statically(policy: Policy) -> bool:
    """Whether the policy's responses are sampled by a :class:`StaticDecoder`."""
    if policy.decoding == "auto":
        config = policy.model.config
        return static_by_default(policy.device, config.model_type, policy.sharing, str(config._attn_implementation))
    return policy.decoding == "static"


def static_by_default(device: torch.device, model_type: str, sharing: Sharing, attention: str) -> bool:
    """Whether an architecture with these prompts shared and this attention is sampled by a :class:`StaticDecoder`."""
    tested = model_type in STATIC and sharing == "prefix"
    return device.type == "cuda" and tested and attention.startswith("sdpa")


def capacity(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the buffers for so many responses and tokens."""
    return _up(rows, ROW_BUCKET), _up(columns, COLUMN_BUCKET)


def kept_bytes(device: torch.device) -> float:
    """The largest buffers that stay allocated between two rollouts."""
    if device.type != "cuda":
        return math.inf
    return _KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory


class _StaticLayer(DynamicLayer):
    """Keys and values ``[rows, heads, columns, size]`` of all columns; new ones are written at ``column`` ``[1]``."""

    is_initialized: bool

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._column = keys, values, column
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self._column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self._column, value_states.to(self.values.dtype))
        return self.keys, self.values


class StaticDecoder:
    """A KV cache of ``rows`` x ``columns`` tokens and the inputs of a decoding step, all of which stay in place."""

    def __init__(self, policy: Policy, cache: PreallocatedCache, rows: int, columns: int) -> None:
        """Allocate buffers for a policy whose keys and values have the shapes of ``cache``."""
        device = policy.device
        self.rows, self.columns = capacity(rows, columns)
        # The input of the next step, its position in the text, the column where it will be written in all rows (prompts
        # are padded on the left), and the columns that a row's tokens attend to.
        self.token, self.position = (torch.zeros(self.rows, 1, dtype=torch.int64, device=device) for _ in range(2))
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(self.rows, self.columns, dtype=torch.bool, device=device)
        self._policy, self._bfloat16 = policy, policy.compute_dtype == torch.bfloat16

        def buffer(states: Tensor) -> Tensor:
            # Attention would round the keys at every token, to the same numbers.
            dtype = torch.bfloat16 if self._bfloat16 else states.dtype
            shape = (self.rows, states.shape[1], self.columns, states.shape[3])
            return torch.zeros(shape, dtype=dtype, device=device)

        self._buffers = [(buffer(layer.keys), buffer(layer.values)) for layer in cache.layers]
        # Weights that autocast would cast at every token.  A tied embedding keeps its own.
        linear = [m for m in policy.model.modules() if isinstance(m, torch.nn.Linear)] if self._bfloat16 else []
        self._linear = [m for m in linear if m.weight.dtype == torch.float32]
        self._cast = [torch.empty_like(m.weight, dtype=torch.bfloat16, requires_grad=False) for m in self._linear]
        self._addresses = self._weight_addresses()
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None

    def fits(self, rows: int, columns: int) -> bool:
        """Whether there is room, and the weights are still where they were captured."""
        return rows <= self.rows and columns <= self.columns and self._addresses == self._weight_addresses()

    @property
    def small(self) -> bool:
        """Whether the device has room for it between rollouts."""
        return self.nbytes <= kept_bytes(self.column.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache and of the copies of weights."""
        return sum(buffer.nbytes for buffer in itertools.chain(self._cast, *self._buffers))

    def start(self, cache: PreallocatedCache, prompts: Prefill, group_size: int) -> None:
        """Copy the cache of prefilled prompts, each into ``group_size`` rows, and the policy's present weights."""
        used, width = len(prompts.lengths) * group_size, prompts.width
        self.mask.zero_()
        self.mask[used:, 0] = True  # rows without a response attend to something, too
        self.mask[:used, :width] = True if prompts.mask is None else prompts.mask.repeat_interleave(group_size, dim=0)
        self.position.zero_()
        self.position[:used, 0] = prompts.lengths.repeat_interleave(group_size)
        self.column.fill_(width)
        for layer, buffers in zip(cache.layers, self._buffers, strict=True):
            for states, buffer in zip((layer.keys, layer.values), buffers, strict=True):
                buffer[:used, :, :width].unflatten(0, (-1, group_size)).copy_(states[:, None])
        if self._cast:
            torch._foreach_copy_(self._cast, [m.weight.detach() for m in self._linear])

    def forward(self, rows: int, width: int) -> Tensor:
        """Append :attr:`token` to the first ``rows`` rows, as the last of ``width`` columns; return the next logits."""
        policy = self._policy
        self.mask.index_fill_(1, self.column, True)
        cache = PreallocatedCache(policy.model.config)
        used = slice(rows), slice(None), slice(width)
        cache.layers = [_StaticLayer(keys[used], values[used], self.column) for keys, values in self._buffers]
        # Without autocast's own copies of weights, which end before the graph does.
        autocast = torch.autocast(policy.device.type, torch.bfloat16, enabled=self._bfloat16, cache_enabled=False)
        with self._cast_weights(), autocast:
            states = policy.lm_head.hidden_states(
                input_ids=self.token[:rows],
                attention_mask=self.mask[:rows, None, None, :width],
                position_ids=self.position[:rows],
                cache=cache,
                use_cache=True,
            )
            logits = policy.lm_head.logits(states[:, -1])
        self.position += 1
        self.column += 1
        return logits

    def run(self, step: Callable[[int, int], None], rows: int, width: int, *constants: Hashable) -> None:
        """Run ``step(rows, width)``, both rounded up to a bucket; on CUDA as a graph.

        The step reads and writes tensors that stay in place.  ``constants`` are its other inputs.  Raises CaptureError:
        it cannot be captured.
        """
        rows, width = _up(rows, ROW_BUCKET), _up(width, COLUMN_BUCKET)
        if self.column.device.type != "cuda":
            step(rows, width)
            return
        key = (rows, width, *constants)
        if key in self._graphs:
            self._graphs[key].replay()
            return
        current = torch.cuda.current_stream(self.column.device)
        try:
            self._graphs[key] = self._captured(lambda: step(rows, width))
        except Exception as error:
            torch.cuda.set_stream(current)
            first: BaseException = error  # before the capture's own end failed, too
            while first.__context__ is not None:
                first = first.__context__
            at = traceback.extract_tb(first.__traceback__)[-1]
            reason = next(iter(str(first).splitlines()), "")
            raise CaptureError(f"{type(first).__name__}: {reason} ({at.filename}:{at.lineno})") from error

    def _captured(self, step: Callable[[], None]) -> Any:
        """Run a step on a stream of its own, which loads its kernels, and capture another one without running it."""
        own, current = torch.cuda.Stream(self.column.device), torch.cuda.current_stream(self.column.device)
        own.wait_stream(current)
        with torch.cuda.stream(own):
            step()
        current.wait_stream(own)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph

    def _weight_addresses(self) -> list[tuple[int, torch.dtype]]:
        model = self._policy.model
        return [(each.data_ptr(), each.dtype) for each in itertools.chain(model.parameters(), model.buffers())]

    @contextmanager
    def _cast_weights(self) -> Iterator[None]:
        """Let the linear layers use their weights in bfloat16."""
        weights: list[Any] = [module.weight for module in self._linear]
        try:
            for module, weight in zip(self._linear, self._cast, strict=True):
                module._parameters["weight"] = cast(torch.nn.Parameter, weight)
            yield
        finally:
            for module, weight in zip(self._linear, weights, strict=True):
                module._parameters["weight"] = weight


def _up(number: int, multiple: int) -> int:
    return multiple * math.ceil(number / multiple)
