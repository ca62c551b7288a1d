"""Ports that are held for tasks, and addresses that cannot be had."""

import os
import socket
from contextlib import closing

import psutil
import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.process import ports
from tfdist_cli.launch.process.ports import hold
from tfdist_cli.plan.join_address import join_address
from tfdist_cli.spec.task_id import TaskId


def listening(port, host=""):
    """A server as gRPC and http.server make one."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen()
    return server


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_every_task_gets_a_port_of_its_own(make_cluster):
    cluster = make_cluster("parameter_server", chief=1, worker=20, ps=3, evaluator=1)
    with hold(cluster) as first, hold(cluster) as second:
        ports = [address.port for addresses in (first, second) for address in addresses.values()]
        assert list(first) == list(cluster.tasks)
        assert len(set(ports)) == 50
        assert all(ports)


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_task_can_listen_on_its_port_and_no_process_gets_it_by_chance(make_cluster, host):
    with hold(make_cluster(worker=1)) as addresses:
        (address,) = addresses.values()
        for _ in range(2):  # and again, for a task that is started again
            with closing(listening(address.port, host)):
                socket.create_connection(("127.0.0.1", address.port), timeout=5).close()
        with closing(socket.socket()) as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", address.port))


def test_no_server_may_listen_beside_the_tasks(make_cluster):
    with hold(make_cluster(worker=1)) as addresses:
        (address,) = addresses.values()
        with closing(listening(address.port)), pytest.raises(OSError, match="in use"):
            listening(address.port)


def test_ports_are_free_again_afterwards(make_cluster):
    with hold(make_cluster(worker=1)) as addresses:
        (address,) = addresses.values()
    with closing(socket.socket()) as anybody:
        anybody.bind(("", address.port))


def test_where_a_held_port_cannot_be_listened_on_it_is_let_go(make_cluster, monkeypatch):
    monkeypatch.setattr(ports, "_CAN_SHARE", False)
    with hold(make_cluster(worker=3)) as addresses:
        assert len({address.port for address in addresses.values()}) == 3
        for address in addresses.values():
            with closing(socket.socket()) as anybody:
                anybody.bind(("", address.port))


def test_a_given_address_is_held_too(make_cluster):
    port = free_port()
    with hold(make_cluster(worker=[f"127.0.0.1:{port}"])) as addresses:
        assert addresses[TaskId("worker")].port == port
        with closing(listening(port)):
            pass


def test_a_port_in_use_is_refused_with_the_one_who_has_it(make_cluster):
    with closing(listening(0)) as server:
        port = server.getsockname()[1]
        with raises(UsageError, "port-in-use") as caught, hold(make_cluster(worker=[f"localhost:{port}"])):
            pass
    assert f"port {port}" in caught.value.message
    assert f"{psutil.Process().name()} (pid {os.getpid()})" in caught.value.message


def test_a_port_that_another_launch_holds_is_refused(make_cluster):
    cluster = make_cluster(worker=[f"127.0.0.1:{free_port()}"])
    with hold(cluster), raises(UsageError, "port-in-use"), hold(cluster):
        pass


def test_connections_of_a_server_that_has_ended_do_not_matter(make_cluster):
    with closing(listening(0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # first, so that this end keeps the TIME_WAIT
        client.close()
    waiting = [each.laddr for each in psutil.net_connections("tcp") if each.status == psutil.CONN_TIME_WAIT]
    assert any(address and address.port == port for address in waiting)
    with hold(make_cluster(worker=[f"127.0.0.1:{port}"])), closing(listening(port)):
        pass


def test_an_evaluator_listens_nowhere(make_cluster):
    with closing(listening(0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with hold(make_cluster(worker=1, evaluator=[address])) as addresses:
            assert str(addresses[TaskId("evaluator")]) == address


def test_two_tasks_with_one_port_are_refused(make_cluster):
    cluster = make_cluster(worker=["127.0.0.1:2222", "127.0.0.2:2222"])
    with raises(UsageError, "duplicate-port") as caught, hold(cluster):
        pass
    assert all(name in caught.value.message for name in ("worker:0", "worker:1", "2222"))


def test_another_machine_is_refused_with_what_to_do(make_cluster):
    hosts = ["127.0.0.1:2222", "192.0.2.7:2222"]
    with raises(UsageError, "not-this-machine") as caught, hold(make_cluster(worker=hosts)):
        pass
    assert "worker:1 is 192.0.2.7" in caught.value.message
    assert "--task worker:1" in str(caught.value.hint)


def test_a_name_that_does_not_resolve(make_cluster):
    with raises(UsageError, "host-not-found") as caught, hold(make_cluster(worker=["nohost.invalid:2222"])):
        pass
    assert "nohost.invalid" in caught.value.message


def test_this_machine_by_its_own_addresses(make_cluster):
    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    for host in own:
        with hold(make_cluster(worker=[f"{host}:{free_port()}"])):
            pass


def test_low_ports_say_why(make_cluster, monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)  # root may listen anywhere
    with raises(UsageError, "port-not-permitted"), hold(make_cluster(worker=["127.0.0.1:80"])):
        pass


def test_the_port_after_the_chiefs_is_reserved_for_workers_that_join(make_cluster):
    cluster = make_cluster("parameter_server", chief=1, worker=1, ps=1)
    roles = cluster.roles
    roles = roles.model_copy(update={"worker": roles.worker.model_copy(update={"replicas": 2, "max": 4})})
    cluster = cluster.model_copy(update={"roles": roles})
    with hold(cluster) as addresses:
        assert [task.index for task in addresses if task.role == "worker"] == [0, 1, 2, 3]
        control = join_address(cluster, addresses)
        assert control.port == addresses[TaskId("chief")].port + 1
        with closing(socket.socket()) as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", control.port))
        listening(control.port).close()
