"""Runs in each task of the barrier stage."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tfdist_cli.launch.slots.handshake import OPTIONS, Caller
from tfdist_cli.launch.slots.slot import run_agent


def run_slot(launcher: tuple[str, int], secret: str, partition: Iterator[int]) -> Iterator[int]:
    """Runs the agent of one slot. Spark starts all slots of the stage or none; the launcher waits until all connect.

    The slots do not synchronize through Spark: the first barrier starts a timer in the driver's Java process, which
    Spark 3.5 never stops, so that `spark-submit` does not exit.

    Args:
        launcher: the address of the launcher.
        secret: the run's secret.
        partition: the number of the slot alone.
    """
    from pyspark import BarrierTaskContext  # noqa: PLC0415 only Spark's Python has it

    os.environ.pop(OPTIONS, None)  # where the driver's Java process runs the slots, they have its environment
    context = BarrierTaskContext.get()
    slot = next(iter(partition))
    host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
    run_agent(launcher, secret, Caller(slot, host))
    return iter(())
