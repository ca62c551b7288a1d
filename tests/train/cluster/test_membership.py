"""Which workers may join a training and leave it: the state alone, then with sockets and threads."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress

import pytest

from tests.support.codes import raises
from tests.support.ports import free_address
from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.protocol.records import LEAVE_SIGNAL
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import handshake, membership
from tfdist_cli.train.cluster.handshake import GREETING, LATER, HandshakeListener
from tfdist_cli.train.cluster.membership import (
    GRANTED,
    JOIN,
    LEAVE,
    JoinListener,
    JoinRefused,
    Membership,
    Refusal,
    Request,
    SigtermReceived,
    hold,
    interrupted_by_sigterm,
    leave,
)
from tfdist_cli.train.cluster.rendezvous import gather_tasks, wait_until_exited

CHIEF = TaskId("chief")
WORKERS = [TaskId("worker", index) for index in range(6)]
PLACES = [Address("127.0.0.1", 5000 + index) for index in range(6)]
NO = Refusal("the rule needs all of them", code="not-elastic")
LONG = 20.0


class State(Membership):
    """Two workers of the start, and what was answered to requests that had to wait."""

    def __init__(self, most=4):
        super().__init__(dict(zip(WORKERS[:2], PLACES[:2], strict=True)), most)
        self.told = []
        self.answered = lambda request, answer: self.told.append((request, answer.refusal))


def asks(state, index, what=JOIN, place=None):
    request = Request(WORKERS[index], place or PLACES[index], what)
    return request, state.ask(request)


def code(answer):
    return answer.refusal.code


def test_a_worker_of_the_start_that_is_back_is_taken_at_once_and_another_one_at_its_index_is_not():
    state = State()
    assert asks(state, 1)[1] == GRANTED
    assert code(asks(state, 1, place=PLACES[5])[1]) == "task-exists"
    assert state.requests.empty()


def test_there_are_at_most_so_many():
    state = State(most=3)
    assert code(asks(state, 3)[1]) == "cluster-full"
    assert asks(state, 2)[1] is None


def test_a_new_worker_waits_for_a_training_that_takes_it():
    state = State()
    request, answer = asks(state, 3)  # in any order: there is no worker 2
    assert answer is None
    state.begin(None)
    assert state.requests.get_nowait() is request
    assert state.is_pending(request)
    state.grant(request)
    assert state.told == [(request, None)]
    assert list(state.members) == [*WORKERS[:2], WORKERS[3]]
    assert asks(state, 3)[1] == GRANTED


def test_a_worker_that_asks_again_is_prepared_for_anew():
    state = State()
    state.begin(None)
    first, _ = asks(state, 2)
    again, _ = asks(state, 2)  # of another process, before the end of the first one was noticed
    assert [state.requests.get_nowait(), state.requests.get_nowait()] == [first, again]
    assert (state.is_pending(first), state.is_pending(again)) == (False, True)
    state.withdraw(first)
    state.refuse(first, NO)
    assert state.is_pending(again)
    state.grant(again)
    assert state.told == [(first, NO), (again, None)]


def test_a_worker_that_gives_up_is_not_taken():
    state = State()
    state.begin(None)
    request, _ = asks(state, 2)
    state.withdraw(request)
    assert not state.is_pending(request)
    second, _ = asks(state, 3)
    assert asks(state, 3, LEAVE)[1] == GRANTED
    assert not state.is_pending(second)


def test_a_training_that_cannot_change_refuses_those_that_wait_and_those_that_come():
    state = State()
    request, _ = asks(state, 2)
    state.begin(NO)
    assert state.told == [(request, NO)]
    assert code(asks(state, 2)[1]) == code(asks(state, 1, LEAVE)[1]) == "not-elastic"
    assert asks(state, 0)[1] == GRANTED


def test_a_worker_leaves_at_once_while_no_training_runs_and_the_last_one_stays():
    state = State()
    assert asks(state, 1, LEAVE)[1] == GRANTED
    assert list(state.members) == WORKERS[:1]
    assert code(asks(state, 0, LEAVE)[1]) == "last-worker"


def test_a_worker_waits_for_a_training_that_starts_before_it_leaves():
    state = State()
    state.start()
    request, answer = asks(state, 1, LEAVE)
    assert answer is None
    state.begin(None)
    assert state.requests.get_nowait() is request


def test_a_worker_leaves_a_training_and_the_last_one_stays():
    state = State()
    state.begin(None)
    request, answer = asks(state, 1, LEAVE)
    assert answer is None
    state.grant(request)
    assert list(state.members) == WORKERS[:1]
    assert asks(state, 1, LEAVE)[1] == GRANTED, "it has left"
    assert code(asks(state, 0, LEAVE)[1]) == "last-worker"


def test_the_end_of_a_training_lets_go_who_leaves_and_keeps_who_joins_for_the_next_one():
    state = State()
    state.begin(None)
    first, (leaving, _), (joining, _) = state.requests, asks(state, 1, LEAVE), asks(state, 2)
    state.end()
    assert state.told == [(leaving, None)]
    assert list(state.members) == WORKERS[:1]
    assert [first.get_nowait() for _ in range(3)] == [leaving, joining, None]
    assert [state.is_pending(each) for each in (leaving, joining)] == [False, True]
    state.start()
    state.begin(None)
    assert state.requests.get_nowait() is joining
    assert state.requests.empty()


def test_the_last_worker_stays_at_the_end_of_a_training():
    state = State()
    state.begin(None)
    leaving, _ = asks(state, 1, LEAVE)
    first, _ = asks(state, 0, LEAVE)
    state.end()
    assert [(request, refusal and refusal.code) for request, refusal in state.told] == [
        (leaving, None),
        (first, "last-worker"),
    ]


def test_another_training_may_change_though_the_one_before_could_not():
    state = State()
    state.begin(NO)
    state.end()
    request, answer = asks(state, 2)
    assert answer is None
    state.begin(None)
    assert state.requests.get_nowait() is request
    assert state.requests.empty()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def listening():
    state = State()
    place = free_address()
    return state, place, JoinListener(CHIEF, place, state)


def grants(state):
    """Grants the next request."""
    request = state.requests.get(timeout=LONG)
    state.grant(request)
    return request


def test_a_worker_joins_and_hears_that_the_work_is_done(listening, pool):
    state, place, listener = listening
    state.begin(None)
    joined = threading.Event()
    held = pool.submit(hold, WORKERS[2], PLACES[2], place, joined.set)
    assert grants(state).address == PLACES[2]
    assert joined.wait(LONG)
    listener.announce_done()
    (connection,) = listener._held
    connection.shutdown(socket.SHUT_RDWR)  # as the end of the process does
    assert held.result(LONG) is True


def test_a_worker_leaves(listening, pool):
    state, place, _ = listening
    state.begin(None)
    left = pool.submit(leave, WORKERS[1], PLACES[1], place)
    assert grants(state).asks == LEAVE
    assert left.result(LONG) is True
    assert leave(WORKERS[0], PLACES[0], place) is False, "the last one"


def test_a_worker_leaves_by_itself_where_nobody_answers(listening):
    state, place, _ = listening
    state.begin(None)
    began = time.monotonic()
    assert leave(WORKERS[1], PLACES[1], place, timeout=0.2) is False
    assert leave(WORKERS[1], PLACES[1], free_address(), timeout=0.2) is False
    assert time.monotonic() - began < LONG / 2


def test_a_refused_worker_says_why(listening):
    _, place, _ = listening
    with raises(JoinRefused, "task-exists") as caught:
        hold(WORKERS[1], PLACES[4], place)
    assert str(PLACES[1]) in caught.value.message
    assert not caught.value.retry
    with raises(TrainingError, "task-rejected"):
        hold(TaskId("ps", 1), PLACES[4], place)


def test_strangers_are_rejected_and_the_training_goes_on(listening, pool, monkeypatch):
    state, place, _ = listening
    state.begin(None)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"", os.urandom(3000) + b"\n"):
        with socket.create_connection((place.host, place.port)) as stranger, suppress(OSError):
            stranger.sendall(sent)
    monkeypatch.setenv(RUN_SECRET, "a" * 32)
    proof = handshake._proof
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "_proof", lambda nonce, text: proof(nonce + b"other", text))
        with socket.create_connection((place.host, place.port)) as stranger:
            greeting = handshake.receive_greeting(stranger)
            text = json.dumps({"task": "worker:2", "tensorflow": "1", "sums": False, "asks": JOIN, "address": "a:1"})
            stranger.sendall(b"0" * 64 + b" " + text.encode() + b"\n")
            assert handshake.receive_line(stranger).startswith(b"no ")
    assert handshake.is_greeting(greeting)
    assert state.requests.empty()
    pool.submit(leave, WORKERS[1], PLACES[1], place)
    assert grants(state).task == WORKERS[1]


def test_an_address_that_is_none_is_dropped(listening):
    _, place, _ = listening
    with pytest.raises(OSError, match="closed the connection"):
        hold(WORKERS[2], "no:address:at all", place)


def test_a_worker_of_later_asks_again_until_the_chief_trains(pool):
    own, place = free_address(), free_address()
    state = State()
    listener = JoinListener(CHIEF, place, state)
    state.begin(None)
    with socket.create_server(("127.0.0.1", 0)) as serving:
        at = Address("127.0.0.1", serving.getsockname()[1])
        join = lambda joined: hold(WORKERS[2], PLACES[2], place, joined)  # noqa: E731
        early = pool.submit(wait_until_exited, WORKERS[2], own, LONG, join)
        gathering = pool.submit(gather_tasks, CHIEF, own, {WORKERS[0]: at}, LONG, {}, WORKERS[1:3])
        time.sleep(0.3)  # it is told `later` some times
        assert state.requests.empty()
        first = pool.submit(wait_until_exited, WORKERS[0], own, LONG)
        met = gathering.result(LONG)
    with socket.create_server(("127.0.0.1", own.port)) as server:  # as TensorFlow's, which speaks first
        accepted = []

        def greet():
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"\0\0\22\4")
                    accepted.append(connection)

        threading.Thread(target=greet, daemon=True).start()
        assert grants(state).task == WORKERS[2]
        assert not early.done()
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()
    met.close()
    assert first.result(LONG) is False
    listener.announce_done()
    for connection in list(listener._held):
        connection.shutdown(socket.SHUT_RDWR)
    assert early.result(LONG) is True


def test_a_worker_of_later_that_gets_no_answer_asks_again(pool):
    asked = threading.Event()
    join = lambda joined: (joined(), asked.set())[1] is None  # noqa: E731
    with socket.create_server(("127.0.0.1", 0)) as chief:
        at = Address("127.0.0.1", chief.getsockname()[1])
        early = pool.submit(wait_until_exited, WORKERS[2], at, LONG, join)
        connection, _ = chief.accept()
        connection.sendall(GREETING + b"0" * 32 + b"\n")
        assert connection.recv(4096)
        connection.close()  # as a chief whose tasks are all there
    with pytest.raises(NotDone):
        early.result(0.3)  # the chief's port is closed until TensorFlow opens it
    with socket.create_server((at.host, at.port)) as server:
        connection, _ = server.accept()
        connection.sendall(b"\0\0\22\4")
        assert asked.wait(LONG)
    connection.close()
    assert early.result(LONG) is True


def test_the_answer_later_is_for_tasks_that_may_come_later():
    with socket.create_server(("127.0.0.1", 0)) as server:
        handshakes = HandshakeListener(server, WORKERS[:1], WORKERS[1:2])
        with socket.create_connection(server.getsockname()) as connection:
            assert handshakes.identified(LONG) == []
            connection.sendall(handshake.hello_message(WORKERS[1], handshake.receive_greeting(connection)))
            assert handshakes.identified(LONG) == []
            assert handshake.receive_line(connection) == LATER
        handshakes.close()


def test_sigterm_interrupts_a_wait_once():
    def handler(*_):
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SigtermReceived), interrupted_by_sigterm():
            membership.end_by_sigterm()
        assert signal.getsignal(signal.SIGTERM) is handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with interrupted_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)  # all tasks get it
            with pytest.raises(SigtermReceived):
                os.kill(os.getpid(), LEAVE_SIGNAL)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(LEAVE_SIGNAL) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_interrupts_a_wait_like_sigterm_unless_it_is_ignored():
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(SigtermReceived) as raised, interrupted_by_sigterm():
            os.kill(os.getpid(), signal.SIGINT)
        assert raised.value.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):  # what it does when the task may not leave
            membership.end_by_sigterm(raised.value.number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupted_by_sigterm():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
