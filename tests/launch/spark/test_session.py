"""Barrier stages in the SparkContext of a program, asked for by the launcher's driver."""

import json
import socket
import threading
from types import SimpleNamespace

from tfdist_cli.launch.slots.driver_errors import parse_error
from tfdist_cli.launch.spark import session


class Context:
    """A SparkContext whose stage lasts until it is cancelled, or fails."""

    def __init__(self, error=None):
        self.error, self.stage, self.groups = error, None, []
        self.began, self.cancelled = threading.Event(), threading.Event()

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


def ask(server):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(server.path))
    client.sendall(json.dumps({"launcher": ["h", 1], "secret": "s", "slots": 2}).encode() + b"\n")
    return client


def test_a_stage_is_cancelled_when_the_driver_ends():
    context = Context()
    with session.SessionServer(context) as server:
        client = ask(server)
        assert context.began.wait(10)
        client.close()
        assert context.cancelled.wait(10)
    assert context.stage == ([0, 1], 2)


def test_a_stage_is_cancelled_when_the_program_goes_on():
    context = Context()
    with session.SessionServer(context) as server:
        client = ask(server)
        assert context.began.wait(10)
    assert context.cancelled.wait(10)
    client.close()


def test_the_driver_learns_why_a_stage_has_failed():
    with session.SessionServer(Context(RuntimeError("[SPARK-24942] no"))) as server, ask(server).makefile() as answers:
        error = parse_error(answers.read())
    assert error.code == "dynamic-allocation"
    assert not server.path.exists()
