"""Coming together, and noticing that the chief has gone: sockets and threads alone."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, closing, suppress

import pytest

from tfdist_cli.errors import TimeoutExceeded, TrainingError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train import presence, reach, reception
from tfdist_cli.train.presence import Met, gather, outlast, report_in, say_done
from tfdist_cli.train.reach import await_names, unreachable

CHIEF, PS, WORKER = TaskId("chief"), TaskId("ps", 0), TaskId("worker", 1)
LONG = 20.0


def free():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return Address("127.0.0.1", found.getsockname()[1])


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
    own = free()
    with serving() as ps, serving() as worker:
        waiting = [pool.submit(outlast, task, own, LONG) for task in (PS, WORKER)]
        met = gather(CHIEF, own, {PS: at(ps), WORKER: at(worker)}, LONG)
        assert len(met.lifelines) == 2
        assert not any(one.done() for one in waiting)
        met.close()  # as the end of the process does
        assert [one.result(LONG) for one in waiting] == [False, False]


def test_a_chief_says_that_its_work_is_done(pool):
    own = free()
    with serving() as ps, serving() as worker:
        waiting = [pool.submit(outlast, task, own, LONG) for task in (PS, WORKER)]
        met = gather(CHIEF, own, {PS: at(ps), WORKER: at(worker)}, LONG)
        met.lifelines[0].close()  # it has gone already, and is told nothing
        say_done([lifeline.fileno() for lifeline in met.lifelines])
        met.close()
        assert sorted(one.result(LONG) for one in waiting) == [False, True]


def test_a_chief_waits_for_the_last_task(pool):
    own = free()
    with serving() as ps, serving() as worker:
        gathering = pool.submit(gather, CHIEF, own, {PS: at(ps), WORKER: at(worker)}, LONG)
        first = pool.submit(outlast, PS, own, LONG)
        with pytest.raises(NotYet):  # Python's own only from 3.11 on
            gathering.result(0.3)
        last = pool.submit(outlast, WORKER, own, LONG)
        gathering.result(LONG).close()
        first.result(LONG)
        last.result(LONG)


def test_tasks_with_equal_rights_go_on_together(pool):
    chief, own = free(), [free(), free()]
    members = [TaskId("worker", number) for number in range(3)]
    waiting = [
        pool.submit(report_in, task, mine, (members[0], chief), LONG)
        for task, mine in zip(members[1:], own, strict=True)
    ]
    with ExitStack() as stack:
        for met in (
            gather(members[0], chief, dict(zip(members[1:], own, strict=True)), LONG),
            *(one.result(LONG) for one in waiting),
        ):
            stack.enter_context(closing(met))
            assert not met.links


def circle_of(pool, count, *, without=()):
    """What the tasks of a circle come to; some have none, as where there are GPUs."""
    circle = {TaskId("worker", number): free() for number in range(count)}
    (first, chief), *rest = circle.items()
    own = {task: {} if task in without else circle for task in circle}
    waiting = [pool.submit(report_in, task, mine, (first, chief), LONG, own[task]) for task, mine in rest]
    gathered = gather(first, chief, dict(rest), LONG, own[first])
    return list(circle), [gathered, *(one.result(LONG) for one in waiting)]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_tasks_of_a_circle_are_connected_with_one_another(count, pool):
    tasks, met = circle_of(pool, count)
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
                assert reception.line_of(link) == f"{other} to {task}\n".encode()


@pytest.mark.parametrize("without", [0, 1, 2])
def test_where_one_has_no_circle_nobody_has(without, pool):
    _, met = circle_of(pool, 3, without=[TaskId("worker", without)])
    for one in met:
        with closing(one):
            assert not one.links


def test_who_is_missing_is_named_with_the_reason():
    with serving() as ps:
        missing = free()
        with pytest.raises(TimeoutExceeded) as raised:
            gather(CHIEF, free(), {PS: at(ps), WORKER: missing}, 0.3)
    assert raised.value.message == f"not up after 0 s: worker:1 at {missing} (connection refused)"
    with pytest.raises(TimeoutExceeded, match="name is not resolved"):
        gather(CHIEF, free(), {PS: Address("no.such.host.invalid", 2222)}, 0.1)


def test_a_name_that_is_known_only_after_a_while_is_waited_for(monkeypatch):
    """That of a pod, for one."""
    asked = []

    def getaddrinfo(host, port, **_):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(reach, "RETRY", 0.01)
    await_names({PS: Address("ps-0.job", 2222)}, LONG)
    assert asked == ["ps-0.job"] * 3


def test_a_name_that_nobody_knows_is_told():
    with pytest.raises(TimeoutExceeded, match=r"ps:0 at no.such.host.invalid:2222 \(its name is not resolved\)$"):
        await_names({PS: Address("no.such.host.invalid", 2222), WORKER: free()}, 0.1)


def test_a_chief_that_never_comes_is_named():
    chief = free()
    for wait in (
        lambda: outlast(PS, chief, 0.3),
        lambda: report_in(WORKER, free(), (CHIEF, chief), 0.3),
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
        outlast(PS, end_here, 0.5)
    assert len(taken) < 20, "it is asked now and then, not all the time"


def test_a_server_ends_with_its_chief_though_the_tunnel_stays(tunnel):
    end_here, words, taken = tunnel
    words.append(b"\0\0\x18\4")
    outlast(PS, end_here, LONG)
    assert len(taken) == 2


def test_a_chief_that_ends_before_all_are_there_is_named(pool):
    chief, absent = free(), free()
    waiting = pool.submit(report_in, WORKER, free(), (CHIEF, chief), LONG)
    with pytest.raises(TimeoutExceeded):
        gather(CHIEF, chief, {PS: absent}, 0.5)
    with pytest.raises((TrainingError, TimeoutExceeded), match="chief:0"):
        waiting.result(LONG + 10)


def test_a_taken_port_is_named():
    with serving() as taken:
        for wait in (
            lambda: gather(CHIEF, at(taken), {}, LONG),
            lambda: report_in(CHIEF, at(taken), (WORKER, free()), LONG),
        ):
            with pytest.raises(TrainingError, match=f"chief:0 cannot serve at {at(taken)}: address already in use"):
                wait()


def test_another_version_of_tensorflow_is_refused(pool, monkeypatch):
    own, hello = free(), reception.hello_of(WORKER)
    theirs = json.loads(hello) | {"tensorflow": "1.15.0"}
    with serving() as worker:
        gathering = pool.submit(gather, CHIEF, own, {WORKER: at(worker)}, LONG)
        monkeypatch.setattr(presence, "hello_of", lambda task, **_: json.dumps(theirs).encode() + b"\n")
        waiting = pool.submit(outlast, WORKER, own, LONG)
        with pytest.raises(TrainingError, match=r"worker:1 has TensorFlow 1\.15\.0, and the chief has"):
            gathering.result(LONG)
        waiting.result(LONG)


STRANGERS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[]\n",
    b'{"task": "pilot:1", "tensorflow": ""}\n',
    b"{}\n",
    b"\xff" * 5000,
]


@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_are_sent_away(said, pool):
    own = free()
    with serving() as ps:
        gathering = pool.submit(gather, CHIEF, own, {PS: at(ps)}, LONG)
        while unreachable(own):
            assert not gathering.done()
        with socket.create_connection((own.host, own.port)) as stranger:
            assert stranger.recv(100) == b"tfdist\n"
            with suppress(OSError):  # sent away already
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
        waiting = pool.submit(outlast, PS, own, LONG)
        gathering.result(LONG).close()
        waiting.result(LONG)


def test_strangers_that_say_nothing_keep_nobody_waiting(pool, monkeypatch):
    monkeypatch.setattr(presence, "_SILENCE", 2 * reach.CONNECT)
    addresses = {CHIEF: free(), WORKER: free()}
    with ExitStack() as strangers:
        gathering = pool.submit(gather, CHIEF, addresses[CHIEF], {WORKER: addresses[WORKER]}, LONG, addresses)
        while unreachable(addresses[CHIEF]):
            assert not gathering.done()
        for _ in range(30):
            strangers.enter_context(socket.create_connection((addresses[CHIEF].host, addresses[CHIEF].port)))
        begun = time.monotonic()
        chief = CHIEF, addresses[CHIEF]
        reporting = pool.submit(report_in, WORKER, addresses[WORKER], chief, LONG, addresses)
        with closing(gathering.result(LONG)) as own, closing(reporting.result(LONG)) as other:
            assert (list(own.links), list(other.links)) == ([WORKER], [CHIEF])
        assert time.monotonic() - begun < reach.CONNECT  # what one of them might take


def test_a_server_that_is_not_ours_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(presence, "_SILENCE", 0.2)
    with serving() as ps:
        assert gather(CHIEF, free(), {PS: at(ps)}, LONG) == Met([], {})


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
        waiting = pool.submit(outlast, PS, at(chief), LONG)
        assert taken.acquire(timeout=LONG)
        assert taken.acquire(timeout=LONG), "it connects again"
        serving_chief.result(LONG)
    waiting.result(LONG)
