"""Leases: one launcher at a time, and a dead one does not block the next for long."""

import uuid

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.run_storage.lease import ENDED, LOST, Lease, await_free
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder


@pytest.fixture
def remote():
    return RemoteFolder(Url(f"memory://{uuid.uuid4()}"))


def test_a_lease_is_read_as_it_was_written(remote):
    assert Lease.read(remote) is None
    written = Lease.new().written(remote)
    assert Lease.read(remote) == written
    remote.write("launcher.json", b'{"launch": 3}')
    assert Lease.read(remote) is None


def test_a_launcher_that_is_alive_keeps_its_lease(remote):
    lease = Lease.new().written(remote)
    with raises(UsageError, "run-dir-in-use"):
        await_free(remote, lease, lambda _: lease.written(remote))


def test_a_dead_launcher_is_waited_for(remote):
    waited = []
    await_free(remote, Lease.new().written(remote), waited.append)
    assert sum(waited) == 60


@pytest.mark.parametrize("state", [ENDED, LOST])
def test_a_launcher_that_has_ended_is_not_waited_for(state, remote):
    await_free(remote, Lease.new().written(remote, state), pytest.fail)


def test_one_that_ends_meanwhile(remote):
    lease = Lease.new().written(remote)
    await_free(remote, lease, lambda _: lease.written(remote, ENDED))
