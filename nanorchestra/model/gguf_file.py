"""Reads a GGUF file, the format of llama.cpp: metadata and tensors.

A file is a header of keys and values, a table of tensors, and the tensors' bytes in blocks: some
numbers in few bits with their scales (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
The package `gguf` knows the blocks. The header is parsed here: 300,000 tokens and merges take a
tenth of a second. `gguf_model.py` says what the metadata and the tensors mean.
"""

import math
import mmap
import re
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nanorchestra.errors import UserError, require

VERSIONS = 2, 3
# The types that the package widens to float32
TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
# A value's type in the header -> its format in `struct`
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8  # 9: an array
_CHUNK = 1 << 17  # numbers that are widened at a time: what stays in the cache, 3 times as fast
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file: its blocks are `size` bytes from `begin`, row after row."""

    path: Path
    type: Any  # GGMLQuantizationType of the package
    shape: tuple[int, ...]
    begin: int
    size: int

    def widened(self) -> np.ndarray:
        """Returns the numbers, float32 of its shape; memory holds few others beside them."""
        from gguf.quants import dequantize

        *_, columns = self.shape
        numbers = np.empty((math.prod(self.shape) // columns, columns), np.float32)
        row_bytes = self.size // len(numbers)
        rows = max(_CHUNK // columns, 1)
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            for chunk in np.split(numbers, range(rows, len(numbers), rows)):
                data = file.read(len(chunk) * row_bytes)
                blocks = np.frombuffer(data, np.uint8).reshape(len(chunk), row_bytes)
                chunk[:] = dequantize(blocks, self.type)
        return numbers.reshape(self.shape)


class GgufFile:
    """An open GGUF file: `metadata` by key, and `tensors` by llama.cpp's name.

    A file that is split in parts is opened by the first of them. Raises UserError, which names the
    file, for a file that is cut short or not of a kind that is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = _parsed(path)
        count, number = self.metadata.get("split.count", 1), self.metadata.get("split.no", 0)
        if count == 1:
            return
        first, *others = part_files(path)
        require(
            number == 0, f"{path}: is part {number} (from 0) of a split file; give {first.name}"
        )
        require(
            1 + len(others) == count,
            f"{path}: is the first of {count} parts; expected a name like x-00001-of-00003.gguf",
        )
        for part in others:
            require(part.exists(), f"{part}: cannot be read (No such file or directory)")
            self.tensors |= _parsed(part)[1]

    def check(self, holds: object, key: str, expected: object) -> None:
        """Raises UserError, which names a key of the metadata, unless `holds`."""
        value = reprlib.repr(self.metadata.get(key))
        require(holds, f"{self.path}: {key} = {value}: expected {expected}")


def part_files(path: Path) -> list[Path]:
    """Returns the files over which a file's tensors are spread, by its name: itself, or parts.

    x-00002-of-00003.gguf stands for three, x-00001-of-00003.gguf and so on.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    return [path.with_name(f"{stem}-{n:05d}-of-{count}.gguf") for n in range(1, 1 + int(count))]


class _Header:
    """The bytes of a file from its begin, value after value."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, reason) -> NoReturn:
        raise UserError(f"{self.path}: not a GGUF file that can be read: {reason}")

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize(kind)
        if kind == "f":
            return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, texts = self.data, self.at, []
        for _ in range(count):
            begin = at + 8
            at = begin + _LENGTH.unpack_from(data, at)[0]
            texts.append(data[begin:at].decode())
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        kind, length = self.number("I"), self.number("Q")  # of an array
        if kind == _STRING:
            return self.strings(length)
        values = struct.unpack_from(f"<{length}{_NUMBERS[kind]}", self.data, self.at)
        self.at += length * struct.calcsize(_NUMBERS[kind])
        return list(values)


def _parsed(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Returns the metadata and the tensors of one file."""
    with open(path, "rb") as file:
        require(
            file.read(4) == b"GGUF",
            f"{path}: not a GGUF file; expected one, or a directory in Hugging Face layout",
        )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Header(path, data))


def _read(header) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    header.at = 4
    version = header.number("I")
    if version & 0xFFFF == 0:
        header.fail("its numbers are big-endian; expected little-endian ones")
    if version not in VERSIONS:
        header.fail(f"it has version {version}; expected {' or '.join(map(str, VERSIONS))}")
    tensor_count, key_count = header.number("Q"), header.number("Q")
    metadata = {}
    for _ in range(key_count):
        key = header.string()
        metadata[key] = header.value(header.number("I"))
    return metadata, _table(header, tensor_count, metadata.get("general.alignment", 32))


def _table(header, count, alignment) -> dict[str, GgufTensor]:
    """Returns the tensors; their bytes begin behind the table, at a multiple of `alignment`."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    types = {number.value: number for number in GGMLQuantizationType if number.name in TYPES}
    entries = {}
    for _ in range(count):
        name = header.string()
        dimensions = header.number("I")
        shape = tuple(reversed([header.number("Q") for _ in range(dimensions)]))
        entries[name] = shape, header.number("I"), header.number("Q")
    begin = header.at + -header.at % alignment
    tensors = {}
    for name, (shape, number, offset) in entries.items():
        kind = types.get(number)
        if kind is None:
            known = {value.value: value.name for value in GGMLQuantizationType}
            header.fail(
                f"{name!r} has type {known.get(number, number)}; {', '.join(TYPES)} are read"
            )
        numbers, block = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // numbers * block
        end = begin + offset + size
        if end > len(header.data):
            header.fail(
                f"{name!r} ends at byte {end:,}, the file at {len(header.data):,}; is the download "
                "complete?"
            )
        tensors[name] = GgufTensor(header.path, kind, shape, begin + offset, size)
    return tensors
