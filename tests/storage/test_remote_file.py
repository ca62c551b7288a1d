"""Objects as files: read in parts, from any position, and never as a mixture of two versions."""

import gzip
import io
import os
import uuid

import pytest

from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.remote_file import RemoteFile, open_location, open_object
from tfdist_cli.storage.retry import Retry, StorageError

CONTENT = os.urandom(10_000)


@pytest.fixture
def folder():
    folder = RemoteFolder(Url(f"memory://{uuid.uuid4()}"), Retry(0))
    folder.write("a/object", CONTENT)
    return folder


def test_any_part(folder):
    with open_object(folder, "a/object") as file:
        assert file.read(100) == CONTENT[:100]
        assert file.seek(-50, io.SEEK_END) == 9_950
        assert file.read() == CONTENT[-50:]
        file.seek(5_000)
        assert (file.read(10), file.tell()) == (CONTENT[5_000:5_010], 5_010)
        file.seek(20_000)
        assert file.read() == b""


def test_requests_are_for_parts(folder, monkeypatch):
    read, parts = folder.read, []

    def recorded(name, start, end):
        parts.append((start, end))
        return read(name, start, end)

    monkeypatch.setattr(folder, "read", recorded)
    with io.BufferedReader(RemoteFile(folder, "a/object"), 4_000) as file:
        assert b"".join(iter(lambda: file.read(1_000), b"")) == CONTENT
    assert parts == [(0, 4_000), (4_000, 8_000), (8_000, 10_000)]


def test_a_change_is_noticed_at_the_end(folder, monkeypatch):
    with open_object(folder, "a/object") as file:
        folder.write("a/object", CONTENT + b"more")
        with pytest.raises(StorageError):
            file.read()


def test_fewer_bytes_than_asked_for(folder, monkeypatch):
    with open_object(folder, "a/object") as file:
        folder.write("a/object", CONTENT[:10])
        with pytest.raises(StorageError):
            file.read(100)


def test_what_does_not_exist(folder, tmp_path):
    for at in (folder.url / "none", folder.url / "a", tmp_path / "none"):
        with pytest.raises(FileNotFoundError):
            open_location(at)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["503", "lost", "cut response"])
def test_faults(fault, s3):
    folder = RemoteFolder(Url("s3://bucket"))
    folder.write("packed", gzip.compress(CONTENT, 0))
    faults = [fault, fault]
    s3.proxy.fault = lambda method, _path: faults.pop() if faults and method == "GET" else None
    with gzip.open(open_location(Url("s3://bucket/packed"))) as file:
        assert file.read() == CONTENT
    assert not faults
