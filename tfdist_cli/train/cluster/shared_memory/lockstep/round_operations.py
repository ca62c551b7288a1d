"""Operations of `rounds`, which workers and ps call in functions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.rounds import (
    END,
    Aborted,
    PsRounds,
    WorkerRounds,
    arrays_of_no_use,
)
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import call_registered, register_python

_OPEN, _BEGIN, _PUBLISH, _COLLECT, _ABORT = (
    f"rounds_{name}" for name in ("open", "begin", "publish", "collect", "abort")
)
_JOIN, _AWAIT, _WRITE, _COMMIT = (f"rounds_{name}" for name in ("join", "await", "write", "commit"))


class _Process:
    """The runs that this process takes part in, by numbers of its own."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._of_ps: dict[bytes, PsRounds] = {}
        """By the identity of the board."""
        self._of_worker: dict[int, WorkerRounds] = {}
        """Without those whose run was found to be over."""
        self._lock = threading.Lock()

    def register(self) -> None:
        """Lets operations of this process call these functions."""
        register_python(_OPEN, self._open)
        register_python(_BEGIN, self._begin)
        register_python(_PUBLISH, self._publish)
        register_python(_COLLECT, self._collect)
        register_python(_ABORT, self._abort)
        register_python(_JOIN, self._join)
        register_python(_AWAIT, self._await)
        register_python(_WRITE, self._write)
        register_python(_COMMIT, self._commit)

    def _open(self, ps: np.ndarray, workers: np.ndarray, layout: np.ndarray) -> np.ndarray:
        rounds = PsRounds(int(ps), int(workers), Layout.unpacked(layout))
        with self._lock:
            self._of_ps = {key: each for key, each in self._of_ps.items() if not each.close_if_aborted()}
            self._of_ps[rounds.identity] = rounds
        return np.frombuffer(rounds.identity, np.uint8)

    def _ps_rounds(self, own: np.ndarray) -> PsRounds:
        found = self._of_ps.get(own.tobytes())
        if found is None:
            raise Aborted
        return found

    def _close(self, own: np.ndarray) -> None:
        with self._lock:
            self._of_ps.pop(own.tobytes()).close()

    def _begin(self, own: np.ndarray, all_ps: np.ndarray) -> np.ndarray:
        self._ps_rounds(own).begin([each.tobytes() for each in all_ps])
        return np.array(True)

    def _publish(self, own: np.ndarray, sequence: np.ndarray, kind: np.ndarray, *values: np.ndarray) -> np.ndarray:
        self._ps_rounds(own).publish(int(sequence), int(kind), values)
        if int(kind) == END:
            self._close(own)
        return sequence

    def _collect(self, own: np.ndarray, sequence: np.ndarray) -> list[np.ndarray]:
        reports, arrays = self._ps_rounds(own).collect(int(sequence))
        return [reports, *(array for each in arrays for array in each)]

    def _abort(self, own: np.ndarray) -> np.ndarray:
        with self._lock:
            rounds = self._of_ps.get(own.tobytes())
            if rounds:
                rounds.abort()
        return np.array(True)

    def _join(self, worker: np.ndarray, all_ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        with self._lock:
            self._drop_ended()
        rounds = WorkerRounds(int(worker), Layout.unpacked(layout), [each.tobytes() for each in all_ps])
        with self._lock:
            number = next(self._numbers)
            self._of_worker[number] = rounds
        return np.array(number)

    def _drop_ended(self) -> None:
        """Closes what a function that failed has left."""
        for number, rounds in list(self._of_worker.items()):
            if rounds.close_if_over():
                del self._of_worker[number]

    def _await(self, number: np.ndarray, sequence: np.ndarray, layout: np.ndarray) -> list[np.ndarray]:
        rounds = self._of_worker.get(int(number))
        if rounds is None:  # a function of a run that is over goes on
            return [np.array([int(sequence), END]), *arrays_of_no_use(Layout.unpacked(layout))]
        found, kind, arrays = rounds.await_round(int(sequence))
        if kind == END:
            with self._lock:
                self._of_worker.pop(int(number), None)
        return [np.array([found, kind]), *arrays]

    def _write(self, number: np.ndarray, sequence: np.ndarray, *gradients: np.ndarray) -> np.ndarray:
        rounds = self._of_worker.get(int(number))
        if rounds:
            rounds.write(int(sequence), gradients)
        return sequence

    def _commit(
        self, number: np.ndarray, sequence: np.ndarray, count: np.ndarray, report: np.ndarray, *arrays: np.ndarray
    ) -> np.ndarray:
        rounds = self._of_worker.get(int(number))
        if rounds:
            rounds.commit(int(sequence), report, arrays[: int(count)])
        return sequence


_process = _Process()


def register() -> None:
    """Lets this task take part in rounds."""
    _process.register()


class Rounds:
    """The operations of runs with the same arrays.

    Args:
        devices: the ps, the leader first.
        layout: the arrays.
    """

    def __init__(self, devices: Sequence[str], layout: Layout) -> None:
        self._devices, self._layout = devices, layout
        self._packed = layout.packed
        self.opened = tf.function(self._opened, autograph=False)
        self.aborted = tf.function(self._aborted, autograph=False)

    def _opened(self, workers: tf.Tensor) -> tf.Tensor:
        """Opens a run on each ps; returns the identities of their boards, uint8, shape (ps, bytes)."""
        return self._layout.opened_on(self._devices, _OPEN, workers)

    def _aborted(self, ps: tf.Tensor) -> None:
        """Aborts a run on each ps."""
        for number, device in enumerate(self._devices):
            with tf.device(device):
                unordered(call_registered(_ABORT, [ps[number]], [tf.bool]))

    def begin(self, number: int, ps: tf.Tensor) -> Any:
        """Begins a run on a ps; called on it.

        Args:
            number: of the ps.
            ps: what `opened` returned.
        """
        return unordered(call_registered(_BEGIN, [ps[number], ps], [tf.bool]))[0]

    def publish(self, number: int, ps: tf.Tensor, sequence: tf.Tensor, kind: tf.Tensor, values: Sequence[Any]) -> Any:
        """Lets a round begin on a ps with new values; called on it. Returns the sequence number, when it is done."""
        (done,) = unordered(call_registered(_PUBLISH, [ps[number], sequence, kind, *values], [tf.int64]))
        return tf.ensure_shape(done, [])

    def collect(
        self, number: int, ps: tf.Tensor, sequence: tf.Tensor, workers: int
    ) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
        """Waits on a ps for what all workers commit for a round; called on it.

        Returns:
            The reports, float64, shape (workers, numbers), on the leader; and each worker's arrays.
        """
        own = self._layout.others[number]
        types = [array.dtype for array in own] * workers
        reports, *arrays = unordered(call_registered(_COLLECT, [ps[number], sequence], [tf.float64, *types]))
        arrays = [tf.ensure_shape(each, [array.size]) for each, array in zip(arrays, [*own] * workers, strict=True)]
        reports = tf.ensure_shape(reports, [workers, self._layout.report.size])
        return reports, [arrays[worker * len(own) : (worker + 1) * len(own)] for worker in range(workers)]

    def join(self, worker: tf.Tensor, ps: tf.Tensor) -> tf.Tensor:
        """Lets a worker take part in a run; returns its number there."""
        (number,) = unordered(call_registered(_JOIN, [worker, ps, self._packed], [tf.int64]))
        return tf.ensure_shape(number, [])

    def await_round(self, number: tf.Tensor, sequence: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Waits on a worker until a round may begin.

        Returns:
            The sequence number and the kind, int64, shape (2,); and the arrays of all ps.
        """
        all_arrays = [array for own in self._layout.values for array in own]
        types = [array.dtype for array in all_arrays]
        token, *values = unordered(call_registered(_AWAIT, [number, sequence, self._packed], [tf.int64, *types]))
        shaped = [tf.ensure_shape(each, [array.size]) for each, array in zip(values, all_arrays, strict=True)]
        return tf.ensure_shape(token, [2]), shaped

    def write(self, number: tf.Tensor, sequence: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Writes a worker's gradients, those for the leader first; returns the sequence number, when it is done."""
        (done,) = unordered(call_registered(_WRITE, [number, sequence, *gradients], [tf.int64]))
        return tf.ensure_shape(done, [])

    def commit(
        self,
        number: tf.Tensor,
        sequence: tf.Tensor,
        report: tf.Tensor,
        gradients: Sequence[tf.Tensor],
        used: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Commits a worker's gradients, unless they are written already; returns what `write` does.

        Args:
            number: what `join` returned.
            sequence: the sequence number of the round.
            report: what the leader gets besides.
            gradients: those for the leader first.
            used: what `await_round` returned, which is referred to until then. TensorFlow takes a part of such an array
                for a buffer of its own. A kernel would write its result there, which other workers would read, if
                nothing else referred to the array any more.
        """
        arguments = [number, sequence, tf.constant(len(gradients)), report, *gradients, *used]
        (done,) = unordered(call_registered(_COMMIT, arguments, [tf.int64]))
        return tf.ensure_shape(done, [])
