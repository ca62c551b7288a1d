"""The device on which workers of a `ParameterServerStrategy` compute: their first GPU, if any worker has one.

TensorFlow runs the functions of a worker on its CPU unless their operations have another device. In such a function,
"GPU:0" is the first GPU of the worker that runs it. On a worker without a GPU, TensorFlow uses the CPU instead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.strategies import computes_gradients

_WORKERS = [role for role in ROLES if computes_gradients("parameter_server", role)]

log = logging.getLogger("tfdist")

DeviceScope = Callable[[], AbstractContextManager[Any]]
"""A context that places operations on a device; `nullcontext` does not change their device."""


def on_gpu() -> AbstractContextManager[Any]:
    """Within the context, the operations of a worker's function are placed on the worker's first GPU."""
    return tf.device("/device:GPU:0")


def worker_device_scope() -> DeviceScope:
    """Returns the device scope of the workers of this process's cluster; logs a warning about unused GPUs."""
    gpus = _gpus_of_workers()
    several = {worker: count for worker, count in gpus.items() if count > 1}
    if several:
        worker, count = next(iter(several.items()))
        log.warning(
            "%s has %d GPUs and uses the first one: start one worker per GPU (roles.worker.replicas)",
            worker,
            count,
        )
    return on_gpu if gpus else nullcontext


def _gpus_of_workers() -> Counter[str]:
    devices = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("GPU")]
    return Counter(f"{device.job}:{device.task}" for device in devices if device.job in _WORKERS)
