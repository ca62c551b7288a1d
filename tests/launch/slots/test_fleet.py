"""The slots of a launch, with applications that are subprocesses of this test."""

import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slots.application import Submission
from tfdist_cli.launch.slots.driver_errors import DriverError, error_line
from tfdist_cli.launch.slots.fleet import Fleet
from tfdist_cli.launch.ssh.frames import ConnectionEnded
from tfdist_cli.launch.ssh.link import HostLost
from tfdist_cli.spec.task_id import TaskId

TASKS = (TaskId("chief", 0), TaskId("worker", 0))
SLOTS = """
import os, sys, threading
from tfdist_cli.launch.slots.handshake import DRIVER, SECRET, Caller, connect
from tfdist_cli.launch.slots.slot import run_agent
host, _, port = sys.argv[1].rpartition(":")
control = connect((host, int(port)), os.environ[SECRET], Caller(DRIVER, host))
def run(slot):
    run_agent((host, int(port)), os.environ[SECRET], Caller(slot, host))
slots = [threading.Thread(target=run, args=(slot,)) for slot in range(2)]
for slot in slots:
    slot.start()
for slot in slots:
    slot.join()
"""


def fleet(program, timeout=30.0):
    def argv(launcher):
        return [sys.executable, "-c", textwrap.dedent(program), launcher]

    return Fleet(Submission("Toy", argv, "127.0.0.1", 2, timeout), TASKS)


@pytest.mark.slow
def test_another_application_replaces_a_lost_one():
    slots = fleet(SLOTS)
    try:
        slots.open()
        planned = [str(slots.addresses[task]) for task in TASKS]
        first = [slots.link(task) for task in TASKS]
        assert slots.translated({"TF_CONFIG": f"{planned}"}) == {"TF_CONFIG": f"{planned}"}
        first[0].kill()
        for link in first:  # without one slot, the others are lost, too
            with pytest.raises(ConnectionEnded):
                link.read()
        second = [slots.link(task) for task in TASKS]
        assert not set(first) & set(second)
        moved = slots.translated(planned)
        beside = [f"127.0.0.1:{slots.addresses[TASKS[0]].port + 1}", f"127.0.0.1:{int(moved[0][10:]) + 1}"]
        assert slots.translated(beside[0]) == beside[1]
        assert not set(moved) & set(planned)
        assert (
            slots.translated(f"x={planned[0]},{planned[1]} {planned[0]}0") == f"x={moved[0]},{moved[1]} {planned[0]}0"
        )
    finally:
        slots.close()


def refused(program, kind, code, timeout=30.0):
    slots = fleet(program, timeout)
    with raises(kind, code):
        slots.open()
    slots.close()


def test_the_driver_says_why_it_ends():
    line = error_line(DriverError("too few", "too-few-slots", "free some", usage=True))
    refused(f"print({line!r})", UsageError, "too-few-slots")
    refused("print('no such master')", HostLost, "application-ended")


def test_a_start_can_be_ended():
    slots = fleet("import time; print('up', flush=True); time.sleep(60)")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(slots.open)
        while slots._application is None:
            assert not opening.done()
        slots.stop_starting()
        with raises(HostLost, "application-ended"):
            opening.result(30)
    slots.close()


def test_slots_have_a_limited_time():
    refused("import time; time.sleep(60)", HostLost, "slots-not-started", timeout=0.1)


def test_slots_connect_to_an_address_of_this_machine():
    elsewhere = Fleet(Submission("Toy", lambda launcher: ["true"], "192.0.2.1", 2, 1.0), TASKS)
    with raises(UsageError, "no-own-address"):
        elsewhere.open()
