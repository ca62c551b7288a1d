"""The driver of the Spark application, which `spark-submit` runs: a barrier stage with an agent in each slot."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from functools import partial
from typing import Any

from tfdist_cli.launch.slots.driver_errors import DriverError, error_line, missing_package
from tfdist_cli.launch.slots.handshake import DRIVER, OPTIONS, SECRET, Caller, connect, exit_with
from tfdist_cli.launch.spark.barrier import run_slot

_TOO_FEW_SLOTS = "SPARK-24819"
_SHUT_DOWN = "SparkContext has been shutdown"
_DYNAMIC = "SPARK-24942"


def main() -> int:
    """Runs the stage until its agents have exited; returns the exit code."""
    address, slots = sys.argv[1], int(sys.argv[2])
    host, _, port = address.rpartition(":")
    launcher, secret = (host, int(port)), os.environ.pop(SECRET)
    options = json.loads(os.environ.pop(OPTIONS, "{}"))
    control = connect(launcher, secret, Caller(DRIVER, socket.gethostname()))
    # Spark's Java process exits with this one.
    threading.Thread(target=exit_with, args=(control,), daemon=True).start()
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 the launcher imports this module for its path

    context = SparkContext(conf=SparkConf().setAll(list(options.items())))
    try:
        stage = context.parallelize(range(slots), slots).barrier()
        stage.mapPartitions(partial(run_slot, launcher, secret)).collect()
    except Exception as error:  # noqa: BLE001 all are for the launcher
        sys.stdout.write(error_line(driver_error(error, slots)))
        sys.stdout.flush()
        return 1
    finally:
        context.stop()
    return 0


def driver_error(error: Any, slots: int) -> DriverError:
    """Returns what an exception of pyspark means for the launch."""
    java = getattr(error, "java_exception", None)
    message = str(java.getMessage() if java else error)
    if _TOO_FEW_SLOTS in message:
        return too_few_slots(slots)
    if _DYNAMIC in message:
        return DriverError(
            "its executors come and go (spark.dynamicAllocation.enabled), and barrier stages need fixed ones",
            "dynamic-allocation",
            "start the session with spark.dynamicAllocation.enabled=false",
            usage=True,
        )
    if missing := missing_package(
        message,
        "for the executors' Python",
        "install tfdist with all its packages there, or name the Python that has them: spark: {python: …}",
    ):
        return missing
    if _SHUT_DOWN in message:
        return DriverError(
            "its master does not answer, or has ended the application",
            "spark-unreachable",
            "check spark.master_url in the cluster file, and Spark's web page",
        )
    return DriverError(_summary(message), "slots-lost", "see the log of the executor in Spark's web page")


def too_few_slots(slots: int, found: int | None = None) -> DriverError:
    """Returns the error for an application that has not a slot for each task.

    Args:
        slots: the slots that the tasks need.
        found: the slots of the application, as far as they are known.
    """
    have = "" if found is None else f": it has {found} in all"
    return DriverError(
        f"it has not {slots} free slots, one for each task{have}",
        "too-few-slots",
        "lower the replicas or the cpus of roles, or give Spark more cores",
        usage=True,
    )


def _summary(message: str) -> str:
    """Returns the reason in a message of Spark: its first line, from the last cause that it names."""
    first: str = next(iter(message.strip().splitlines()), "")
    return first.rpartition("Most recent failure reason: ")[2]


if __name__ == "__main__":
    sys.exit(main())
