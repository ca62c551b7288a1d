"""Free addresses that no other process gets, also while many tests run side by side."""

from contextlib import ExitStack

from tfdist_cli.launch.process.ports import hold_addresses
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.task_id import TaskId

_held = ExitStack()
_TASK = TaskId("worker", 0)


def free_address():
    """Returns an address of this machine, whose port is reserved for a server until this process exits."""
    return _held.enter_context(hold_addresses({_TASK: Address(LOOPBACK, 0)}))[_TASK]
