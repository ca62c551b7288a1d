"""The rendezvous of tasks, and detecting that the chief exits, with sockets and threads only."""

import hashlib
import hmac
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.codes import raises
from tests.support.ports import free_address
from tfdist_cli.errors import TimeoutExceeded, TrainingError
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.protocol.records import ENABLED
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import handshake, reachability, rendezvous
from tfdist_cli.train.cluster.handshake import HandshakeListener
from tfdist_cli.train.cluster.reachability import await_names, await_up, unreachable
from tfdist_cli.train.cluster.rendezvous import (
    RendezvousResult,
    announce_done,
    gather_tasks,
    report_to_chief,
    wait_until_exited,
)

CHIEF, PS, WORKER = TaskId("chief"), TaskId("ps", 0), TaskId("worker", 1)
LONG = 20.0
JSON = st.none() | st.integers() | st.text() | st.sampled_from(["ps:0", "worker:1", "1.15.0", True])


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


def serving():
    """A server as TensorFlow's: it takes connections, and speaks first."""
    return socket.create_server(("127.0.0.1", 0))


def at(server):
    return Address("127.0.0.1", server.getsockname()[1])


def test_servers_outlast_a_chief_that_gathers_them_however_soon_it_ends(pool):
    own = free_address()
    with serving() as ps, serving() as worker:
        waiting = [pool.submit(wait_until_exited, task, own, LONG) for task in (PS, WORKER)]
        met = gather_tasks(CHIEF, own, {PS: at(ps), WORKER: at(worker)}, LONG)
        assert len(met.lifelines) == 2
        assert not any(one.done() for one in waiting)
        met.close()  # as the end of the process does
        assert [one.result(LONG) for one in waiting] == [False, False]


def test_a_chief_says_that_its_work_is_done(pool):
    own = free_address()
    with serving() as ps, serving() as worker:
        waiting = [pool.submit(wait_until_exited, task, own, LONG) for task in (PS, WORKER)]
        met = gather_tasks(CHIEF, own, {PS: at(ps), WORKER: at(worker)}, LONG)
        met.lifelines[0].close()  # it has gone already, and is told nothing
        announce_done([lifeline.fileno() for lifeline in met.lifelines])
        met.close()
        assert sorted(one.result(LONG) for one in waiting) == [False, True]


def test_a_chief_waits_for_the_last_task(pool):
    own = free_address()
    with serving() as ps, serving() as worker:
        gathering = pool.submit(gather_tasks, CHIEF, own, {PS: at(ps), WORKER: at(worker)}, LONG)
        first = pool.submit(wait_until_exited, PS, own, LONG)
        with pytest.raises(NotYet):  # Python's own only from 3.11 on
            gathering.result(0.3)
        last = pool.submit(wait_until_exited, WORKER, own, LONG)
        gathering.result(LONG).close()
        first.result(LONG)
        last.result(LONG)


def test_tasks_with_equal_rights_go_on_together(pool):
    chief, own = free_address(), [free_address(), free_address()]
    members = [TaskId("worker", number) for number in range(3)]
    waiting = [
        pool.submit(report_to_chief, task, mine, (members[0], chief), LONG)
        for task, mine in zip(members[1:], own, strict=True)
    ]
    with ExitStack() as stack:
        for met in (
            gather_tasks(members[0], chief, dict(zip(members[1:], own, strict=True)), LONG),
            *(one.result(LONG) for one in waiting),
        ):
            stack.enter_context(closing(met))
            assert not met.links


def group_of(pool, count, *, without=()):
    """What the tasks of a group come to; some have none, as where there are GPUs."""
    group = {TaskId("worker", number): free_address() for number in range(count)}
    (first, chief), *rest = group.items()
    own = {task: {} if task in without else group for task in group}
    waiting = [pool.submit(report_to_chief, task, mine, (first, chief), LONG, own[task]) for task, mine in rest]
    gathered = gather_tasks(first, chief, dict(rest), LONG, own[first])
    return list(group), [gathered, *(one.result(LONG) for one in waiting)]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_tasks_of_a_circle_are_connected_with_one_another(count, pool):
    tasks, met = group_of(pool, count)
    with ExitStack() as stack:
        for one in met:
            stack.enter_context(closing(one))
        for task, one in zip(tasks, met, strict=True):
            assert set(one.links) == set(tasks) - {task}
            for other, link in one.links.items():
                link.sendall(f"{task} to {other}\n".encode())
        for task, one in zip(tasks, met, strict=True):
            for other, link in one.links.items():
                link.settimeout(LONG)
                assert handshake.receive_line(link) == f"{other} to {task}\n".encode()


@pytest.mark.parametrize("without", [0, 1, 2])
def test_where_one_has_no_circle_nobody_has(without, pool):
    _, met = group_of(pool, 3, without=[TaskId("worker", without)])
    for one in met:
        with closing(one):
            assert not one.links


def test_who_is_missing_is_named_with_the_reason():
    with serving() as ps:
        missing = free_address()
        with raises(TimeoutExceeded, "start-timeout") as raised:
            gather_tasks(CHIEF, free_address(), {PS: at(ps), WORKER: missing}, 0.3)
    assert raised.value.message.endswith(f" 0 s: worker:1 at {missing} (connection refused)")
    with pytest.raises(TimeoutExceeded, match="not resolved"):
        gather_tasks(CHIEF, free_address(), {PS: Address("no.such.host.invalid", 2222)}, 0.1)


def test_a_name_that_is_known_only_after_a_while_is_waited_for(monkeypatch, log):
    """That of a pod, for one."""
    asked = []

    def getaddrinfo(host, port, **_):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(reachability, "RETRY", 0.01)
    await_names({PS: Address("ps-0.job", 2222)}, LONG)
    assert asked == ["ps-0.job"] * 3
    await_names({PS: Address("ps-0.job", 2222)}, LONG)
    assert len(log) == 1, "only who waits says so"


@pytest.mark.parametrize("launched", [False, True])
def test_who_waits_for_a_task_says_so_unless_a_launcher_shows_it(launched, monkeypatch, log):
    monkeypatch.setenv(ENABLED, str(int(launched)))
    with serving() as ps:
        await_up({PS: at(ps)}, LONG)
        assert log == []
        missing = free_address()
        with raises(TimeoutExceeded, "start-timeout"):
            await_up({PS: at(ps), WORKER: missing}, 0.3)
    assert [str(missing) in line for line in log] == ([] if launched else [True])


def test_a_name_that_nobody_knows_is_told():
    with pytest.raises(TimeoutExceeded, match=r"(?m) ps:0 at no.such.host.invalid:2222 \(.*not resolved\)$"):
        await_names({PS: Address("no.such.host.invalid", 2222), WORKER: free_address()}, 0.1)


def test_a_chief_that_never_comes_is_named():
    chief = free_address()
    for wait in (
        lambda: wait_until_exited(PS, chief, 0.3),
        lambda: report_to_chief(WORKER, free_address(), (CHIEF, chief), 0.3),
    ):
        with pytest.raises(TimeoutExceeded, match=rf"chief:0 at {chief} \(connection refused\)"):
            wait()


@pytest.fixture
def tunnel(pool):
    """A tunnel's end, which takes connections whether a chief is behind it or not; what chiefs say, and who came."""
    words, taken, over = [], [], threading.Event()
    with serving() as listener:

        def forward():
            while not over.is_set():
                connection, address = listener.accept()
                taken.append(address)
                connection.sendall(words.pop() if words else b"")
                connection.close()

        forwarding = pool.submit(forward)
        yield at(listener), words, taken
        over.set()
        socket.create_connection(listener.getsockname()).close()
        forwarding.result(LONG)


def test_a_chief_that_never_comes_to_its_end_of_a_tunnel_is_named(tunnel):
    end_here, _, taken = tunnel
    with pytest.raises(TimeoutExceeded, match=rf"chief:0 at {end_here} \(no answer\)"):
        wait_until_exited(PS, end_here, 0.5)
    assert len(taken) < 20, "it is asked now and then, not all the time"


def test_a_server_ends_with_its_chief_though_the_tunnel_stays(tunnel):
    end_here, words, taken = tunnel
    words.append(b"\0\0\x18\4")
    wait_until_exited(PS, end_here, LONG)
    assert len(taken) == 2


def test_a_chief_that_ends_before_all_are_there_is_named(pool):
    chief, own = free_address(), free_address()
    waiting = pool.submit(report_to_chief, WORKER, own, (CHIEF, chief), LONG)
    with pytest.raises(TimeoutExceeded):
        gather_tasks(CHIEF, chief, {PS: free_address(), WORKER: own}, 0.5)
    with pytest.raises((TrainingError, TimeoutExceeded), match="chief:0"):
        waiting.result(LONG + 10)


def test_a_taken_port_is_named():
    with serving() as taken:
        for wait in (
            lambda: gather_tasks(CHIEF, at(taken), {}, LONG),
            lambda: report_to_chief(CHIEF, at(taken), (WORKER, free_address()), LONG),
        ):
            with raises(TrainingError, "port-in-use") as raised:
                wait()
            assert raised.value.message.startswith("chief:0 ")
            assert str(at(taken)) in raised.value.message


@pytest.mark.slow
def test_another_version_of_tensorflow_is_refused(pool, monkeypatch):
    own, said = free_address(), handshake.hello_message(WORKER, b"").partition(b" ")[2]
    theirs = json.dumps(json.loads(said) | {"tensorflow": "1.15.0"}).encode()
    with serving() as worker:
        gathering = pool.submit(gather_tasks, CHIEF, own, {WORKER: at(worker)}, 2.0)
        monkeypatch.setattr(rendezvous, "hello_message", lambda _, greeting, **__: line(greeting, theirs))
        waiting = pool.submit(wait_until_exited, WORKER, own, LONG)
        with raises(TrainingError, "task-rejected") as rejected:
            waiting.result(LONG)
        assert re.search(r"worker:1: .* '1\.15\.0'", rejected.value.message)
        with raises(TimeoutExceeded, "start-timeout") as missing:
            gathering.result(LONG)
        assert re.search(r"worker:1 at \S+ \(.*'1\.15\.0'", missing.value.message)


def line(greeting, text):
    """What one says that speaks the protocol, with the secret that this process has."""
    nonce = greeting.removeprefix(b"tfdist ").removesuffix(b"\n")
    return handshake._proof(nonce, text) + b" " + text + b"\n"


def hello(**fields):
    return json.dumps({"task": "ps:0", "tensorflow": handshake._tensorflow(), "sums": False} | fields).encode()


STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[]",
    b"{}",
    b"null",
    b"[" * 4000,
    b'{"task": 5}',
    b"\xff" * 5000,
    hello(task=5),
    hello(task="pilot:1"),
    hello(task="worker:7"),
    hello(tensorflow=2.21),
    hello(tensorflow="1.15.0"),
    hello(sums="yes"),
]


@pytest.mark.parametrize("proves", [False, True])
@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_are_sent_away(said, proves, pool):
    own = free_address()
    with serving() as ps:
        gathering = pool.submit(gather_tasks, CHIEF, own, {PS: at(ps)}, LONG)
        greeting = visit(own, lambda greeting: line(greeting, said) if proves else said + b"\n")
        assert handshake.is_greeting(greeting)
        waiting = pool.submit(wait_until_exited, PS, own, LONG)
        gathering.result(LONG).close()
        waiting.result(LONG)


def visit(address, answer):
    """A stranger's call at one that listens soon: says `answer` to its greeting, which it returns."""
    give_up = time.monotonic() + LONG
    while unreachable(address):
        assert time.monotonic() < give_up
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.settimeout(LONG)
        greeting = stranger.recv(100)
        with suppress(OSError):  # sent away already
            stranger.sendall(answer(greeting))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(100):
                pass
    return greeting


def test_a_stranger_without_the_secret_does_not_pass_for_a_task(pool, monkeypatch, caplog):
    """Else the task whose name it takes would be the one that is refused."""
    monkeypatch.setenv(RUN_SECRET, "the run's")
    addresses = {CHIEF: free_address(), WORKER: free_address()}
    own, stolen = addresses[CHIEF], hello(task="worker:1", sums=True)
    gathering = pool.submit(gather_tasks, CHIEF, own, {WORKER: addresses[WORKER]}, LONG, addresses)
    heard = []

    def forged(greeting):
        nonce = greeting.removeprefix(b"tfdist ").strip()
        heard.append(line(greeting, stolen))  # what the real one would say to this greeting
        return hmac.new(b"another", nonce + b" " + stolen, hashlib.sha256).hexdigest().encode() + b" " + stolen + b"\n"

    for answer in (forged, forged, lambda _: stolen + b"\n", lambda _: heard[0]):  # the last one repeats what it heard
        visit(own, answer)
    reporting = pool.submit(report_to_chief, WORKER, addresses[WORKER], (CHIEF, own), LONG, addresses)
    with closing(gathering.result(LONG)) as met, closing(reporting.result(LONG)) as other:
        assert (list(met.links), list(other.links)) == ([WORKER], [CHIEF])
        assert len(met.lifelines) == 1
    told = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert len(told) == 1
    assert "127.0.0.1" in told[0]
    assert "TFDIST_RUN_SECRET" in told[0]


def test_a_task_without_the_secret_is_told_so(pool, monkeypatch):
    own = free_address()
    with serving() as ps:
        monkeypatch.setenv(RUN_SECRET, "the run's")
        gathering = pool.submit(gather_tasks, CHIEF, own, {PS: at(ps)}, 1.0)
        monkeypatch.setattr(rendezvous, "hello_message", lambda *_, **__: b"0" * 64 + b" " + hello() + b"\n")
        with raises(TrainingError, "task-rejected") as rejected:
            wait_until_exited(PS, own, LONG)
        assert re.search(r"ps:0: .*TFDIST_RUN_SECRET", rejected.value.message)
        monkeypatch.setattr(rendezvous, "_SILENCE", 0.0)
        gathering.result(LONG).close()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.one_of(
        st.binary(max_size=5000),
        st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(
            lambda value: json.dumps(value).encode()
        ),
        st.fixed_dictionaries({}, optional={"task": JSON, "tensorflow": JSON, "sums": JSON}).map(
            lambda value: json.dumps(value).encode()
        ),
    ),
    proves=st.booleans(),
    cut=st.integers(0, 200),
)
def test_no_bytes_end_who_listens_or_are_taken_for_a_task(said, proves, cut):
    with (
        serving() as listener,
        closing(HandshakeListener(listener, [PS, WORKER])) as handshakes,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        assert handshakes.identified(LONG) == []
        words = line(stranger.recv(100), said) if proves else said + b"\n"
        for part in (words[:cut], words[cut:]):
            stranger.sendall(part)
        stranger.shutdown(socket.SHUT_WR)
        while handshakes._pending:
            assert handshakes.identified(LONG) == []


def test_a_pause_of_the_machine_takes_no_time_from_those_that_are_asked(monkeypatch):
    with serving() as listener, closing(HandshakeListener(listener, [PS])) as handshakes:
        with socket.create_connection(listener.getsockname()) as task:
            handshakes.identified(LONG)
            monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000))
            assert handshakes.identified(0) == []
            task.sendall(handshake.hello_message(PS, task.recv(100)))
            ((connection, hello),) = handshakes.identified(LONG)
            connection.close()
        assert hello.task == PS


def test_a_pause_of_the_machine_is_no_silence(pool, monkeypatch):
    """A task that is up has its ten seconds to say who it is, however long all stood still meanwhile."""
    own, pauses = free_address(), []
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 100 * len(pauses)))
    with serving() as ps:
        gathering = pool.submit(gather_tasks, CHIEF, own, {PS: at(ps)}, 1000)
        while unreachable(own):
            assert not gathering.done()
        pauses.append("one")
        with pytest.raises(NotYet):
            gathering.result(0.5)
        waiting = pool.submit(wait_until_exited, PS, own, LONG)
        with closing(gathering.result(LONG)) as met:
            assert len(met.lifelines) == 1
        waiting.result(LONG)


def test_a_crowd_that_says_nothing_takes_no_more_than_its_share_of_files(monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_PENDING", 5)
    with serving() as listener, closing(HandshakeListener(listener, [PS])) as handshakes, ExitStack() as crowd:
        for _ in range(20):
            crowd.enter_context(socket.create_connection(listener.getsockname()))
            handshakes.identified(LONG)
        assert len(handshakes._pending) == 5


def test_strangers_that_say_nothing_keep_nobody_waiting(pool, monkeypatch):
    monkeypatch.setattr(rendezvous, "_SILENCE", 2 * reachability.CONNECT)
    addresses = {CHIEF: free_address(), WORKER: free_address()}
    with ExitStack() as strangers:
        gathering = pool.submit(gather_tasks, CHIEF, addresses[CHIEF], {WORKER: addresses[WORKER]}, LONG, addresses)
        while unreachable(addresses[CHIEF]):
            assert not gathering.done()
        for _ in range(30):
            strangers.enter_context(socket.create_connection((addresses[CHIEF].host, addresses[CHIEF].port)))
        begun = time.monotonic()
        chief = CHIEF, addresses[CHIEF]
        reporting = pool.submit(report_to_chief, WORKER, addresses[WORKER], chief, LONG, addresses)
        with closing(gathering.result(LONG)) as own, closing(reporting.result(LONG)) as other:
            assert (list(own.links), list(other.links)) == ([WORKER], [CHIEF])
        assert time.monotonic() - begun < reachability.CONNECT  # what one of them might take


def test_a_server_that_is_not_ours_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.2)
    with serving() as ps:
        assert gather_tasks(CHIEF, free_address(), {PS: at(ps)}, LONG) == RendezvousResult([], {})


def test_a_restarted_server_outlasts_a_chief_that_is_at_work(pool):
    """TensorFlow's own server has the port by then; it ends connections that say nothing, and takes new ones."""
    taken = threading.Semaphore(0)
    with serving() as chief:

        def serve():
            for _ in range(2):
                connection, _ = chief.accept()
                connection.sendall(b"\0\0\x18\4")
                connection.close()
                taken.release()

        serving_chief = pool.submit(serve)
        waiting = pool.submit(wait_until_exited, PS, at(chief), LONG)
        assert taken.acquire(timeout=LONG)
        assert taken.acquire(timeout=LONG), "it connects again"
        serving_chief.result(LONG)
    waiting.result(LONG)
