"""Operations of steps that workers take together, which workers and ps call in functions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.lockstep.chief import ChiefSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import Aborted, PsSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.replicas import ReplicaSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import Watch, WorkerSteps
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES
from tfdist_cli.train.cluster.shared_memory.stored import values_of
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import call_registered, register_python
from tfdist_cli.train.tf_compat.functions import has_one_thread

_OPEN, _BEGIN, _CHECK, _READ, _ABORT = (f"steps_{name}" for name in ("open", "begin", "check", "read", "abort"))
_JOIN, _PLACES, _FIRST, _REPLAY, _WRITE, _LEAVE = (
    f"steps_{name}" for name in ("join", "places", "first", "replay", "write", "leave")
)
_ENTER, _TOKEN, _COPIES = (f"steps_{name}" for name in ("enter", "token", "copies"))
_ONE_THREAD = "steps_one_thread"
_COMMIT, _GRADIENTS, _MEET, _FINISH = (f"steps_{name}" for name in ("commit", "gradients", "meet", "finish"))


class _Process:
    """The memory that this process has, and that of others that it uses."""

    def __init__(self) -> None:
        self._of_ps: dict[bytes, PsSteps] = {}
        """By their identities."""
        self._numbers = count(1)
        self._of_worker: dict[int, tuple[tuple[int, bytes], WorkerSteps]] = {}
        """By numbers of their own, with the number of the worker and the identities of the ps."""
        self._lock = threading.Lock()

    def register(self) -> None:
        """Lets operations of this process call these functions."""
        register_python(_OPEN, self._open)
        register_python(_BEGIN, self._begin)
        register_python(_CHECK, self._check)
        register_python(_READ, self._read)
        register_python(_ABORT, self._abort)
        register_python(_JOIN, self._join)
        register_python(_PLACES, self._places)
        register_python(_FIRST, self._first)
        register_python(_REPLAY, self._replay)
        register_python(_ENTER, self._enter)
        register_python(_TOKEN, self._token)
        register_python(_COPIES, self._copies)
        register_python(_COMMIT, self._commit)
        register_python(_GRADIENTS, self._gradients)
        register_python(_MEET, self._meet)
        register_python(_FINISH, self._finish)
        register_python(_WRITE, self._write)
        register_python(_LEAVE, self._leave)
        register_python(_ONE_THREAD, lambda _: np.array(has_one_thread()))

    def _open(self, ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        steps = PsSteps(int(ps), StepLayout.unpacked(layout))
        with self._lock:
            self._of_ps[steps.identity] = steps
        return np.frombuffer(steps.identity, np.uint8)

    def _steps(self, own: np.ndarray) -> PsSteps:
        found = self._of_ps.get(own.tobytes())
        if found is None:
            raise Aborted
        return found

    def _begin(
        self, own: np.ndarray, first: np.ndarray, count: np.ndarray, allowed: np.ndarray, *variables: np.ndarray
    ) -> np.ndarray:
        self._steps(own).begin(int(first), int(count), int(allowed), variables)
        return first

    def _check(self, own: np.ndarray) -> np.ndarray:
        self._steps(own).check()
        return np.array(True)

    def _read(self, own: np.ndarray, *variables: np.ndarray) -> Sequence[np.ndarray]:
        return self._steps(own).read(variables)

    def _abort(self, own: np.ndarray) -> np.ndarray:
        with self._lock:
            steps = self._of_ps.pop(own.tobytes(), None)
        if steps:
            steps.abort()
        return np.array(True)

    def _join(self, worker: np.ndarray, all_ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        key = int(worker), all_ps.tobytes()
        with self._lock:
            for number, (_, steps) in list(self._of_worker.items()):
                if steps.is_over:
                    del self._of_worker[number]
            known = [number for number, (its_key, _) in self._of_worker.items() if its_key == key]
        if known:
            return np.array(known[0])
        steps = WorkerSteps(key[0], StepLayout.unpacked(layout), [each.tobytes() for each in all_ps])
        with self._lock:
            number = next(self._numbers)
            self._of_worker[number] = key, steps
        return np.array(number)

    def joined_by_replica(self, replica: int, layout: StepLayout, identity: bytes, have_ended: Watch) -> int:
        """See `Steps.join_as_replica`."""
        steps = ReplicaSteps(replica, layout, identity, have_ended)
        with self._lock:
            number = next(self._numbers)
            self._of_worker[number] = (replica, identity), steps
        return number

    def left_by_replica(self, number: int) -> None:
        """See `Steps.leave_as_replica`."""
        with self._lock:
            del self._of_worker[number]

    def _replica(self, number: np.ndarray) -> ReplicaSteps:
        return cast("ReplicaSteps", self._worker(number))

    def _enter(self, number: np.ndarray, count: np.ndarray, *variables: np.ndarray) -> np.ndarray:
        self._replica(number).enter(int(count), variables)
        return number

    def _token(self, number: np.ndarray) -> np.ndarray:
        return np.array(self._replica(number).token)

    def _copies(self, number: np.ndarray, *variables: np.ndarray) -> Sequence[np.ndarray]:
        return self._replica(number).read(variables)

    def _worker(self, number: np.ndarray) -> WorkerSteps:
        found = self._of_worker.get(int(number))
        if found is None:  # a function of a run that is over goes on
            raise Aborted
        return found[1]

    def _places(self, number: np.ndarray) -> list[np.ndarray]:
        return self._worker(number).places

    def _first(self, number: np.ndarray, first: np.ndarray) -> np.ndarray:
        return np.array(self._worker(number).begin(int(first)))

    def _replay(self, number: np.ndarray) -> list[np.ndarray]:
        updates, found, means = self._worker(number).replay()
        return [np.array([updates, found]), *means]

    def _commit(
        self, number: np.ndarray, sequence: np.ndarray, report: np.ndarray, *gradients: np.ndarray
    ) -> np.ndarray:
        self._worker(number).commit(int(sequence), report, gradients)
        return sequence

    def _gradients(self, number: np.ndarray, sequence: np.ndarray) -> list[np.ndarray]:
        count, means = self._worker(number).gradients(int(sequence))
        return [np.array(count), *means]

    def _meet(
        self, number: np.ndarray, sequence: np.ndarray, report: np.ndarray, *gradients: np.ndarray
    ) -> list[np.ndarray]:
        self._commit(number, sequence, report, *gradients)
        return self._gradients(number, sequence)

    def _finish(self, number: np.ndarray, sequence: np.ndarray) -> np.ndarray:
        return np.array(self._worker(number).finish(int(sequence)))

    def _write(self, number: np.ndarray, ps: np.ndarray, place: np.ndarray, value: np.ndarray) -> np.ndarray:
        self._worker(number).write(int(ps), int(place), value)
        return number

    def _leave(self, number: np.ndarray, *values: np.ndarray) -> np.ndarray:
        self._worker(number).check_places(values)
        return number


_process = _Process()


def register() -> None:
    """Lets this task take part in steps."""
    _process.register()


def runs_in_order() -> tf.Tensor:
    """Whether a worker, on which this is called, is to run operations of steps one after another, bool, shape ()."""
    return tf.reshape(call_registered(_ONE_THREAD, [tf.constant(0)], [tf.bool])[0], [])


@dataclass(frozen=True)
class Places:
    """Where a worker finds what is in the memory of a ps, flat tensors.

    Args:
        parameters: the parameters.
        state: the model's state.
        parts: the worker's part of the parameters without factors, and of each slot, with some values behind it; then
            that of each matrix.
    """

    parameters: list[tf.Tensor]
    state: list[tf.Tensor]
    parts: list[list[tf.Tensor]]


class Steps:
    """The operations of runs with the same arrays.

    Args:
        devices: the ps, the leader first.
        layout: the arrays.
    """

    def __init__(self, devices: Sequence[str], layout: StepLayout) -> None:
        self._devices, self._layout = list(devices), layout
        self._packed = layout.packed

    # Called once or twice each: TensorFlow would warn of functions that are traced for each training anew.

    def opened(self) -> tf.Tensor:
        """Opens the memory of each ps; returns their identities, uint8, shape (ps, bytes)."""

        def call() -> tf.Tensor:
            identities = []
            for number, device in enumerate(self._devices):
                with tf.device(device):
                    (own,) = call_registered(_OPEN, [tf.constant(number), self._packed], [tf.uint8])
                    identities.append(tf.ensure_shape(unordered(own), [IDENTITY_BYTES]))
            return tf.stack(identities)

        return tf.function(call, autograph=False).get_concrete_function()()

    def abort(self, ps: tf.Tensor) -> None:
        """Aborts the run on each ps, and closes the memory.

        Args:
            ps: what `opened` has returned.
        """
        self._call_on_each(ps, _ABORT)

    def check(self, ps: tf.Tensor) -> None:
        """Looks on each ps whether the run goes on.

        Args:
            ps: what `opened` has returned.

        Raises:
            tf.errors.OpError: a ps is lost, or the run was aborted.
        """
        self._call_on_each(ps, _CHECK)

    def _call_on_each(self, ps: tf.Tensor, function: str) -> None:
        def call() -> None:
            for number, device in enumerate(self._devices):
                with tf.device(device):
                    unordered(call_registered(function, [ps[number]], [tf.bool]))

        tf.function(call, autograph=False).get_concrete_function()()

    def of_chief(self, ps: tf.Tensor) -> ChiefSteps:
        """Opens the memory on the chief.

        Args:
            ps: what `opened` has returned.
        """
        return ChiefSteps(self._layout, [own.tobytes() for own in ps.numpy()])

    def begin(self, own: tf.Tensor, first: tf.Tensor, count: tf.Tensor, allowed: tf.Tensor, variables: Any) -> Any:
        """Begins a run on a ps, called on it; see `PsSteps.begin`. Returns the first sequence number, when it is done.

        Args:
            own: the identity of the ps.
            first: the sequence number of the first step, int64, shape ().
            count: how many updates there were, int64, shape ().
            allowed: the sequence number before which steps may be taken.
            variables: the parameters, their slots and the state that the ps stores.
        """
        arguments = [own, first, count, allowed, *values_of(variables)]
        (done,) = unordered(call_registered(_BEGIN, arguments, [tf.int64]))
        return tf.ensure_shape(done, [])

    def read(self, own: tf.Tensor, variables: Sequence[Any]) -> None:
        """Assigns copies of what is in the memory of a ps to its variables, called on it.

        Args:
            own: the identity of the ps.
            variables: see `begin`.
        """
        _assign_copies(_READ, own, variables)

    def join_as_replica(self, replica: int, identity: bytes, have_ended: Watch) -> int:
        """Lets this task take steps as a replica; see `ReplicaSteps`.

        Returns:
            Its number here.

        Raises:
            OSError: the memory cannot be opened here.
        """
        return _process.joined_by_replica(replica, self._layout, identity, have_ended)

    def leave_as_replica(self, number: int) -> None:
        """Frees the memory here; no function may use it any more.

        Args:
            number: of the replica.
        """
        _process.left_by_replica(number)

    def enter(self, number: int, count: tf.Tensor, variables: Sequence[Any]) -> None:
        """Begins a run of a replica, see `ReplicaSteps.enter`.

        Args:
            number: the replica's.
            count: how many updates there were, int64, shape ().
            variables: the parameters and their slots.
        """
        call_registered(_ENTER, [tf.constant(number, tf.int64), count, *values_of(variables)], [tf.int64])

    def token(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the sequence number of a replica's next step and its kind, int64, shape (2,)."""
        return tf.ensure_shape(unordered(call_registered(_TOKEN, [number], [tf.int64]))[0], [2])

    def copy_to(self, number: int, variables: Sequence[Any]) -> None:
        """Assigns copies of what is in the memory to a replica's variables."""
        _assign_copies(_COPIES, tf.constant(number, tf.int64), variables)

    def join(self, worker: tf.Tensor, ps: tf.Tensor) -> tf.Tensor:
        """Lets a worker take part in a run; returns its number there."""
        (number,) = unordered(call_registered(_JOIN, [worker, ps, self._packed], [tf.int64]))
        return tf.ensure_shape(number, [])

    def places(self, number: tf.Tensor) -> list[Places]:
        """Returns on a worker where it finds the arrays, for each ps."""
        arrays, copies = self._layout.arrays, range(1 + self._layout.slots)
        each = list(zip(arrays.values, arrays.others, strict=True))
        dtype = tf.as_dtype(self._layout.dtype)
        parts = [range(1 + len(self._layout.factors_on(ps))) for ps in range(len(each))]
        types = [
            kind
            for own_parts, (own, state) in zip(parts, each, strict=True)
            for kind in [*(array.dtype for array in (*own, *state)), *(dtype for _ in own_parts for _ in copies)]
        ]
        left = iter(unordered(call_registered(_PLACES, [number], types)))

        def shaped(arrays: Sequence[Array]) -> list[tf.Tensor]:
            return [tf.ensure_shape(next(left), [array.size]) for array in arrays]

        def part() -> list[tf.Tensor]:
            return [tf.ensure_shape(next(left), [None]) for _ in copies]

        return [
            Places(shaped(own), shaped(state), [part() for _ in own_parts])
            for own_parts, (own, state) in zip(parts, each, strict=True)
        ]

    def first_step(self, number: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        """Waits on a worker for its first step of a run, see `WorkerSteps.begin`.

        Returns:
            The sequence number and the kind, int64, shape (2,).
        """
        return tf.ensure_shape(unordered(call_registered(_FIRST, [number, first], [tf.int64]))[0], [2])

    def commit(
        self, number: tf.Tensor, sequence: tf.Tensor, report: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Commits a worker's gradients, see `WorkerSteps.commit`; returns the sequence number, when it is done."""
        (done,) = unordered(call_registered(_COMMIT, [number, sequence, report, *gradients], [tf.int64]))
        return tf.ensure_shape(done, [])

    def gradients(self, number: tf.Tensor, sequence: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Waits on a worker for all gradients, see `WorkerSteps.gradients`.

        Returns:
            How many updates there were, int64, shape (); and the means of gradients for each of `Places.parts`, flat.
        """
        return self._waited(call_registered(_GRADIENTS, [number, sequence], self._types))

    def meet(
        self, number: tf.Tensor, sequence: tf.Tensor, report: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Does what `commit` and `gradients` do, in one operation: to begin another one takes 50 µs."""
        arguments = [number, sequence, report, *gradients]
        return self._waited(call_registered(_MEET, arguments, self._types))

    def _waited(self, results: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        updates, *received = unordered(results)
        return tf.ensure_shape(updates, []), self._gradients(received)

    @property
    def _types(self) -> list[tf.DType]:
        """The types of what `WorkerSteps.gradients` returns."""
        count = len(self._devices) + 2 * len(self._layout.factors)
        return [tf.int64, *[tf.as_dtype(self._layout.dtype)] * count]

    def _gradients(self, received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The means of gradients that a worker has received, in the order of `Places.parts`."""
        means, factors = received[: len(self._devices)], iter(received[len(self._devices) :])
        found = []
        for ps, mean in enumerate(means):
            found.append(tf.ensure_shape(mean, [None]))
            for each in self._layout.factors_on(ps).values():
                first = tf.ensure_shape(next(factors), [each.examples_of_all, None])
                second = tf.ensure_shape(next(factors), [each.examples_of_all, each.columns])
                found.append(tf.reshape(tf.matmul(first, second, transpose_a=True), [-1]))
        return found

    def replay(self, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns on a worker an update that is to be made again, see `WorkerSteps.replay` and `gradients`."""
        numbers, *received = unordered(call_registered(_REPLAY, [number], self._types))
        updates, found = tf.unstack(tf.ensure_shape(numbers, [2]))
        return updates, found > 0, self._gradients(received)

    def finish(self, number: tf.Tensor, sequence: tf.Tensor) -> tf.Tensor:
        """Ends a step on a worker, see `WorkerSteps.finish`; returns what `first_step` does."""
        return tf.ensure_shape(unordered(call_registered(_FINISH, [number, sequence], [tf.int64]))[0], [2])

    def write(self, number: tf.Tensor, ps: int, place: int, value: tf.Tensor) -> tf.Tensor:
        """Writes a part of the parameters of a ps, or of a slot, see `WorkerSteps.places`."""
        arguments = [number, tf.constant(ps), tf.constant(place), value]
        return unordered(call_registered(_WRITE, arguments, [tf.int64]))[0]

    def leave(self, number: tf.Tensor, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Ends a worker's part in a run; returns its number, when it is done.

        Args:
            number: the number.
            values: of its parts, as the worker sees them: an error if they are not those in the memory.
        """
        (done,) = unordered(call_registered(_LEAVE, [number, *values], [tf.int64]))
        return tf.ensure_shape(done, [])


def _assign_copies(function: str, owner: tf.Tensor, variables: Sequence[Any]) -> None:
    types = [each.dtype for each in variables]
    values = call_registered(function, [owner, *values_of(variables)], types) if variables else []
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.reshape(value, variable.shape), read_value=False)
