import importlib
import os
import uuid
from email.utils import formatdate

import pytest

from tests.support.codes import raises
from tests.support.s3 import FAULTS
from tfdist_cli.errors import ResultNotSaved, UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage import remote, tree
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import Retry, StorageError


def memory():
    return Url(f"memory://{uuid.uuid4()}")


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def folder(request):
    """A folder of a service."""
    if request.param == "memory":
        return RemoteFolder(memory())
    request.getfixturevalue("s3")
    return RemoteFolder(Url("s3://bucket/run"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(300_000))
    return path


def test_objects(folder, file, tmp_path):
    assert folder.sizes() == {}
    folder.upload(file, "a/file")
    folder.write("a/seal", b"{}")
    folder.write("a/seal", b"{1}")
    folder.copy("a/file", "b/file")
    assert folder.sizes() == {"a/file": 300_000, "a/seal": 3, "b/file": 300_000}
    assert folder.sizes("a") == {"a/file": 300_000, "a/seal": 3}
    assert folder.read("a/seal") == b"{1}"
    folder.download("b/file", tmp_path / "new" / "file")
    assert (tmp_path / "new" / "file").read_bytes() == file.read_bytes()
    folder.delete(["a/file", "a/none", "b/file"])
    assert list(folder.sizes()) == ["a/seal"]
    with pytest.raises(FileNotFoundError):
        folder.read("a/file")


def test_the_age_of_an_object(folder):
    folder.write("a/file", b"")
    assert 0 <= folder.age("a/file") < 60
    with pytest.raises(FileNotFoundError):
        folder.age("a/none")


@pytest.mark.slow
def test_the_clock_of_the_service_is_in_its_answers(s3, monkeypatch):
    folder = RemoteFolder(Url("s3://bucket/run"))
    folder.write("file", b"")
    headers = {"date": formatdate(folder.modified("file") + 3600)}
    monkeypatch.setattr(folder._files, "call_s3", lambda *_, **__: {"ResponseMetadata": {"HTTPHeaders": headers}})
    assert folder.age("file") == pytest.approx(3600, abs=1)
    headers.clear()
    assert folder.age("file") is None, "it does not tell its time"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_an_upload(fault, s3, file, monkeypatch):
    monkeypatch.setattr(remote, "_READ_SECONDS", 0.3)
    folder = RemoteFolder(Url("s3://bucket/run"))
    faults = [fault, fault]
    s3.proxy.fault = lambda method, _path: faults.pop() if faults and method == "PUT" else None
    folder.upload(file, "file")
    assert s3.proxy.injected[fault] == 2
    assert s3.client.get_object(Bucket="bucket", Key="run/file")["Body"].read() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted({*FAULTS} - {"truncate"}))
def test_faults_of_a_download(fault, s3, file, monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_READ_SECONDS", 0.3)
    folder = RemoteFolder(Url("s3://bucket/run"))
    folder.upload(file, "file")
    faults = [fault, fault]
    s3.proxy.fault = lambda method, _path: faults.pop() if faults and method in ("GET", "HEAD") else None
    assert folder.sizes() == {"file": 300_000}
    faults += [fault, fault]
    folder.download("file", tmp_path / "copy")
    assert s3.proxy.injected[fault] == 4
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_changed_content_is_found(s3, file, monkeypatch):
    """A service may keep something else than it was sent, with the same size."""
    folder = RemoteFolder(Url("s3://bucket/run"), Retry(0))
    put = folder._files.put_file

    def put_changed(_path, target):
        changed = file.with_name("changed")
        changed.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        put(str(changed), target)

    monkeypatch.setattr(folder._files, "put_file", put_changed)
    with pytest.raises(StorageError):
        folder.upload(file, "file")


@pytest.mark.slow
def test_a_bucket_that_does_not_exist(s3):
    with pytest.raises(FileNotFoundError):
        RemoteFolder(Url("s3://none/run")).sizes()


def test_a_library_that_is_missing(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with raises(UsageError, "storage-library-missing") as caught:
        RemoteFolder(Url("gs://bucket/run"))
    assert "[gcs]" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("Unable to load libjvm\ndlopen(libjvm.so) failed", "hadoop-library-missing"),
        ("Prior attempt to load libhdfs failed", "hadoop-library-missing"),
        ("HDFS connection failed", "storage-unusable"),
    ],
)
def test_hadoop_cannot_be_used(reason, code, monkeypatch):
    def fails(*_, **__):
        raise OSError(reason)

    monkeypatch.setattr("fsspec.core.url_to_fs", fails)
    with raises(UsageError, code) as caught:
        RemoteFolder(Url("hdfs://localhost:9000/run"))
    assert "hdfs://localhost:9000/run" in str(caught.value)
    assert "dlopen" not in str(caught.value)


def test_pyarrow_without_java_or_hadoop(monkeypatch):
    pytest.importorskip("pyarrow")
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR", "CLASSPATH"):
        monkeypatch.setenv(name, "/nowhere")
    with raises(UsageError, "hadoop-library-missing"):
        RemoteFolder(Url("hdfs://localhost:9000/run"))


def test_a_result_replaces_an_earlier_one(folder, tmp_path):
    for name in ("saved_model.pb", "variables/a"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_text("new")
    folder.write("variables/b", b"old")
    tree.check_replaceable(folder.url, {"saved_model.pb", "variables"})
    tree.upload_result(tmp_path / "new", folder.url, last="saved_model.pb")
    assert list(folder.sizes()) == ["saved_model.pb", "variables/a"]
    with raises(UsageError, "export-path-exists"):
        tree.check_replaceable(folder.url, {"saved_model.pb"})


@pytest.mark.slow
def test_a_result_that_is_not_uploaded_stays(s3, file):
    assert not tree.exists(Url("s3://bucket/file"))
    tree.upload_result(file, Url("s3://bucket/file"))
    assert tree.exists(Url("s3://bucket/file"))
    with raises(ResultNotSaved, "result-not-uploaded") as caught:
        tree.upload_result(file, Url("s3://none/file"))
    assert str(file) in (caught.value.hint or "")
    assert file.exists()
