"""Measures the phases of a step, with operations of the function that trains; only `tfdist bench` turns it on.

A worker takes the time when its batch has arrived, when the parameters have, when the gradients are computed, and so
on. Each time waits for the end of its phase and for the time before it. Nothing waits for a time, so the step is not
delayed. Of phases that overlap the time counts for the one that ends later: data that is ready before the last update
is done takes no time at all. The phases of a step follow each other without a gap, all by the worker's own clock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.protocol.phases import COLUMNS
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import clock


class StepTimer:
    """The times of one function that trains; if it is off, it adds no operation to the function.

    Args:
        on: whether anything is measured.
        start: the time when the first phase begins, `last_time` of another timer; by default when the function begins.
    """

    def __init__(self, on: bool, start: tf.Tensor | None = None) -> None:
        self._last = _time([]) if on and start is None else start
        self._measured: list[tuple[int, tf.Tensor]] = []

    @property
    def last_time(self) -> list[tf.Tensor]:
        """The end of the last phase, in seconds, float64, shape (); an empty list if the timer is off."""
        return [] if self._last is None else [self._last]

    def end(self, phase: str, *results: Any) -> None:
        """Ends a phase when all of its results, tensors and operations, are available."""
        if self._last is None:
            return
        ends = [end for end in tf.nest.flatten(results, expand_composites=True) if end is not None]
        now = _time([tf.group(*ends), self._last])
        self._measured.append((COLUMNS.index(phase), now - self._last))
        self._last = now

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Ends a phase when all changes to variables within the context are made."""
        if self._last is None:
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        made = graph.get_operations()[before:]
        self.end(phase, [each for each in made if any(part.dtype == tf.resource for part in each.inputs)])

    def add_longest(self, phase: str, spans: Sequence[tf.Tensor]) -> None:
        """Adds the longest of some spans, in seconds; both ends of a span are taken by `time_of` on one device."""
        if self._last is not None:
            self._measured.append((COLUMNS.index(phase), tf.reduce_max(tf.stack(spans))))

    def add_bytes(self, sizes: Callable[[], Mapping[str, Any]]) -> None:
        """Adds bytes, by the names of `TRAFFIC`."""
        if self._last is not None:
            self._measured += [(COLUMNS.index(name), tf.cast(size, tf.float64)) for name, size in sizes().items()]

    def totals(self) -> list[tf.Tensor]:
        """Seconds of each phase and bytes, float64 of shape (len(COLUMNS),); an empty list if the timer is off."""
        if self._last is None:
            return []
        columns, values = zip(*self._measured, strict=True)
        return [tf.math.unsorted_segment_sum(tf.stack(values), tf.constant(columns), len(COLUMNS))]


class UpdatesInWaits:
    """Finds out how much of each worker's `wait` were updates by the ps.

    A worker that has submitted a gradient waits for all updates that are ordered before it is assigned its next step.
    Its wait begins before the chief receives the gradient and ends after these updates, so they lie within it. An
    update takes as long as the slowest ps needs for its part of it, from the arrival of the order.
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._ordered: deque[frozenset[int]] = deque()
        """For each ordered update the workers that wait for it."""
        self._seconds: dict[int, float] = {}

    def start_wait(self, worker: int) -> None:
        """A worker begins to wait."""
        self._waiting.add(worker)
        self._seconds[worker] = 0.0

    def update_ordered(self) -> None:
        """An update is ordered: the workers that wait now wait for it."""
        self._ordered.append(frozenset(self._waiting))

    def end_wait(self, worker: int) -> None:
        """A worker has been assigned its next step, which it receives after the updates ordered so far."""
        self._waiting.discard(worker)

    def update_applied(self, measured: np.ndarray) -> None:
        """The next one of the ordered updates is applied.

        Args:
            measured: `StepTimer.totals` of the function that applied it; shape (0,) if the timer is off.
        """
        for worker in self._ordered.popleft():
            self._seconds[worker] += float(measured[COLUMNS.index("update")]) if measured.size else 0.0

    def add(self, worker: int, measured: np.ndarray, totals: dict[str, Any]) -> None:
        """Adds a worker's step to the totals of its task; the updates in its wait count as `update`.

        Args:
            worker: its number.
            measured: `StepTimer.totals` of the step, shape (len(COLUMNS),); or (0,) if the timer is off.
            totals: the sums so far, `{"worker:0": ...}`.
        """
        if not measured.size:
            return
        task = f"worker:{worker}"
        totals[task] = totals.get(task, 0.0) + wait_as_update(measured, self._seconds.pop(worker, 0.0))


def wait_as_update(measured: np.ndarray, seconds: float) -> np.ndarray:
    """Moves some seconds of a step's `wait` to its `update`: the updates of the ps that the worker waited for."""
    moved = np.zeros(len(COLUMNS))
    moved[[COLUMNS.index("wait"), COLUMNS.index("update")]] = -seconds, seconds
    return measured + moved


def by_name(totals: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Returns what was measured on each task, by the names of the columns."""
    return {task: dict(zip(COLUMNS, map(float, measured), strict=True)) for task, measured in sorted(totals.items())}


def time_of(*results: Any) -> tf.Tensor:
    """The time when all results, tensors and operations, are available, by the device's clock: seconds, float64."""
    return _time([end for end in tf.nest.flatten(results) if end is not None])


def _time(ends: list[Any]) -> tf.Tensor:
    with tf.control_dependencies(ends):
        return unordered(clock())
