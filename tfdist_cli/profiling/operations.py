"""Which operations a profile's time is spent in."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tfdist_cli.profiling.xplane import Event, Plane

_OPERATION = re.compile(r"[^:]+:(_?[A-Z]\w*)")
"""TensorFlow's name of an execution of an operation: `name:Type`."""
_CPU, _DEVICE = "/host:CPU", "/device:"
_PICOSECONDS = 1e12


@dataclass(frozen=True)
class Operation:
    """All executions of one type of operation on one device.

    Args:
        device: `CPU`, or `GPU:0`.
        name: the type, such as `MatMul`; on a GPU the name of the kernel.
        count: how often it was executed.
        seconds: the time that threads spent in it, without what it contains.
    """

    device: str
    name: str
    count: int
    seconds: float


def operations(planes: Iterable[Plane]) -> list[Operation]:
    """Returns the operations by their time, the longest first."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for plane in planes:
        device = "CPU" if plane.name == _CPU else plane.name.removeprefix(_DEVICE)
        if plane.name != _CPU and not plane.name.startswith(_DEVICE):
            continue
        for line in plane.lines:
            for event, own in self_times(line.events):
                if name := _name(plane.names.get(event.metadata, ""), is_host=plane.name == _CPU):
                    total = totals[device, name]
                    total[0], total[1] = total[0] + 1, total[1] + own
    found = [Operation(*key, count, own / _PICOSECONDS) for key, (count, own) in totals.items()]
    return sorted(found, key=lambda each: each.seconds, reverse=True)


def _name(event: str, *, is_host: bool) -> str:
    """The operation of an event; empty if the event is something else, such as the executor's work."""
    if not is_host:
        return event
    found = _OPERATION.fullmatch(event)
    return found[1] if found else ""


def self_times(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Yields each event of a line with its duration less that of the events directly in it, in picoseconds."""
    stack: list[tuple[Event, int, list[int]]] = []
    for event in sorted(events, key=lambda each: (each.offset, -each.duration)):
        while stack and stack[-1][1] <= event.offset:
            ended, _, inner = stack.pop()
            yield ended, ended.duration - inner[0]
        if stack:
            stack[-1][2][0] += event.duration
        stack.append((event, event.offset + event.duration, [0]))
    while stack:
        ended, _, inner = stack.pop()
        yield ended, ended.duration - inner[0]
