"""Reads an XPlane file, in which TensorFlow's profiler stores what each thread and each GPU did.

The format is a protocol buffer, `xplane.proto` of the OpenXLA project. Only the fields named here are read, so that no
library is needed; other fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_SPACE_PLANE = 1
_PLANE_NAME, _PLANE_LINE, _PLANE_EVENT_METADATA = 2, 3, 4
_MAP_VALUE = 2
_METADATA_ID, _METADATA_NAME = 1, 2
_LINE_NAME, _LINE_EVENT = 2, 4
_EVENT_FIELDS = (1, 2, 3)
"""Its metadata, offset and duration."""


@dataclass(frozen=True)
class Event:
    """Something that a thread or a GPU did.

    Args:
        metadata: the number of its name.
        offset: when it began, in picoseconds since the line's first moment.
        duration: how long it took, in picoseconds.
    """

    metadata: int
    offset: int
    duration: int


@dataclass(frozen=True)
class Line:
    """A thread, or a stream of a GPU.

    Args:
        name: its name.
        events: what it did; one event may contain others.
    """

    name: str
    events: list[Event]


@dataclass(frozen=True)
class Plane:
    """A processor or a GPU.

    Args:
        name: `/host:CPU`, `/device:GPU:0`.
        lines: its threads or streams.
        names: the names of events, by their numbers.
    """

    name: str
    lines: list[Line]
    names: dict[int, str]


def read_planes(data: bytes) -> Iterator[Plane]:
    """Yields the planes of an XPlane file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        for number, start, end in _parts(data, 0, len(data)):
            if number == _SPACE_PLANE:
                yield _plane(data, start, end)
    except (IndexError, KeyError) as error:
        raise ValueError("it is not a complete XPlane file") from error


def _plane(data: bytes, start: int, end: int) -> Plane:
    name, lines, names = "", [], {}
    for number, first, last in _parts(data, start, end):
        if number == _PLANE_NAME:
            name = _text(data, first, last)
        elif number == _PLANE_LINE:
            lines.append(_line(data, first, last))
        elif number == _PLANE_EVENT_METADATA:
            for inner, begin, stop in _parts(data, first, last):
                if inner == _MAP_VALUE:
                    key, text = _metadata(data, begin, stop)
                    names[key] = text
    return Plane(name, lines, names)


def _metadata(data: bytes, start: int, end: int) -> tuple[int, str]:
    key, text = 0, ""
    for number, first, last in _parts(data, start, end):
        if number == _METADATA_ID:
            key = first
        elif number == _METADATA_NAME:
            text = _text(data, first, last)
    return key, text


def _line(data: bytes, start: int, end: int) -> Line:
    name, events = "", []
    for number, first, last in _parts(data, start, end):
        if number == _LINE_NAME:
            name = _text(data, first, last)
        elif number == _LINE_EVENT:
            fields = {inner: value for inner, value, _ in _parts(data, first, last)}
            events.append(Event(*(fields.get(each, 0) for each in _EVENT_FIELDS)))
    return Line(name, events)


def _parts(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the fields of a message: their numbers, and their values, or the first byte and the end of their bytes.

    Raises:
        IndexError: the message is cut off.
        KeyError: a field has an unknown type.
    """
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value, at
            continue
        size, at = _varint(data, at) if kind == _BYTES else (_SIZES[kind], at)
        if at + size > end:
            raise IndexError(at)
        yield tag >> 3, at, at + size
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 128:
        return byte, at
    value, shift = byte & 127, 7
    while (byte := data[at]) >= 128:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1


def _text(data: bytes, start: int, end: int) -> str:
    return data[start:end].decode(errors="replace")
