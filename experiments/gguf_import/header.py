"""Read the header of a GGUF file; every length and count is checked against the size of the file.

The ``gguf`` package trusts these numbers: a file of a hundred bytes that declares 2^60 tokens keeps it busy for ever.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from coca_mindspeed.errors import DataError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SCALARS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
# Smallest sizes in bytes: length of the name, type, value; length of the name, dimensions, type, offset.
_MIN_ENTRY, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufHeader:
    """Metadata (numbers, strings, lists of strings, arrays of numbers) and shapes of the tensors in PyTorch's order."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


def read_header(path: Path) -> GgufHeader:
    """Read the header and check that the file contains the declared weights.

    Raises:
        DataError: not a GGUF file, an unsupported version or byte order, truncated, or contradictory; with the byte.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _header(_BoundedReader(file, size, path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _header(reader: "_BoundedReader") -> GgufHeader:
    if reader.size < len(_MAGIC) or reader.take(len(_MAGIC), "the magic number") != _MAGIC:
        raise DataError(f"{reader.path}: not a GGUF file (it does not begin with the letters GGUF)")
    version = reader.whole("<I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = f"{swapped} in big-endian order" if swapped in _VERSIONS else str(version)
        raise DataError(f"{reader.path}: expected GGUF of version 2 or 3, little-endian; found version {found}")
    tensors = reader.count(_MIN_TENSOR, "the number of tensors")
    entries = reader.count(_MIN_ENTRY, "the number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.text("the name of a metadata entry")
        if key in metadata:
            raise reader.problem(f"metadata {key!r} is defined twice")
        metadata[key] = reader.value(f"metadata {key!r}")
    places: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name = reader.text("the name of a tensor")
        if name in places:
            raise reader.problem(f"tensor {name!r} is defined twice")
        places[name] = reader.tensor(f"tensor {name!r}")
    _check_weights(reader, places, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    return GgufHeader(metadata, {name: shape for name, (shape, _, _) in places.items()})


def _check_weights(
    reader: "_BoundedReader", places: Mapping[str, tuple[tuple[int, ...], int, int]], alignment: object
) -> None:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.problem(f"general.alignment should be a power of two, found {alignment!r:.80}")
    start = -(-reader.at // alignment) * alignment
    for name, (_, offset, length) in places.items():
        if offset % alignment:
            raise reader.problem(f"tensor {name!r} begins at {offset}, which is not a multiple of {alignment}")
        if start + offset + length > reader.size:
            raise DataError(
                f"{reader.path}: truncated: tensor {name!r} ends at byte {start + offset + length}, "
                f"the file at {reader.size}"
            )


class _BoundedReader:
    """Reads forward and checks the remaining bytes before it reads, counts or allocates."""

    def __init__(self, file: IO[bytes], size: int, path: Path) -> None:
        self._file = file
        self.size, self.path, self.at = size, path, 0

    def problem(self, field: str) -> DataError:
        return DataError(f"{self.path}: byte {self.at}: {field}")

    def take(self, length: int, field: str) -> bytes:
        if length > self.size - self.at:
            left = self.size - self.at
            raise self.problem(f"truncated or damaged: {field} takes {length} bytes, {left} are left")
        data = self._file.read(length)
        if len(data) != length:
            raise self.problem("the file became shorter while it was read")
        self.at += length
        return data

    def whole(self, code: str, field: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code), field))[0])

    def count(self, least: int, field: str) -> int:
        """Read a count of items of at least ``least`` bytes, which must fit into the rest of the file."""
        number = self.whole("<Q", field)
        if number * least > self.size - self.at:
            left = self.size - self.at
            raise self.problem(f"truncated or damaged: {field} is {number}, {left} bytes are left")
        return number

    def text(self, field: str) -> str:
        data = self.take(self.whole("<Q", f"the length of {field}"), field)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.problem(f"{field} is not UTF-8: {error}") from error

    def value(self, field: str) -> Any:
        kind = self.whole("<I", f"the type of {field}")
        if kind != GGUFValueType.ARRAY:
            return self._single(kind, field)
        kind = self.whole("<I", f"the type of the elements of {field}")
        if kind == GGUFValueType.STRING:
            return [self.text(field) for _ in range(self.count(8, f"the length of {field}"))]
        if kind not in _SCALARS:
            raise self.problem(f"{field} is an array of type {kind}; expected numbers or strings")
        dtype = _SCALARS[kind]
        length = self.count(dtype.itemsize, f"the length of {field}")
        return np.frombuffer(self.take(length * dtype.itemsize, field), dtype)

    def _single(self, kind: int, field: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(field)
        if kind not in _SCALARS:
            raise self.problem(f"{field} has the unknown type {kind}")
        dtype = _SCALARS[kind]
        number = np.frombuffer(self.take(dtype.itemsize, field), dtype)[0].item()
        return bool(number) if kind == GGUFValueType.BOOL else number

    def tensor(self, field: str) -> tuple[tuple[int, ...], int, int]:
        """Shape, offset among the weights and length in bytes of a tensor."""
        dimensions = self.whole("<I", f"the dimensions of {field}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.problem(f"{field} has {dimensions} dimensions; expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.whole("<Q", f"the shape of {field}") for _ in range(dimensions))[::-1]
        kind = self.whole("<I", f"the type of {field}")
        offset = self.whole("<Q", f"the offset of {field}")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self.problem(f"{field} has type {kind}, which the installed gguf package does not support") from None
        elements = math.prod(shape)
        if elements == 0 or shape[-1] % block:
            raise self.problem(f"{field} has shape {shape}; expected rows of a multiple of {block} elements")
        return shape, offset, elements // block * block_bytes
