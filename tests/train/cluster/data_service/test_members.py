"""The data workers as the chief sees them: who may leave, who has left, and who is lost."""

import contextlib
import os
import queue
import socket
import sys

import pytest

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.data_service import members
from tfdist_cli.train.cluster.data_service.members import DataWorkers
from tfdist_cli.train.cluster.membership import GRANTED, JOIN, LEAVE, LEFT, Request

CHIEF, DISPATCHER = TaskId("chief"), TaskId("data_dispatcher")
FIRST, SECOND, THIRD = (TaskId("data_worker", index) for index in range(3))


class Server:
    """A port of a task, and the connection of the chief that watches it."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])

    def accept(self):
        self.connection = self._listener.accept()[0]
        self.connection.sendall(b"\0\0\0\4\0\0\0\0\0")

    def exit(self):
        self.connection.close()
        self._listener.close()


class Filter:
    """Stands in for the process between the chief and the dispatcher."""

    address = "unix:/filter"
    removed: list

    def __init__(self, dispatcher, lost):
        self.dispatcher, self.lost = dispatcher, lost
        Filter.removed = []

    def remove(self, address):
        Filter.removed.append(address)


@pytest.fixture
def told():
    return queue.Queue()


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(members, "_Filter", Filter)
    with contextlib.ExitStack() as stack:
        made = {task: Server() for task in (DISPATCHER, FIRST, SECOND)}
        for server in made.values():
            stack.callback(server.exit)
        yield made


@pytest.fixture
def workers(servers, told):
    workers = DataWorkers(CHIEF, {task: server.address for task, server in servers.items()}, told.put)
    workers.watch()
    for server in servers.values():
        server.accept()
    return workers


def ask(workers, servers, task, what):
    return workers.ask(Request(task, servers[task].address, what))


def silent(told):
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)
    return True


def test_one_that_has_left_is_not_lost_and_the_dispatcher_counts_no_longer_on_it(workers, servers, told):
    assert ask(workers, servers, SECOND, LEAVE) == GRANTED
    assert Filter.removed == [servers[SECOND].address]
    assert ask(workers, servers, SECOND, LEFT) == GRANTED
    servers[SECOND].exit()
    assert silent(told)


@pytest.mark.parametrize("asks", [(), (LEAVE,), (LEFT,)])
def test_one_that_exits_before_its_examples_are_read_is_lost(asks, workers, servers, told):
    for what in asks:
        ask(workers, servers, SECOND, what)
    servers[SECOND].exit()
    error = told.get(timeout=10)
    assert error.code == "task-lost"
    assert f"{SECOND} at {servers[SECOND].address}" in error.message


def test_the_last_one_stays(workers, servers):
    assert ask(workers, servers, FIRST, LEAVE) == GRANTED
    assert ask(workers, servers, FIRST, LEAVE) == GRANTED  # it asks again
    assert ask(workers, servers, SECOND, LEAVE).refusal.code == "last-worker"
    assert Filter.removed == [servers[FIRST].address] * 2


def test_one_that_joins_is_watched_and_lets_another_one_leave(workers, servers, told):
    ask(workers, servers, FIRST, LEAVE)
    servers[THIRD] = Server()
    assert ask(workers, servers, THIRD, JOIN) == GRANTED
    servers[THIRD].accept()
    assert ask(workers, servers, SECOND, LEAVE) == GRANTED
    assert silent(told)
    servers[THIRD].exit()
    assert told.get(timeout=10).code == "task-lost"


def test_one_that_is_back_is_watched_again(workers, servers, told):
    for what in (LEAVE, LEFT):
        ask(workers, servers, SECOND, what)
    servers[SECOND].exit()
    servers[SECOND] = Server()
    assert ask(workers, servers, SECOND, JOIN) == GRANTED
    servers[SECOND].accept()
    servers[SECOND].exit()
    assert told.get(timeout=10).code == "task-lost"


def test_readers_get_the_filter_in_place_of_the_dispatcher(workers):
    assert workers.dispatcher() == Filter.address


def test_the_process_of_the_filter_is_watched(told):
    """A reader without it would wait for the end of a pass."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        started = members._Filter(f"127.0.0.1:{nobody.getsockname()[1]}", told.put)
    assert started.address.startswith("unix:/")
    started._process.kill()
    assert told.get(timeout=30).code == "data-filter-lost"


def test_the_end_of_a_task_is_told_once():
    told = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = Address("127.0.0.1", listener.getsockname()[1])
        tasks = {FIRST: there, DISPATCHER: there}
        DataWorkers(CHIEF, tasks, told.put).watch()
        connections = [listener.accept()[0] for _ in range(2)]
        for connection in connections:
            connection.sendall(b"\0\0\0\4\0\0\0\0\0")
        assert told.empty()
    for connection in connections:
        connection.close()
    error = told.get(timeout=10)
    assert error.code == "task-lost"
    assert f" at {there} " in error.message
    assert "last checkpoint" in error.hint
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)


def test_a_program_of_ones_own_is_ended_with_the_reason(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    members.end_process(TrainingError("gone", code="task-lost", hint="start it"))
    sys.stderr.flush()
    assert capsys.readouterr().err == "error[task-lost]: gone\nhint: start it\n"
    assert codes == [1]
