"""Operations of `exchanges`, which workers and ps call in functions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.exchanges import (
    NUMBERS_OF_ANSWER,
    NotAnswered,
    PsExchanges,
    Wanted,
    WorkerExchange,
)
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import call_registered, register_python

_OPEN, _TAKE, _ANSWER, _END, _ABORT, _CLOSE = (
    f"exchanges_{name}" for name in ("open", "take", "answer", "end", "abort", "close")
)
_BORROW, _REQUEST, _AWAIT, _GIVE_BACK = (f"exchanges_{name}" for name in ("borrow", "request", "await", "give_back"))


class _Process:
    """The exchanges that this process takes part in."""

    def __init__(self) -> None:
        self._of_ps: dict[bytes, PsExchanges] = {}
        """By their identities."""
        self._numbers = count(1)
        self._of_worker: dict[int, tuple[bytes, WorkerExchange]] = {}
        """Those that functions use now, by numbers of their own, with the identities of the ps."""
        self._free: dict[bytes, list[WorkerExchange]] = {}
        """The others, by the identities of the ps."""
        self._lock = threading.Lock()

    def register(self) -> None:
        """Lets operations of this process call these functions."""
        register_python(_OPEN, self._open)
        register_python(_TAKE, self._take)
        register_python(_ANSWER, self._answer)
        register_python(_END, self._end)
        register_python(_ABORT, self._abort)
        register_python(_CLOSE, self._close)
        register_python(_BORROW, self._borrow)
        register_python(_REQUEST, self._request)
        register_python(_AWAIT, self._await)
        register_python(_GIVE_BACK, self._give_back)

    def _open(self, ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        exchanges = PsExchanges(int(ps), Layout.unpacked(layout))
        with self._lock:
            self._of_ps = {key: each for key, each in self._of_ps.items() if not each.is_closed}
            self._of_ps[exchanges.identity] = exchanges
        return np.frombuffer(exchanges.identity, np.uint8)

    def _take(self, own: np.ndarray) -> list[np.ndarray]:
        request = self._of_ps[own.tobytes()].take()
        return [np.array(int(request.wanted)), request.report, *request.gradients]

    def _answer(self, own: np.ndarray, numbers: np.ndarray, *values: np.ndarray) -> np.ndarray:
        self._of_ps[own.tobytes()].answer(numbers.tolist(), values)
        return np.array(True)

    def _end(self, own: np.ndarray) -> np.ndarray:
        self._of_ps[own.tobytes()].end(closes=False)
        return np.array(True)

    def _abort(self, own: np.ndarray) -> np.ndarray:
        exchanges = self._of_ps.get(own.tobytes())
        if exchanges:
            exchanges.end(closes=True)
        return np.array(True)

    def _close(self, own: np.ndarray) -> np.ndarray:
        exchanges = self._of_ps.get(own.tobytes())
        if exchanges:
            exchanges.close()
        return np.array(True)

    def _borrow(self, all_ps: np.ndarray, layout: np.ndarray) -> np.ndarray:
        key = all_ps.tobytes()
        with self._lock:
            self._drop_ended()
            free = self._free.setdefault(key, [])
            exchange = free.pop() if free else None
        exchange = exchange or WorkerExchange(Layout.unpacked(layout), [each.tobytes() for each in all_ps])
        with self._lock:
            number = next(self._numbers)
            self._of_worker[number] = key, exchange
        return np.array(number)

    def _request(self, number: np.ndarray, wanted: np.ndarray, report: np.ndarray, *gradients: np.ndarray) -> Any:
        self._exchange(number).request(Wanted(int(wanted)), report, gradients)
        return number

    def _await(self, number: np.ndarray) -> list[np.ndarray]:
        numbers, values = self._exchange(number).answer()
        return [np.array(numbers), *values]

    def _exchange(self, number: np.ndarray) -> WorkerExchange:
        found = self._of_worker.get(int(number))
        if found is None:
            raise NotAnswered("the training was aborted")
        return found[1]

    def _give_back(self, number: np.ndarray) -> np.ndarray:
        with self._lock:
            borrowed = self._of_worker.pop(int(number), None)
            if borrowed:
                key, exchange = borrowed
                self._free.setdefault(key, []).append(exchange)
        return number

    def _drop_ended(self) -> None:
        """Closes what has ended; a function that failed has not given back what it had borrowed."""
        for number, (_, exchange) in list(self._of_worker.items()):
            if exchange.close_if_ended():
                del self._of_worker[number]
        for key, free in list(self._free.items()):
            self._free[key] = [exchange for exchange in free if not exchange.close_if_ended()]
            if not self._free[key]:
                del self._free[key]


_process = _Process()


def register() -> None:
    """Lets this task take part in exchanges."""
    _process.register()


_opened: list[tuple[weakref.ref[Exchanges], Callable[[], None]]] = []
"""All exchanges, each with a function that closes them."""


def close_unused() -> None:
    """Lets ps and workers free the memory of exchanges that are not used any more, since their model is gone.

    It is called now and then by the thread that uses TensorFlow: a finalizer may run in any thread at any time.
    """
    for entry in list(_opened):
        used, close = entry
        if used() is None:
            _opened.remove(entry)
            close()


def _on_each_ps(name: str, devices: Sequence[str], ps: np.ndarray) -> Any:
    """Returns a function that calls an operation of the exchanges on each ps."""

    def call() -> None:
        for own, device in zip(ps, devices, strict=True):
            with tf.device(device):
                unordered(call_registered(name, [own], [tf.bool]))

    return tf.function(call, autograph=False).get_concrete_function()


def _close(devices: Sequence[str], ps: np.ndarray) -> None:
    _on_each_ps(_CLOSE, devices, ps)()


class Exchanges:
    """The operations of exchanges with the same arrays, and the ps that take part.

    Args:
        devices: the ps, the leader first.
        layout: the arrays.
    """

    def __init__(self, devices: Sequence[str], layout: Layout) -> None:
        close_unused()
        self._layout = layout
        self._packed = layout.packed
        opened = tf.function(lambda: layout.opened_on(devices, _OPEN), autograph=False)
        self._ps = opened.get_concrete_function()().numpy()
        """The identities of all ps, uint8, shape (ps, bytes)."""
        # Called once or twice each: TensorFlow would warn of many functions that are traced and hardly called.
        self._on_each_ps = cache(partial(_on_each_ps, devices=devices, ps=self._ps))
        _opened.append((weakref.ref(self), partial(_close, devices, self._ps)))

    def end(self) -> None:
        """Ends what each ps waits for in `take`."""
        self._on_each_ps(_END)()

    def abort(self) -> None:
        """The same, and lets workers that wait know that there will be no answer."""
        self._on_each_ps(_ABORT)()

    def close(self) -> None:
        """Does so where no ps waits in `take`."""
        self._on_each_ps(_CLOSE)()

    def take(self, number: int) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Waits on a ps for the next request; called on it.

        Args:
            number: of the ps.

        Returns:
            What is wanted, int64, shape (); the worker's report, float64, shape (numbers,); and its gradients.
        """
        own = self._layout.gradients[number]
        types = [tf.int64, tf.float64, *(array.dtype for array in own)]
        wanted, report, *arrays = call_registered(_TAKE, [self._ps[number]], types)
        arrays = [tf.ensure_shape(each, [array.size]) for each, array in zip(arrays, own, strict=True)]
        return tf.ensure_shape(wanted, []), tf.ensure_shape(report, [self._layout.report.size]), arrays

    def answer(self, number: int, numbers: tf.Tensor, values: Sequence[tf.Tensor]) -> Any:
        """Answers the request that was taken; called on the ps. Returns an operation.

        Args:
            number: of the ps.
            numbers: for the worker, int64, shape (NUMBERS_OF_ANSWER,).
            values: the values of its variables.
        """
        return call_registered(_ANSWER, [self._ps[number], numbers, *values], [tf.bool])[0]

    def borrow(self) -> tf.Tensor:
        """Returns the number of a worker's exchange, which no other function uses until it is given back."""
        (number,) = unordered(call_registered(_BORROW, [self._ps, self._packed], [tf.int64]))
        return tf.ensure_shape(number, [])

    def request(self, number: tf.Tensor, wanted: Wanted, report: tf.Tensor, gradients: Sequence[tf.Tensor]) -> Any:
        """Sends a worker's request, those gradients for the leader first; returns the number, when it is sent."""
        arguments = [number, tf.constant(int(wanted), tf.int64), report, *gradients]
        (sent,) = unordered(call_registered(_REQUEST, arguments, [tf.int64]))
        return tf.ensure_shape(sent, [])

    def await_answer(self, number: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Waits on a worker for the answers to its request.

        Returns:
            The leader's numbers, int64, shape (NUMBERS_OF_ANSWER,); and the arrays of all ps.
        """
        arrays = [array for own in self._layout.values for array in own]
        types = [tf.int64, *(array.dtype for array in arrays)]
        numbers, *values = unordered(call_registered(_AWAIT, [number], types))
        shaped = [tf.ensure_shape(each, [array.size]) for each, array in zip(values, arrays, strict=True)]
        return tf.ensure_shape(numbers, [NUMBERS_OF_ANSWER]), shaped

    def give_back(self, number: tf.Tensor) -> tf.Tensor:
        """Gives a worker's exchange back; returns its number, when it is done."""
        (done,) = unordered(call_registered(_GIVE_BACK, [number], [tf.int64]))
        return tf.ensure_shape(done, [])
