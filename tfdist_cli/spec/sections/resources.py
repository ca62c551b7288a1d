"""The resources of a role's tasks: memory, GPUs, memory of GPUs, and threads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.model import VARIABLE_SCHEMA, SpecModel

MIB = 2**20
MIN_INTER_OP_THREADS = 4
"""A ps or worker with one inter-op thread deadlocks: a blocked receive occupies the only thread that could send."""
GPU_MEMORY = "TFDIST_GPU_MEMORY"
"""The environment variable with the fraction, or the amount, of each GPU's memory that a task allocates."""
GPUS = "TFDIST_GPUS"
"""The environment variable with the number of GPUs that a task should see: from 1 on, or `all`."""
_UNITS = {"B": 1}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]+)")
_GPU_ID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,100}")


@dataclass(frozen=True, order=True)
class Size:
    """An amount of memory.

    Args:
        bytes: how much.
    """

    bytes: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Reads a number and its unit: `4GiB`, `512 MiB`, `1.5 GB`.

        Raises:
            InvalidValue: it has no unit, or an unknown one, or is less than 1 byte.
        """
        match = _SIZE.fullmatch(text.strip())
        unit = match and _UNITS.get(match[2])
        if not match or not unit:
            message = f"{text!r} is not an amount of memory: write a number and a unit, such as 4GiB or 512MiB"
            raise InvalidValue(message, code="invalid-size")
        size = cls(int(float(match[1]) * unit))
        if not size.bytes:
            raise InvalidValue(f"{text!r} is less than 1 byte", code="out-of-range")
        return size

    @property
    def mib(self) -> int:
        """The number of whole MiB, rounded down."""
        return self.bytes // MIB

    def __str__(self) -> str:
        unit = next(name for name in ("TiB", "GiB", "MiB", "KiB", "B") if not self.bytes % _UNITS[name])
        return f"{self.bytes // _UNITS[unit]} {unit}"


GpuMemory = Literal["grow"] | float | Size
"""`grow`, a fraction of a GPU's memory, or an amount of it."""


def _parse_size(value: Any) -> Size:
    if isinstance(value, Size):
        return value
    if not isinstance(value, str):  # pydantic does not handle a TypeError
        raise InvalidValue(f"expected an amount with its unit, such as 4GiB, got {value!r}", code="wrong-type")
    return Size.parse(value)


def _parse_gpu_memory(value: Any) -> GpuMemory:
    expected = "expected 'grow', a fraction of the memory such as 0.5, or an amount such as 4096MiB"
    if value == "grow":
        return "grow"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value <= 1:
            raise InvalidValue(f"{expected}; {value!r} is not a fraction", code="out-of-range")
        return float(value)
    if not isinstance(value, str | Size):
        raise InvalidValue(f"{expected}, got {value!r}", code="wrong-type")
    try:
        size = _parse_size(value)
    except InvalidValue:
        raise InvalidValue(f"{expected}, got {value!r}", code="invalid-size") from None
    if not size.mib:
        raise InvalidValue(f"{value!r} is less than 1 MiB, the unit that TensorFlow counts in", code="out-of-range")
    return size


def _parse_gpus(value: Any) -> Literal["all"] | int | list[int | str]:
    if value == "all":
        return "all"
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidValue(f"expected a number of GPUs, 0 or more, got {value}", code="out-of-range")
        return value
    if not isinstance(value, list):
        message = f"expected 'all', a number of GPUs, or a list of their ids such as [0, 2], got {value!r}"
        raise InvalidValue(message, code="wrong-type")
    ids = [_gpu_id(item) for item in value]
    if not ids:
        raise InvalidValue("the list is empty: write 0 for no GPU", code="empty-list")
    twice = next((item for item in ids if ids.count(item) > 1), None)
    if twice is not None:
        raise InvalidValue(f"GPU {twice} is listed more than once", code="duplicate-gpu")
    return ids


def _gpu_id(item: Any) -> int | str:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return item
    if isinstance(item, str) and _GPU_ID.fullmatch(item):
        return item
    message = f"{item!r} is not the ID of a GPU: expected a number from 0 on, or a UUID as `nvidia-smi -L` prints it"
    raise InvalidValue(message, code="invalid-gpu")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Size) else value


_SIZE_SCHEMA = {"type": "string", "examples": ["4GiB", "512MiB"]}
SizeField = Annotated[Size, PlainValidator(_parse_size), PlainSerializer(str), WithJsonSchema(_SIZE_SCHEMA)]
GpuMemoryField = Annotated[
    GpuMemory,
    PlainValidator(_parse_gpu_memory),
    PlainSerializer(_plain),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "string"}]}),
]
GpusField = Annotated[
    Literal["all"] | int | list[int | str],
    PlainValidator(_parse_gpus),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "all"},
                {"type": "integer", "minimum": 0},
                {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1},
                VARIABLE_SCHEMA,
            ]
        }
    ),
]


class ThreadsSpec(SpecModel):
    """The thread pools of TensorFlow in one task."""

    intra: Annotated[int, Field(ge=1)] | None = None
    """Number of threads that compute one operation. By default `cpus`, or the task's share of the cores."""
    inter: Annotated[int, Field(ge=1)] | None = None
    """Number of operations that run at the same time. By default the value of `intra`, but at least 4."""
    bind: bool = True
    """Whether the threads of a worker stay on its own share of the cores, where several workers without GPUs share a
    machine with a ps. With `false`, the kernel moves them between all cores."""
