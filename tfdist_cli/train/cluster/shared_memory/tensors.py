"""Sends tensors between workers and ps of one host: operations write them to buffers, and read them there.

What crosses between the tasks is a message with the place of the buffer. If a worker cannot read the ps's memory, or
the ps the worker's, or if there is no memory for a buffer, the message is the data itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.buffers import MESSAGE_BYTES, BufferReader, Buffers
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES, SWITCH, OthersMemory
from tfdist_cli.train.tf_compat.data import call_registered, register_python

_IDENTITY, _MEET, _ADMIT, _SETTLE = "buffers_identity", "buffers_meet", "buffers_admit", "buffers_settle"
_SEND, _RECEIVE = "buffers_send", "buffers_receive"
_ALL_PS = -1
"""In the place of a worker's index: all ps, for a worker."""


class _Process:
    """What a process sends in, and reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: Buffers | None = None
        self._unsupported = False
        self._reader = BufferReader()
        self._admitted: dict[int, bool] = {}
        """Whether each worker, and this ps, can read each other's memory. On a worker: whether it and all ps can."""
        self._sends = False

    def register(self) -> None:
        """Lets operations of this process call these functions."""
        register_python(_IDENTITY, self._identity)
        register_python(_MEET, self._meet)
        register_python(_ADMIT, self._admit)
        register_python(_SETTLE, self._settle)
        register_python(_SEND, self._send)
        register_python(_RECEIVE, self._receive)

    def _identity(self, _: np.ndarray) -> np.ndarray:
        own = self._own()
        return np.frombuffer(own.identity if own else bytes(IDENTITY_BYTES), np.uint8)

    def _own(self) -> Buffers | None:
        with self._lock:
            if self._buffers is None and not self._unsupported:
                try:
                    self._buffers = Buffers()
                except (AttributeError, OSError):
                    self._unsupported = True  # macOS has no memfd_create
            return self._buffers

    def _meet(self, identity: np.ndarray) -> np.ndarray:
        return np.array(self._reader.meet(identity.tobytes()))

    def _admit(self, worker: np.ndarray, identity: np.ndarray, can_read: np.ndarray) -> np.ndarray:
        return self._decide(int(worker), shared=bool(can_read) and self._reader.meet(identity.tobytes()))

    def _settle(self, answers: np.ndarray) -> np.ndarray:
        return self._decide(_ALL_PS, shared=bool(answers.all()))

    def _decide(self, other: int, *, shared: bool) -> np.ndarray:
        with self._lock:
            self._admitted[other] = shared
            self._sends = all(self._admitted.values())
        return np.array(shared)

    def _send(self, values: np.ndarray, _number: np.ndarray) -> np.ndarray:
        self._reader.let_go()
        data = values.reshape(-1).view(np.uint8)
        if self._buffers is not None and self._sends:
            try:
                return np.frombuffer(self._buffers.write(data), np.uint8)
            except OSError:
                pass  # there is no memory or no descriptor for a buffer: the data is the message
        return data

    def _receive(self, message: np.ndarray, kind: np.ndarray) -> np.ndarray:
        data = self._reader.read(message.tobytes()) if len(message) == MESSAGE_BYTES else message
        return data.view(_numpy_type(int(kind)))


_numpy_type = cache(lambda kind: np.dtype(tf.as_dtype(kind).as_numpy_dtype))


_process = _Process()


def register() -> None:
    """Lets this task send and receive tensors in buffers."""
    _process.register()


def meeting(worker: int, devices: Sequence[str]) -> Callable[[], tf.Tensor]:
    """Returns a function for a worker: it and each ps open each other's memory. It returns whether all of them can.

    The function has to run on each worker before it sends or receives, and again if its process is another one. A ps
    sends in buffers as long as all workers can read them.

    Args:
        worker: the index of the worker.
        devices: those of the ps.
    """

    def meet() -> tf.Tensor:
        own = _called(_IDENTITY, [tf.constant(0)], tf.uint8)
        answers = []
        for device in devices:
            with tf.device(device):
                theirs = _called(_IDENTITY, [tf.constant(0)], tf.uint8)
            can_read = _called(_MEET, [theirs], tf.bool)
            with tf.device(device):
                answers.append(tf.reshape(_called(_ADMIT, [tf.constant(worker), own, can_read], tf.bool), []))
        return tf.reshape(_called(_SETTLE, [tf.stack(answers)], tf.bool), [])

    return tf.function(meet, autograph=False)


def opens_memory(devices: Sequence[str]) -> bool:
    """Whether this task can open the memory of other tasks.

    Args:
        devices: theirs.
    """
    if os.environ.get(SWITCH) == "0":
        return False

    def ask() -> list[tf.Tensor]:
        identities = []
        for device in devices:
            with tf.device(device):
                identities.append(_called(_IDENTITY, [tf.constant(0)], tf.uint8))
        return identities

    identities = tf.function(ask, autograph=False).get_concrete_function()()
    return all(OthersMemory.opened(identity.numpy().tobytes()) for identity in identities)


def on_one_host(addresses: Sequence[str]) -> bool:
    """Whether addresses, `host:port`, have the same host; False for none."""
    return len({address.rpartition(":")[0] for address in addresses}) == 1


def send(values: tf.Tensor) -> tf.Tensor:
    """Writes a tensor to a buffer; returns the message about it.

    The calls of Python save nothing for tensors below about 1 MiB.

    Each message is for one reader, once: the buffer is free afterwards. So TensorFlow's graph optimizer may neither
    compute the message of a constant in advance, such as the zeros of a variable without a gradient, nor use one
    message for two equal tensors. A random number prevents both. A message that nobody receives is still left out.
    """
    number = tf.raw_ops.RandomUniformInt(shape=[1], minval=0, maxval=2, seed=1)
    (message,) = call_registered(_SEND, [values, number], [tf.uint8], stateless=True)
    return tf.ensure_shape(message, [None])


def receive(message: tf.Tensor, dtype: tf.DType, shape: Sequence[int]) -> tf.Tensor:
    """Returns a tensor that was sent, where it is.

    Args:
        message: what `send` returned, on the task that receives.
        dtype: the tensor's type.
        shape: its shape.
    """
    kind = tf.constant(dtype.as_datatype_enum, tf.int64)
    (values,) = call_registered(_RECEIVE, [message, kind], [dtype], stateless=True)
    return tf.reshape(values, shape)


def _called(name: str, arguments: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    return call_registered(name, arguments, [dtype])[0]
