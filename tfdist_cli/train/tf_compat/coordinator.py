"""TensorFlow's coordinator after a function has failed.

There is one coordinator for a strategy. What failed in one training would be raised in the next one of the same
process (`ClusterCoordinator.join` raises it once). And a function that runs on several devices cancels the manager
that it was started with when it fails: all later functions of workers, which share it, are cancelled at their start.
Seen in TensorFlow 2.18 to 2.21.
"""

from __future__ import annotations

import logging
from typing import Any

from tensorflow.python.eager import cancellation

log = logging.getLogger("tfdist")


def clear_failure(coordinator: Any) -> None:
    """Waits until nothing is under way, and lets the coordinator go on after a function that failed.

    Args:
        coordinator: a `tf.distribute.coordinator.ClusterCoordinator`.
    """
    try:
        coordinator.join()
    except Exception as error:  # noqa: BLE001 whatever it is, it was raised where that training ran
        log.debug("an earlier training failed: %s", error)
    cluster = coordinator._cluster
    if cluster.resource_cancellation_mgr.is_cancelled:
        cluster.resource_cancellation_mgr = cancellation.CancellationManager()
