"""Runs in each task of the barrier stage."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tfdist_cli.launch.slots.handshake import OPTIONS, Caller
from tfdist_cli.launch.slots.slot import run_agent


def run_slot(launcher: tuple[str, int], secret: str, partition: Iterator[int]) -> Iterator[int]:
    """Runs the agent of one slot, once all slots of the stage are there.

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
    context.allGather(host)
    run_agent(launcher, secret, Caller(slot, host))
    return iter(())
