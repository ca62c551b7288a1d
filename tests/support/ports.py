"""Free addresses that no other process gets, also while many tests run side by side."""

import os
from contextlib import ExitStack

from tfdist_cli.launch.process.ports import hold_addresses
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.task_id import TaskId

GIVEN_PORT = 2300 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The port in a cluster file of this process. Tests that run side by side launch such files at the same time."""
_held = ExitStack()
_TASK = TaskId("worker", 0)


def free_address():
    """Returns an address of this machine, whose port is reserved for a server until this process exits."""
    return _held.enter_context(hold_addresses({_TASK: Address(LOOPBACK, 0)}))[_TASK]
