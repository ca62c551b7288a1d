"""Barrier stages in the SparkContext of a program, asked for by the launcher's driver."""

import json
import socket
import threading
from types import SimpleNamespace

from tfdist_cli.launch.slots.driver_errors import parse_error
from tfdist_cli.launch.spark import session


class Context:
    """A SparkContext whose stage lasts until it is cancelled, or fails.

    Args:
        error: the error of the stage.
        slots: the slots of the executors, as often as they are counted; the last one stays.
        dynamic: whether executors come and go.
    """

    def __init__(self, error=None, slots=(2,), dynamic="false"):
        self.error, self.stage, self.groups = error, None, []
        self.counted, (*self.slots, self.last) = threading.Event(), slots
        self.getConf = lambda: {"spark.dynamicAllocation.enabled": dynamic}
        self.began, self.cancelled = threading.Event(), threading.Event()

    def count(self):
        self.counted.set()
        return self.slots.pop(0) if self.slots else self.last

    def setJobGroup(self, group, description, interruptOnCancel):  # noqa: N802, N803
        self.groups.append(group)

    def cancelJobGroup(self, group):  # noqa: N802
        assert group in self.groups
        self.cancelled.set()

    def parallelize(self, numbers, parts):
        self.stage = (list(numbers), parts)
        rdd = SimpleNamespace(collect=self.collect)
        return SimpleNamespace(barrier=lambda: SimpleNamespace(mapPartitions=lambda function: rdd))

    def collect(self):
        if self.error:
            raise self.error
        self.began.set()
        assert self.cancelled.wait(10)


def ask(server, seconds=10):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(server.path))
    order = {"launcher": ["h", 1], "secret": "s", "slots": 2, "slots_seconds": seconds}
    client.sendall(json.dumps(order).encode() + b"\n")
    return client


def test_a_stage_is_cancelled_when_the_driver_ends():
    context = Context()
    with session.SessionServer(context, context.count) as server:
        client = ask(server)
        assert context.began.wait(10)
        client.close()
        assert context.cancelled.wait(10)
    assert context.stage == ([0, 1], 2)


def test_a_stage_is_cancelled_when_the_program_goes_on():
    context = Context()
    with session.SessionServer(context, context.count) as server:
        client = ask(server)
        assert context.began.wait(10)
    assert context.cancelled.wait(10)
    client.close()


def test_too_few_slots_start_no_stage():
    context = Context(slots=(1,))
    with session.SessionServer(context, context.count) as server, ask(server, seconds=0).makefile() as answers:
        error = parse_error(answers.read())
    assert (error.code, error.usage, context.stage) == ("too-few-slots", True, None)


def test_slots_that_come_later_are_used():
    context = Context(slots=(0, 2))
    with session.SessionServer(context, context.count) as server:
        client = ask(server)
        assert context.began.wait(10)
        client.close()
    assert context.stage == ([0, 1], 2)


def test_nobody_waits_for_slots_once_the_driver_has_ended():
    context = Context(slots=(0,))
    with session.SessionServer(context, context.count) as server:
        client = ask(server, seconds=1000)
        assert context.counted.wait(10)
        client.close()
        assert context.cancelled.wait(10)
    assert context.stage is None


def test_the_driver_learns_why_a_stage_has_failed():
    context = Context(RuntimeError("[SPARK-24942] no"), slots=(0,), dynamic="true")
    with session.SessionServer(context, context.count) as server, ask(server).makefile() as answers:
        error = parse_error(answers.read())
    assert error.code == "dynamic-allocation"
    assert not server.path.exists()
