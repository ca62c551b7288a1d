"""Copies of stored runs: for readers, also of a run that is on, and to resume a run on another machine."""

import json
import time
import uuid
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.codes import raises
from tests.support.recorded import trained_run
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import open_run_dir
from tfdist_cli.launch.run.history import Outcome, read_run
from tfdist_cli.run_storage.download import STATE, RunCopy, origin_of, runs_in_service, write_origin
from tfdist_cli.run_storage.lease import ENDED, LOST, Lease
from tfdist_cli.run_storage.stored_run import StoredRun
from tfdist_cli.run_storage.upload import FolderUpload
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.storage.remote import RemoteFolder


@pytest.fixture
def remote():
    return RemoteFolder(Url(f"memory://{uuid.uuid4()}/digits"))


@pytest.fixture
def run(tmp_path, remote):
    """A run that has ended, and its upload."""
    run = trained_run(tmp_path / "original")
    (run.path / "attempt_1" / "ps-0").mkdir(parents=True)
    (run.path / "attempt_1" / "ps-0" / "stdout.log").write_text("a line\n")
    (run.path / "empty").touch()
    FolderUpload(run.path, remote).upload_changes()
    return run


def test_a_copy_is_read_as_the_original(run, remote, tmp_path):
    Lease.new().written(remote, ENDED)
    copy = RunCopy(remote.url, tmp_path / "copy", (*STATE, "empty"))
    copy.refresh()
    assert (copy.path / "empty").read_bytes() == b""
    found, original = read_run(copy.path), read_run(run.path)
    assert (found.outcome, found.result, found.metrics) == (original.outcome, original.result, original.metrics)
    assert (found.shown, found.as_json()["run_dir"]) == (remote.url, remote.url)
    assert not list(copy.path.glob("*/*/*.log")), "only what was asked for"


def test_only_new_bytes_are_downloaded(run, remote, tmp_path, monkeypatch):
    copy = RunCopy(remote.url, tmp_path / "copy", ["*.jsonl"])
    copy.refresh()
    before = (copy.path / "metrics.jsonl").read_bytes()
    run.trained(99, 99)
    FolderUpload(run.path, remote).upload_changes()
    monkeypatch.setattr(copy._remote, "download", None)
    copy.refresh()
    assert (copy.path / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes() != before


@pytest.mark.parametrize(("state", "outcome"), [(None, Outcome.RUNNING), (LOST, Outcome.LOST)])
def test_a_run_without_an_end(state, outcome, run, remote, tmp_path):
    """It is on while its launcher gives signs of life."""
    run.launch(at=100)
    FolderUpload(run.path, remote).upload_changes()
    Lease.new().written(remote, state)
    copy = RunCopy(remote.url, tmp_path / "copy", STATE)
    copy.refresh()
    assert read_run(copy.path).outcome is outcome


@pytest.fixture
def seen(run, remote, tmp_path, monkeypatch):
    """Returns how a run that goes on is seen.

    The lease was written some seconds ago by the service's clock, and by the launcher's; the clock of this machine is
    ahead by some seconds, and the service does not tell its time if `silent`.
    """
    run.launch(at=100)
    FolderUpload(run.path, remote).upload_changes()
    real = time.time

    def look(age, told, ahead=0.0, *, silent=False, folder="copy"):
        when = datetime.now(timezone.utc)
        lease = vars(Lease.new()) | {"time": (when - timedelta(seconds=told)).isoformat()}
        remote.write("launcher.json", json.dumps(lease).encode())
        files = remote._files
        files.store[files._strip_protocol(remote.url / "launcher.json")].modified = when - timedelta(seconds=age)
        monkeypatch.setattr(time, "time", lambda: real() + ahead)
        if silent:
            monkeypatch.setattr(RemoteFolder, "age", lambda *_: None)
        copy = RunCopy(remote.url, tmp_path / folder, STATE)
        copy.refresh()
        return read_run(copy.path).outcome

    return look


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
@pytest.mark.parametrize("told", [-3600.0, 0.0, 3600.0])
def test_only_the_clock_of_the_service_tells_whether_a_launcher_lives(told, ahead, seen):
    assert seen(20.0, told, ahead) is Outcome.RUNNING
    assert seen(70.0, told, ahead) is Outcome.LOST


def test_a_service_that_does_not_tell_its_time(seen):
    assert seen(20.0, 3600.0, 200.0, silent=True) is Outcome.RUNNING, "the clocks are compared with a tolerance"
    assert seen(500.0, 0.0, silent=True, folder="another") is Outcome.LOST


def test_a_lease_that_changes_is_alive_and_one_that_does_not_is_lost_whatever_the_clocks_say(
    seen, remote, tmp_path, monkeypatch
):
    assert seen(500.0, 0.0, silent=True) is Outcome.LOST
    assert seen(500.0, 1.0, silent=True) is Outcome.RUNNING, "it was written anew"
    copy, real = RunCopy(remote.url, tmp_path / "copy", STATE), time.time
    for later, outcome in ((50.0, Outcome.RUNNING), (65.0, Outcome.LOST)):
        monkeypatch.setattr(time, "time", lambda later=later: real() + later)
        copy.refresh()
        assert read_run(copy.path).outcome is outcome


def test_a_folder_without_a_run(remote, tmp_path):
    with raises(UsageError, "not-a-run-dir"):
        RunCopy(remote.url, tmp_path / "copy", STATE).refresh()


def test_a_service_that_cannot_be_reached(remote, tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(type(remote._files), "find", denied)
    with raises(UsageError, "storage-unreachable"):
        RunCopy(remote.url, tmp_path / "copy", STATE).refresh()


def test_the_runs_of_a_folder(run, remote):
    assert list(runs_in_service(remote.url.parent)) == [remote.url]


def prepare(remote, local, recipe=None):
    """What a launch does with the address before its first task."""
    stored = StoredRun.prepare(remote.url, local, recipe)
    stored.lease.written(remote, ENDED)
    return stored


def test_a_run_is_resumed_on_another_machine(run, remote, tmp_path):
    remote.write("checkpoints/step-00000010/state.json", b"{}")
    remote.write("checkpoints/step-00000010/variables", b"large")
    recipe = Recipe.model_validate(
        {"module": "m", "checkpoint": {"every_steps": 1, "dir": f"{remote.url}/checkpoints"}}
    )
    local = tmp_path / "other" / "digits"
    prepare(remote, local, recipe)
    names = sorted(path.name for path in local.iterdir())
    assert {"plan.json", "metrics.jsonl", "attempt_1"} <= set(names)
    assert not list(local.rglob("*.log")), "the logs of earlier attempts stay where they are"
    assert not (local / "checkpoints" / "step-00000010" / "variables").exists(), "the chief downloads its checkpoint"
    assert read_run(local).can_resume is False, "it was done"
    uploads = FolderUpload(local, remote)
    uploads.upload_changes()
    assert remote.read("attempt_1/ps-0/stdout.log") == b"a line\n"


def test_the_checkpoints_of_a_program_are_downloaded(run, remote, tmp_path):
    remote.write("checkpoints/step-00000010/state.json", b"{}")
    prepare(remote, tmp_path / "digits")
    assert (tmp_path / "digits" / "checkpoints" / "step-00000010" / "state.json").read_bytes() == b"{}"


@pytest.mark.slow
def test_the_local_folder_is_used_while_it_is_the_newest(run, remote, tmp_path):
    local = tmp_path / "digits"
    first = prepare(remote, local)
    with pytest.raises(RuntimeError), first.uploading(local):  # the process exits with the error
        raise RuntimeError
    assert origin_of(local) == (remote.url, first.lease.launch)
    (local / "not_uploaded").write_text("")
    prepare(remote, local)
    assert (local / "not_uploaded").exists()
    prepare(remote, tmp_path / "elsewhere")
    prepare(remote, local)
    assert not (local / "not_uploaded").exists()
    assert (tmp_path / "digits.replaced-1" / "not_uploaded").exists(), "nothing is lost"


def test_what_is_not_this_run(run, remote, tmp_path):
    with raises(UsageError, "run-dir-of-another-run"):
        prepare(remote, run.path)
    other = RemoteFolder(Url(f"memory://{uuid.uuid4()}"))
    other.write("thesis.txt", b"")
    with raises(UsageError, "not-a-run-dir"):
        prepare(other, tmp_path / "new")


def test_metrics_that_were_replaced_are_downloaded_anew(run, remote, tmp_path):
    """A chief that resumes cuts them back to its checkpoint, and adds others."""
    copy = RunCopy(remote.url, tmp_path / "copy", ["*.jsonl"])
    copy.refresh()
    size = (run.path / "metrics.jsonl").stat().st_size
    for more in (0, 700):
        lines = f'{{"attempt": {more}}}\n'.encode()
        (run.path / "metrics.jsonl").write_bytes((lines * (size + more))[: size + more - 1] + b"\n")
        FolderUpload(run.path, remote).upload_changes()
        copy.refresh()
        assert (copy.path / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()


def test_a_launch_beside_a_running_one_does_not_take_its_lease(run, remote, tmp_path):
    local = tmp_path / "digits"
    with open_run_dir(local, tmp_path, "digits", datetime.now().astimezone()):
        lease = Lease.new().written(remote)
        write_origin(local, remote.url, lease.launch)
        with raises(UsageError, "run-dir-in-use"):
            StoredRun.prepare(remote.url, local, None)
        assert Lease.read(remote) == lease


def test_a_launch_that_cannot_open_its_folder_gives_the_lease_back(run, remote, tmp_path):
    local = tmp_path / "digits"
    stored = StoredRun.prepare(remote.url, local, None)
    with pytest.raises(RuntimeError), stored.given_back_on_error():
        raise RuntimeError
    assert Lease.read(remote).state == ENDED
    (local / "not_uploaded").write_text("")
    prepare(remote, local)
    assert (local / "not_uploaded").exists(), "it is the newest state"
