"""A run directory on a real S3 server that fails one of four requests: uploaded, read, reached, resumed elsewhere."""

import random
import shutil

import pytest

from tests.support.recorded import trained_run
from tests.support.s3 import BUCKET, FAULTS
from tfdist_cli.launch.run.history import read_run
from tfdist_cli.run_storage.download import STATE, RunCopy
from tfdist_cli.run_storage.lease import ENDED
from tfdist_cli.run_storage.requests import StopRequest, StoredContact
from tfdist_cli.run_storage.stored_run import StoredRun
from tfdist_cli.run_storage.upload import FolderUpload
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage import remote, retry
from tfdist_cli.storage.remote import RemoteFolder

pytestmark = [pytest.mark.slow, pytest.mark.rotates(5)]
URL = Url(f"s3://{BUCKET}/runs/one")


def content(folder):
    own = (".uploaded.json", "launcher.lock", "launcher.json", "bucket.json")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in own
    }


@pytest.fixture
def failing(s3, monkeypatch):
    """The server, which fails one of four requests that a fault can be part of."""
    monkeypatch.setattr(remote, "_READ_SECONDS", 0.3)
    monkeypatch.setattr(retry, "_FIRST_DELAY", 0.01)

    def begin(fault):
        chance = random.Random(1)
        methods = ("PUT",) if fault == "truncate" else ("GET", "HEAD", "PUT", "DELETE")
        s3.proxy.fault = lambda method, _path: fault if method in methods and chance.random() < 1 / 4 else None
        return s3.proxy.injected

    return begin


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_directory_survives_faults(fault, failing, tmp_path):
    injected = failing(fault)
    local = tmp_path / "one"
    stored = StoredRun.prepare(URL, local, None)
    run = trained_run(local)
    FolderUpload(local, RemoteFolder(URL)).upload_changes()
    run.trained(99, 99)
    FolderUpload(local, RemoteFolder(URL)).upload_changes(last=True)
    copy = RunCopy(URL, tmp_path / "copy", STATE)
    copy.refresh()
    assert read_run(copy.path).step == read_run(local).step == 99
    contact = StoredContact(URL, copy.path)
    assert contact.look()
    with contact.post(StopRequest("a" * 32)):
        assert list(RemoteFolder(URL).sizes("requests")) == [f"requests/{'a' * 32}.json"]
    stored.lease.written(RemoteFolder(URL), ENDED)
    before = content(local)
    shutil.rmtree(local)
    StoredRun.prepare(URL, local, None)
    assert content(local) == {name: text for name, text in before.items() if not name.startswith("attempt_")}
    assert injected[fault] >= 3
