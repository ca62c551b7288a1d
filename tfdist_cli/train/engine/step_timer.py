"""Where the time of a step goes, noted in the very functions that train; only a run of `tfdist bench` has it in them.

A worker notes the time when its batch is there, when the parameters are, the gradients, and so on. Each note waits for
what it is about and for the note before it; nothing waits for a note, so that a step goes on as it does without. What
goes on at the same time counts for the phase that ends later: data that is there before the last update is done takes
no time at all. The phases of a step follow each other without a gap, and all notes are taken by the worker's own clock.
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


class Watch:
    """The notes of one function that trains; where nothing is to be watched, it adds no operation to the function.

    Args:
        on: whether anything is noted.
        now: the time that the first phase begins at, the `note` of another watch; by default when the function does.
    """

    def __init__(self, on: bool, now: tf.Tensor | None = None) -> None:
        self._now = _time([]) if on and now is None else now
        self._counted: list[tuple[int, tf.Tensor]] = []

    @property
    def note(self) -> list[tf.Tensor]:
        """The time of the last note, in seconds, float64, shape (); an empty list when nothing is noted."""
        return [] if self._now is None else [self._now]

    def after(self, phase: str, *what: Any) -> None:
        """Ends a phase when all of `what`, tensors and operations, is there: on a ps, when it has said so."""
        if self._now is None:
            return
        ends = [end for end in tf.nest.flatten(what, expand_composites=True) if end is not None]
        now = _time([tf.group(*ends), self._now])
        self._counted.append((COLUMNS.index(phase), now - self._now))
        self._now = now

    @contextlib.contextmanager
    def over(self, phase: str) -> Iterator[None]:
        """Ends a phase when whatever is done to variables within the context is done."""
        if self._now is None:
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        made = graph.get_operations()[before:]
        self.after(phase, [each for each in made if any(part.dtype == tf.resource for part in each.inputs)])

    def longest(self, phase: str, spans: Sequence[tf.Tensor]) -> None:
        """Counts the longest of some spans of time, each taken by `noted` on one device, in seconds."""
        if self._now is not None:
            self._counted.append((COLUMNS.index(phase), tf.reduce_max(tf.stack(spans))))

    def crossed(self, sizes: Callable[[], Mapping[str, Any]]) -> None:
        """Counts bytes, by the names of `TRAFFIC`."""
        if self._now is not None:
            self._counted += [(COLUMNS.index(name), tf.cast(size, tf.float64)) for name, size in sizes().items()]

    def totals(self) -> list[tf.Tensor]:
        """Seconds of each phase and bytes, float64 of shape (len(COLUMNS),); an empty list when nothing is noted."""
        if self._now is None:
            return []
        columns, values = zip(*self._counted, strict=True)
        return [tf.math.unsorted_segment_sum(tf.stack(values), tf.constant(columns), len(COLUMNS))]


class Turns:
    """How long of each worker's wait the ps were busy with updates that it waited for.

    A worker that has handed in a gradient waits for all updates that are ordered before it is given its next step. Its
    wait begins before the chief hears of it and ends after they have been made, so that they lie within it: the time of
    one is what the slowest ps needed for its part of it, from the order's arrival.
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._ordered: deque[frozenset[int]] = deque()
        self._seconds: dict[int, float] = {}

    def wait(self, worker: int) -> None:
        """A worker waits from now on."""
        self._waiting.add(worker)
        self._seconds[worker] = 0.0

    def order(self) -> None:
        """An update is ordered, which those who wait now wait for."""
        self._ordered.append(frozenset(self._waiting))

    def go(self, worker: int) -> None:
        """A worker has been given its next step, which it gets when what is ordered has been made."""
        self._waiting.discard(worker)

    def made(self, counted: np.ndarray) -> None:
        """The next one of the ordered updates has been made.

        Args:
            counted: as `Watch.totals` has it, of the function that made it; shape (0,) where nothing is watched.
        """
        for worker in self._ordered.popleft():
            self._seconds[worker] += float(counted[COLUMNS.index("update")]) if counted.size else 0.0

    def add(self, worker: int, counted: np.ndarray, totals: dict[str, Any]) -> None:
        """Adds what a worker counted in a step to the totals of its task, the updates in its wait as such.

        Args:
            worker: its number.
            counted: as `Watch.totals` has it, shape (len(COLUMNS),), or (0,) where nothing is watched.
            totals: the sums so far, `{"worker:0": ...}`.
        """
        if not counted.size:
            return
        task = f"worker:{worker}"
        totals[task] = totals.get(task, 0.0) + within_wait(counted, self._seconds.pop(worker, 0.0))


def within_wait(counted: np.ndarray, seconds: float) -> np.ndarray:
    """What a worker counted, with the seconds of updates that lie within its wait as such."""
    updates = np.zeros(len(COLUMNS))
    updates[[COLUMNS.index("wait"), COLUMNS.index("update")]] = -seconds, seconds
    return counted + updates


def told(totals: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """What each task counted, by the names of the columns."""
    return {task: dict(zip(COLUMNS, map(float, counted), strict=True)) for task, counted in sorted(totals.items())}


def noted(*what: Any) -> tf.Tensor:
    """The time when all of `what`, tensors and operations, is there, by the clock of the device: seconds, float64."""
    return _time([end for end in tf.nest.flatten(what) if end is not None])


def _time(ends: list[Any]) -> tf.Tensor:
    with tf.control_dependencies(ends):
        return unordered(tf.timestamp())
