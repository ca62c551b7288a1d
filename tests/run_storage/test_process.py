"""The process that uploads a run, in this process: the end of the job, a service that fails, and another launch."""

import os
import threading
import uuid

import pytest

from tfdist_cli.run_storage import process
from tfdist_cli.run_storage.lease import ENDED, LOST, Lease
from tfdist_cli.run_storage.process import Task, _try, upload_run
from tfdist_cli.run_storage.upload import FolderUpload, UnreadableFiles
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda _: None)
    (tmp_path / "plan.json").write_text("{}")
    url = Url(f"memory://{uuid.uuid4()}")
    return Task(tmp_path, url, Lease.new().written(RemoteFolder(url)), period=60, patience=0.0)


@pytest.fixture
def uploading(task):
    """Uploads until the pipe is closed."""
    receive, send = os.pipe()
    problems = []
    with os.fdopen(receive, "rb") as pipe:
        thread = threading.Thread(target=lambda: problems.append(upload_run(task, pipe)))
        thread.start()

        def end(text=b""):
            os.write(send, text)
            os.close(send)
            thread.join(30)
            return problems.pop()

        yield end


def test_a_task_is_an_argument(task):
    assert Task.of_argument(task.as_argument()) == task


@pytest.mark.parametrize(("text", "state"), [(b"0\n", ENDED), (b"", LOST)], ids=["ended", "killed"])
def test_the_end_of_the_job(text, state, task, uploading):
    remote = RemoteFolder(task.url)
    (task.local / "late").write_text("at the end")
    assert uploading(text) == ""
    assert remote.read("late") == b"at the end"
    assert Lease.read(remote).state == state


def test_signs_of_life(task, monkeypatch, request):
    monkeypatch.setattr(process, "RENEWAL_SECONDS", 0.01)
    uploading = request.getfixturevalue("uploading")
    remote, changed = RemoteFolder(task.url), threading.Event()
    for _ in range(1000):
        if Lease.read(remote) != task.lease:
            break
        changed.wait(0.01)
    assert uploading(b"0\n") == ""
    assert Lease.read(remote).time > task.lease.time


def test_a_service_that_is_down_is_told_at_the_end(task, uploading, monkeypatch):
    def fail(*_):
        raise ConnectionResetError

    monkeypatch.setattr(type(RemoteFolder(task.url)._files), "put_file", fail)
    (task.local / "late").write_text("at the end")
    assert str(task.url) in uploading(b"0\n")


def test_another_launch_takes_over(task, request):
    remote = RemoteFolder(task.url)
    other = Lease.new().written(remote)
    uploading = request.getfixturevalue("uploading")
    assert str(task.url) in uploading(b"0\n")
    assert Lease.read(remote) == other


def test_all_files_are_told_if_nothing_can_be_asked(task, uploading, monkeypatch):
    def fail(*_, **__):
        raise ConnectionResetError

    (task.local / "late").write_text("at the end")
    files = type(RemoteFolder(task.url)._files)
    for name in ("put_file", "cat_file", "pipe_file"):
        monkeypatch.setattr(files, name, fail)
    assert "0 files" not in uploading(b"0\n")


def test_a_run_that_is_there_and_has_no_end(task, uploading, monkeypatch):
    (task.local / "late").write_text("at the end")
    written = Lease.written

    def fail_at_the_end(lease, remote, state=None):
        if state:
            raise ConnectionResetError
        return written(lease, remote)

    monkeypatch.setattr(Lease, "written", fail_at_the_end)
    problem = uploading(b"0\n")
    assert problem
    assert str(task.local) not in problem, "no file is missing"


def test_a_file_that_cannot_be_read_is_named_and_the_run_has_its_end(task, uploading, monkeypatch):
    changes = FolderUpload.upload_changes

    def one_unreadable(self, **options):
        changes(self, **options)
        raise UnreadableFiles({"secret": "Permission denied"})

    monkeypatch.setattr(FolderUpload, "upload_changes", one_unreadable)
    (task.local / "late").write_text("at the end")
    assert "secret" in uploading(b"0\n")
    remote = RemoteFolder(task.url)
    assert (remote.read("late"), Lease.read(remote).state) == (b"at the end", ENDED)


def test_the_log_names_an_unreadable_file_once(task, monkeypatch, caplog):
    unreadable = {"one": "Permission denied"}

    def fail(*_, **__):
        raise UnreadableFiles(unreadable)

    monkeypatch.setattr(FolderUpload, "upload_changes", fail)
    uploads, told = FolderUpload(task.local, RemoteFolder(task.url)), set()
    for _ in range(2):
        _try(uploads, threading.Event(), told)
    unreadable["two"] = "Permission denied"
    _try(uploads, threading.Event(), told)
    assert ["two" in record.getMessage() for record in caplog.records] == [False, True]
