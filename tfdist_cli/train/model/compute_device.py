"""Where the workers of parameter servers compute: on their GPUs, where they have some.

TensorFlow runs a worker's function on the worker's CPU, unless its operations name another device. In such a function
"GPU:0" is the first GPU of the worker that runs it; a worker without one takes its CPU instead.
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
"""A context in which operations are given a device; `nullcontext` leaves them where they are."""


def on_gpu() -> AbstractContextManager[Any]:
    """Within it, operations of a worker's function go to the worker's first GPU."""
    return tf.device("/device:GPU:0")


def device_scope_of_workers() -> DeviceScope:
    """Where the workers that this process coordinates compute; warns of GPUs that stay idle."""
    gpus = _gpus_of_workers()
    several = {worker: count for worker, count in gpus.items() if count > 1}
    if several:
        worker, count = next(iter(several.items()))
        log.warning(
            "%s sees %d GPUs and computes on the first of them: start a worker for each GPU (roles.worker.replicas)",
            worker,
            count,
        )
    return on_gpu if gpus else nullcontext


def _gpus_of_workers() -> Counter[str]:
    devices = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices("GPU")]
    return Counter(f"{device.job}:{device.task}" for device in devices if device.job in _WORKERS)
