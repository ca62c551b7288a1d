"""Room in a list of TensorFlow's, made before several threads use it.

A task keeps a list of the functions that it runs on other tasks (`EagerClusterFunctionLibraryRuntime`), and reads an
entry without the list's lock while it sends a request. When the list grows just then, its entries move, and the request
carries garbage: "Unable to parse request". The coordinator fetches results from all workers at once, by a function for
each worker and type that is put into the list at its first use. A list grows by doubling. So entries that do nothing
are put in first, one thread alone, until what comes later fits into the doubled list.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

_PER_DEVICE = 8
"""Entries of each device: more than twice those that were seen (3 for each worker)."""


def reserve_function_table(devices: Sequence[str]) -> None:
    """Lets this task's list of functions grow to hold some for each device.

    Args:
        devices: of other tasks.
    """
    size = 1
    while size < _PER_DEVICE * len(devices):
        size *= 2
    for _ in range(size // len(devices) + 1):  # more than `size` entries: from now on there is room for twice as many
        _nothing_on(devices)


def _nothing_on(devices: Sequence[str]) -> None:
    @tf.function(autograph=False)
    def nothing() -> None:
        for device in devices:
            with tf.device(device):
                tf.timestamp()  # has no effect, but TensorFlow does not leave it out

    nothing.get_concrete_function()()  # TensorFlow warns of functions that are traced at each call
