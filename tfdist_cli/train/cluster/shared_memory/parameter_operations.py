"""Operations of `parameters`, which workers and ps call in functions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.parameters import PsParameters, UpdatesEnded, WorkerParameters
from tfdist_cli.train.cluster.shared_memory.stored import close_unused, close_with, flat, values_of
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import call_registered, register_python

_OPEN, _BEGIN, _PUBLISH, _READ, _WAIT, _STOP, _END, _CLOSE = (
    f"parameters_{name}" for name in ("open", "begin", "publish", "read", "wait", "stop", "end", "close")
)
_BORROW, _PLACES, _ACQUIRE, _RELEASE, _WRITE, _GIVE_BACK = (
    f"parameters_{name}" for name in ("borrow", "places", "acquire", "release", "write", "give_back")
)


class _Process:
    """The parameters that this process stores, or updates."""

    def __init__(self) -> None:
        self._of_ps: dict[bytes, PsParameters] = {}
        """By their identities."""
        self._numbers = count(1)
        self._of_worker: dict[int, tuple[bytes, WorkerParameters]] = {}
        """Those that functions use now, by numbers of their own, with the identities of the ps."""
        self._free: dict[bytes, list[WorkerParameters]] = {}
        """The others, by the identities of the ps."""
        self._lock = threading.Lock()

    def register(self) -> None:
        """Lets operations of this process call these functions."""
        register_python(_OPEN, self._open)
        register_python(_BEGIN, self._begin)
        register_python(_PUBLISH, self._publish)
        register_python(_READ, self._read)
        register_python(_WAIT, self._wait)
        register_python(_STOP, self._stop)
        register_python(_END, self._end)
        register_python(_CLOSE, self._close)
        register_python(_BORROW, self._borrow)
        register_python(_PLACES, self._places)
        register_python(_ACQUIRE, self._acquire)
        register_python(_RELEASE, self._release)
        register_python(_WRITE, self._write)
        register_python(_GIVE_BACK, self._give_back)

    def _open(self, ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        parameters = PsParameters(int(ps), Layout.unpacked(layout))
        with self._lock:
            self._of_ps = {key: each for key, each in self._of_ps.items() if not each.is_closed}
            self._of_ps[parameters.identity] = parameters
        return np.frombuffer(parameters.identity, np.uint8)

    def _begin(self, own: np.ndarray, updates: np.ndarray) -> np.ndarray:
        self._of_ps[own.tobytes()].begin(int(updates))
        return np.array(True)

    def _publish(self, own: np.ndarray, *values: np.ndarray) -> np.ndarray:
        self._of_ps[own.tobytes()].publish(values)
        return np.array(True)

    def _read(self, own: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
        updates, copies = self._of_ps[own.tobytes()].read(values)
        return [np.array(updates), *copies]

    def _wait(self, own: np.ndarray) -> np.ndarray:
        parameters = self._of_ps[own.tobytes()]
        parameters.wait()
        return np.array(True)

    def _stop(self, own: np.ndarray) -> np.ndarray:
        self._of_ps[own.tobytes()].stop()
        return np.array(True)

    def _end(self, own: np.ndarray) -> np.ndarray:
        self._of_ps[own.tobytes()].end()
        return np.array(True)

    def _close(self, own: np.ndarray) -> np.ndarray:
        parameters = self._of_ps.get(own.tobytes())
        if parameters:
            parameters.close()
        return np.array(True)

    def _borrow(self, all_ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        key = all_ps.tobytes()
        with self._lock:
            self._drop_ended()
            free = self._free.setdefault(key, [])
            parameters = free.pop() if free else None
        parameters = parameters or WorkerParameters(Layout.unpacked(layout), [each.tobytes() for each in all_ps])
        with self._lock:
            number = next(self._numbers)
            self._of_worker[number] = key, parameters
        return np.array(number)

    def _places(self, number: np.ndarray) -> list[np.ndarray]:
        return self._parameters(number).padded

    def _acquire(self, number: np.ndarray, ps: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return np.array(self._parameters(number).acquire(int(ps), counts=bool(counts)))

    def _release(self, number: np.ndarray, ps: np.ndarray) -> list[np.ndarray]:
        numbers, values = self._parameters(number).release(int(ps))
        return [np.array(numbers), *values]

    def _write(self, number: np.ndarray, index: np.ndarray, value: np.ndarray) -> np.ndarray:
        place = self._parameters(number).padded[int(index)]
        np.copyto(place[: value.size], value.reshape(-1))
        return number

    def _parameters(self, number: np.ndarray) -> WorkerParameters:
        found = self._of_worker.get(int(number))
        if found is None:
            raise UpdatesEnded("the training was aborted")
        return found[1]

    def _give_back(self, number: np.ndarray, *values: np.ndarray) -> np.ndarray:
        with self._lock:
            borrowed = self._of_worker.pop(int(number), None)
            if borrowed:
                key, parameters = borrowed
                parameters.check_places(values)
                self._free.setdefault(key, []).append(parameters)
        return number

    def _drop_ended(self) -> None:
        """Forgets what has ended; a function that failed has not given back what it had borrowed."""
        for number, (_, parameters) in list(self._of_worker.items()):
            if parameters.has_ended():
                del self._of_worker[number]
        for key, free in list(self._free.items()):
            self._free[key] = [each for each in free if not each.has_ended()]
            if not self._free[key]:
                del self._free[key]


_process = _Process()


def register() -> None:
    """Lets this task store parameters, or update them."""
    _process.register()


def _on_each_ps(name: str, devices: Sequence[str], ps: np.ndarray) -> Any:
    """Returns a function that calls an operation on each ps."""

    def call() -> None:
        for own, device in zip(ps, devices, strict=True):
            with tf.device(device):
                unordered(call_registered(name, [own], [tf.bool]))

    return tf.function(call, autograph=False).get_concrete_function()


def _close(devices: Sequence[str], ps: np.ndarray) -> None:
    _on_each_ps(_CLOSE, devices, ps)()


class SharedParameters:
    """The operations on parameters in shared memory, and the ps that store them.

    Args:
        devices: the ps, the leader first.
        layout: the arrays.
    """

    def __init__(self, devices: Sequence[str], layout: Layout) -> None:
        close_unused()
        self._devices, self._layout = list(devices), layout
        self._packed = layout.packed
        opened = tf.function(lambda: layout.opened_on(devices, _OPEN), autograph=False)
        self._ps = opened.get_concrete_function()().numpy()
        """The identities of all ps, uint8, shape (ps, bytes)."""
        # Called once or twice each: TensorFlow would warn of many functions that are traced and hardly called.
        self._on_each_ps = cache(partial(_on_each_ps, devices=devices, ps=self._ps))
        close_with(self, partial(_close, devices, self._ps))

    def stop(self) -> None:
        """Tells workers to take no more steps in this run."""
        self._on_each_ps(_STOP)()

    def end(self) -> None:
        """Ends what each ps waits for in `wait`."""
        self._on_each_ps(_END)()

    def close(self) -> None:
        """The same, and lets workers know that there are no more updates; also where no ps waits."""
        self._on_each_ps(_CLOSE)()

    def begin(self, number: int, updates: tf.Tensor) -> None:
        """Begins a run; called on a ps.

        Args:
            number: of the ps.
            updates: how many updates there were, int64, shape ().
        """
        call_registered(_BEGIN, [self._ps[number], updates], [tf.bool])

    def publish(self, number: int, variables: Sequence[Any]) -> None:
        """Writes to the memory of a ps what was assigned to its variables; called on it.

        Args:
            number: of the ps.
            variables: its parameters, then their slots.
        """
        call_registered(_PUBLISH, [self._ps[number], *values_of(variables)], [tf.bool])

    def read(self, number: int, variables: Sequence[Any]) -> tf.Tensor:
        """Does the same, and assigns copies of what is in the memory then to the variables; called on the ps.

        Args:
            number: see `publish`.
            variables: the same.

        Returns:
            How many updates there were, int64, shape ().
        """
        types = [each.dtype for each in variables]
        updates, *values = call_registered(_READ, [self._ps[number], *values_of(variables)], [tf.int64, *types])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.reshape(value, variable.shape), read_value=False)
        return tf.ensure_shape(updates, [])

    def wait(self, number: int) -> tf.Tensor:
        """Waits on a ps until the run ends; returns true."""
        return call_registered(_WAIT, [self._ps[number]], [tf.bool])[0]

    def borrow(self) -> tf.Tensor:
        """Returns the number of a worker's side, which no other function uses until it is given back."""
        (number,) = unordered(call_registered(_BORROW, [self._ps, self._packed], [tf.int64]))
        return tf.ensure_shape(number, [])

    def places(self, number: tf.Tensor) -> list[tf.Tensor]:
        """Returns on a worker where the variables of all ps are: flat tensors, each with some values behind it."""
        return unordered(call_registered(_PLACES, [number], [array.dtype for array in self._arrays]))

    @property
    def _arrays(self) -> list[Any]:
        return [
            array for ps in range(len(self._devices)) for array in (*self._layout.values[ps], *self._layout.others[ps])
        ]

    def acquire(self, number: tf.Tensor, ps: int, *, counts: bool) -> tf.Tensor:
        """Waits for the lock of a ps; returns how many updates there were before, int64, shape ()."""
        (before,) = unordered(call_registered(_ACQUIRE, [number, tf.constant(ps), tf.constant(counts)], [tf.int64]))
        return tf.ensure_shape(before, [])

    def release(self, number: tf.Tensor, ps: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Releases the lock of a ps.

        Returns:
            How many updates there are, and whether the worker is to take no more steps, int64, shape (2,); and the
            values of the parameters of this ps, flat.
        """
        arrays = self._layout.values[ps]
        types = [tf.int64, *(array.dtype for array in arrays)]
        numbers, *values = unordered(call_registered(_RELEASE, [number, tf.constant(ps)], types))
        shaped = [tf.ensure_shape(each, [array.size]) for each, array in zip(values, arrays, strict=True)]
        return tf.ensure_shape(numbers, [2]), shaped

    def write(self, number: tf.Tensor, index: int, value: tf.Tensor) -> tf.Tensor:
        """Writes a variable where it is."""
        (done,) = unordered(call_registered(_WRITE, [number, tf.constant(index), value], [tf.int64]))
        return done

    def give_back(self, number: tf.Tensor, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gives a worker's side back; returns its number, when it is done.

        Args:
            number: the number.
            values: of all variables as the worker sees them: an error if they are not those in the memory.
        """
        (done,) = unordered(call_registered(_GIVE_BACK, [number, *map(flat, values)], [tf.int64]))
        return tf.ensure_shape(done, [])
