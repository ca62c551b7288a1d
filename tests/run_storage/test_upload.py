"""Uploads of a run directory: what has changed, complete, and in an order that suits readers."""

import os
import uuid
from pathlib import Path

import pytest

from tfdist_cli.run_storage import upload
from tfdist_cli.run_storage.upload import FolderUpload, UnreadableFiles
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import Retry


class Recorder(RemoteFolder):
    """A service in memory that lists its changes."""

    def __init__(self):
        super().__init__(Url(f"memory://{uuid.uuid4()}"), Retry(0))
        self.changes = []
        self.error = None

    def upload(self, file, name):
        if self.error:
            raise self.error
        super().upload(file, name)
        self.changes.append(name)

    def delete(self, names):
        names = list(names)
        super().delete(names)
        self.changes += [f"-{name}" for name in names]

    def taken(self):
        """The changes since the last call."""
        changes, self.changes = self.changes, []
        return changes


@pytest.fixture
def remote():
    return Recorder()


@pytest.fixture
def run(tmp_path):
    """A run directory."""
    for name in (
        "plan.json",
        "result.json",
        "events.jsonl",
        "checkpoints/step-1/variables",
        "attempt_1/ps-0/stdout.log",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "checkpoints" / "step-1" / "state.json").write_text("{}")
    return tmp_path


def test_the_order(run, remote):
    FolderUpload(run, remote).upload_changes()
    changes = remote.taken()
    assert changes[-3:] == ["checkpoints/step-1/state.json", "result.json", "events.jsonl"]
    assert sorted(changes) == sorted(remote.sizes())
    assert len(changes) == 6


def test_only_changes_are_uploaded(run, remote):
    FolderUpload(run, remote).upload_changes()
    remote.taken()
    again = FolderUpload(run, remote)
    again.upload_changes()
    assert remote.taken() == []
    (run / "result.json").write_text("another")
    again.upload_changes()
    assert remote.taken() == ["result.json"]


def test_a_removed_file_is_deleted_but_nothing_with_the_directory(run, remote):
    uploads = FolderUpload(run, remote)
    uploads.upload_changes()
    remote.write("attempt_0/of_another_machine", b"")
    remote.taken()
    for name in ("variables", "state.json"):
        (run / "checkpoints" / "step-1" / name).unlink()
    uploads.upload_changes()
    assert remote.taken() == ["-checkpoints/step-1/state.json", "-checkpoints/step-1/variables"], "the seal first"
    (run / "plan.json").unlink()
    uploads.upload_changes()
    assert remote.taken() == []


def test_files_of_one_machine_stay(run, remote):
    for name in ("launcher.lock", ".uploaded.json.new", "request-1.json", "bucket.json"):
        (run / name).write_text("")
    (run / "link").symlink_to(run / "plan.json")
    os.mkfifo(run / "pipe")
    FolderUpload(run, remote, ["checkpoints"]).upload_changes()
    assert sorted(remote.taken()) == ["attempt_1/ps-0/stdout.log", "events.jsonl", "plan.json", "result.json"]


def test_lines_are_uploaded_whole(run, remote):
    (run / "events.jsonl").write_text('{"a": 1}\n{"b": ')
    FolderUpload(run, remote).upload_changes()
    assert remote.read("events.jsonl") == b'{"a": 1}\n'


def test_events_are_those_of_the_beginning(run, remote, monkeypatch):
    """Later events may mention files that were not there yet."""
    whole = RemoteFolder.upload

    def upload_while_the_run_goes_on(self, file, name):
        if name == "plan.json":
            with (run / "events.jsonl").open("a") as events:
                events.write("later\n")
        whole(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", upload_while_the_run_goes_on)
    uploads = FolderUpload(run, remote)
    uploads.upload_changes()
    assert remote.read("events.jsonl") == b"events.jsonl\n"
    uploads.upload_changes(last=True)
    assert remote.read("events.jsonl") == b"events.jsonl\nlater\n"


def test_a_slow_file_is_not_uploaded_all_the_time(run, remote):
    now = [0.0]
    uploads = FolderUpload(run, remote, clock=lambda: now[0])
    log, whole = run / "attempt_1" / "ps-0" / "stdout.log", remote.upload

    def slowly(file, name):
        now[0] += 3.0 if name.endswith(".log") else 0.0
        whole(file, name)

    remote.upload = slowly
    uploads.upload_changes()
    remote.taken()
    for later, expected in ((10.0, []), (3 * upload.PACE, ["attempt_1/ps-0/stdout.log"])):
        with log.open("a") as opened:
            opened.write("more\n")
        now[0] = 3.0 + later
        uploads.upload_changes()
        assert remote.taken() == expected
    with log.open("a") as opened:
        opened.write("the last line\n")
    uploads.upload_changes(last=True)
    assert remote.taken() == ["attempt_1/ps-0/stdout.log"]


def test_a_failure_leaves_the_rest_for_later(run, remote):
    uploads = FolderUpload(run, remote)
    remote.error = ConnectionResetError()
    with pytest.raises(ConnectionResetError):
        uploads.upload_changes()
    assert len(uploads.not_sent) == 6
    remote.error = None
    uploads.upload_changes()
    assert (len(remote.taken()), uploads.not_sent) == (6, [])


def test_a_file_that_is_removed_meanwhile(run, remote, monkeypatch):
    whole = remote.upload

    def removing(file, name):
        (run / "attempt_1" / "ps-0" / "stdout.log").unlink(missing_ok=True)
        (run / "plan.json").touch()
        whole(file, name)

    uploads = FolderUpload(run, remote)
    files = uploads._files
    monkeypatch.setattr(uploads, "_files", lambda: [*reversed(files())])  # plan.json before the log
    remote.upload = removing
    uploads.upload_changes()
    assert "attempt_1/ps-0/stdout.log" not in remote.sizes()


@pytest.fixture
def deny(monkeypatch):
    """Makes files and folders unreadable, for root too."""
    denied = set()

    def denying(real):
        def check(path, *arguments, **options):
            if Path(path) in denied:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return check

    monkeypatch.setattr(Path, "open", denying(Path.open))
    monkeypatch.setattr(os, "scandir", denying(os.scandir))
    return denied


@pytest.mark.parametrize("size", [1, 2 * upload._SMALL])
def test_a_file_that_cannot_be_read_holds_up_no_other(size, run, remote, deny):
    secret = run / "attempt_1" / "secret"
    with secret.open("wb") as file:
        file.truncate(size)
    os.utime(secret, (1e9, 1e9))
    deny.add(secret)
    uploads = FolderUpload(run, remote)
    for _ in range(2):
        with pytest.raises(UnreadableFiles) as caught:
            uploads.upload_changes()
        assert (caught.value.names, uploads.not_sent) == (("attempt_1/secret",), ["attempt_1/secret"])
        assert "attempt_1/secret" in str(caught.value)
    assert len(remote.taken()) == 6, "all others, once"
    deny.clear()
    uploads.upload_changes()
    assert (remote.taken(), uploads.not_sent) == (["attempt_1/secret"], [])


def test_folders_that_tasks_upload_themselves_are_not_read(run, remote, deny):
    deny.add(run / "checkpoints")
    uploads = FolderUpload(run, remote, skipped=("checkpoints",))
    uploads.upload_changes(last=True)
    assert uploads.not_sent == []


def test_a_checkpoint_with_an_unreadable_file_gets_no_seal(run, remote, deny):
    deny.add(run / "checkpoints" / "step-1" / "variables")
    with pytest.raises(UnreadableFiles):
        FolderUpload(run, remote).upload_changes()
    assert "result.json" in remote.sizes()
    assert not remote.sizes("checkpoints")


def test_a_folder_that_cannot_be_read_is_named_and_nothing_of_it_is_deleted(run, remote, deny):
    uploads = FolderUpload(run, remote)
    uploads.upload_changes()
    deny.add(run / "checkpoints")
    (run / "result.json").write_text("another")
    with pytest.raises(UnreadableFiles) as caught:
        uploads.upload_changes(last=True)
    assert caught.value.names == ("checkpoints",)
    assert remote.sizes("checkpoints")
    assert remote.read("result.json") == b"another"
