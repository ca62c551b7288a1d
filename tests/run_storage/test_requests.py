"""Requests through a storage service: from a command on any machine to the launcher, and what is not passed on."""

import json
import signal
import threading
import time
import uuid
from datetime import timedelta

import pytest

from tests.support.codes import raises
from tests.support.recorded import RecordedRun
from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.run.history import Outcome
from tfdist_cli.launch.run.requests import SIGNAL, Answers, ScaleRequest, new_id, take_requests
from tfdist_cli.run_storage import requests
from tfdist_cli.run_storage.lease import ENDED, LOST, Lease
from tfdist_cli.run_storage.requests import RequestRelay, StopRequest, StoredContact
from tfdist_cli.run_storage.upload import FolderUpload
from tfdist_cli.runs.source import open_run
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder

ANSWER = {"event": "scale", "answer": "unchanged"}


class Launcher:
    """A launcher of this process, and the upload of its run, which passes requests on."""

    def __init__(self, folder):
        self.run = RecordedRun(folder)
        self.run.launch()
        self.remote = RemoteFolder(Url(f"memory://{uuid.uuid4()}/digits"))
        self.lease = Lease.new().written(self.remote)
        self.signals = []
        self.answered = []
        self.ended = threading.Event()
        self.relay = RequestRelay(folder, self.remote.url, self.lease, self.signalled)
        self.upload()
        self._thread = threading.Thread(target=self.relay.run, args=(self.ended, 0.01))
        self._thread.start()

    def upload(self):
        FolderUpload(self.run.path, self.remote).upload_changes()

    def signalled(self, pid, number):
        assert pid == self.lease.pid
        self.signals.append(number)
        if number in (signal.SIGTERM, signal.SIGINT):
            self.lease.written(self.remote, ENDED)
        for request in take_requests(self.run.path):
            self.answered.append(request)
            self.run.happened(3, request=request.request, **ANSWER)
            self.upload()

    def close(self):
        self.ended.set()
        self._thread.join()


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(StoredContact, "period", 0.01)
    monkeypatch.setattr(requests, "_AGAIN", 0.01)
    launcher = Launcher(tmp_path / "local")
    yield launcher
    launcher.close()


def test_a_request_and_its_answer(launcher):
    with open_run(launcher.remote.url) as source:
        view = source.view()
        assert view.outcome is Outcome.RUNNING
        request, contact = ScaleRequest(new_id(), {"worker": 2}), source.contact(view)
        answers = Answers(contact, view, request.request, "scaled", time.monotonic() + 30)
        with contact.post(request):
            answer = answers.first("scale")
    assert answer is not None
    assert (answer["answer"], launcher.answered, set(launcher.signals)) == ("unchanged", [request], {SIGNAL})
    assert not launcher.remote.sizes("requests")


@pytest.mark.parametrize(("now", "signals"), [(False, [signal.SIGTERM]), (True, [signal.SIGINT] * 2)])
def test_a_run_is_stopped(now, signals, launcher):
    with open_run(launcher.remote.url) as source:
        view = source.view()
        assert not source.is_over(view)
        assert source.stop(view, now=now, timeout=30)
    for _ in range(1000):
        if launcher.signals == signals:
            break
        launcher.ended.wait(0.01)
    assert launcher.signals == signals


def test_a_launcher_that_does_not_answer(launcher):
    launcher.ended.set()  # nothing passes the request on
    with open_run(launcher.remote.url) as source:
        assert not source.stop(source.view(), now=False, timeout=0)
    assert not launcher.remote.sizes("requests"), "it is taken back"


@pytest.mark.parametrize("state", [None, LOST])
def test_a_launcher_that_has_disappeared(state, launcher):
    """It gave its last sign of life long ago, or its upload has seen its end."""
    launcher.lease.written(launcher.remote, state)
    files = launcher.remote._files
    written = files.store[files._strip_protocol(launcher.remote.url / "launcher.json")]
    written.modified -= timedelta(seconds=100)
    with open_run(launcher.remote.url) as source:
        view = source.view()
        assert (view.outcome, source.is_over(view)) == (Outcome.LOST, False)
        with raises(TfdistError, "launcher-lost"):
            source.stop(view, now=False, timeout=30)


def test_a_launcher_that_disappears_meanwhile(launcher):
    request = ScaleRequest(new_id(), {"worker": 2})
    with open_run(launcher.remote.url) as source:
        view = source.view()
        answers = Answers(source.contact(view), view, request.request, "scaled", time.monotonic() + 30)
        launcher.lease.written(launcher.remote, LOST)
        with raises(TfdistError, "run-ended"):
            answers.first("scale")


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b"{}", b'{"kind": "stop"}'),
        *(
            {"kind": "stop", "launch": "an earlier one"},
            {"kind": "scale", "replicas": {"boss": 1}, "request": "a" * 32},
        ),
        {"kind": "scale", "replicas": {"worker": 1}, "request": "../../" + "a" * 26},
    ],
)
def test_what_is_no_request_for_this_launch_is_removed(content, launcher):
    if isinstance(content, dict):
        content = json.dumps({"launch": launcher.lease.launch, **content}).encode()
    launcher.remote.write("requests/x.json", content)
    for _ in range(1000):
        if not launcher.remote.sizes("requests"):
            break
        launcher.ended.wait(0.01)
    assert not launcher.remote.sizes("requests")
    launcher.close()
    assert (launcher.signals, launcher.answered) == ([], [])


def test_the_answer_is_uploaded_soon(launcher, monkeypatch):
    monkeypatch.setattr(requests, "_SOON", 0.01)
    assert launcher.relay.pause(launcher.ended, 0.05) is False
    launcher.remote.write("requests/x.json", json.dumps({"launch": launcher.lease.launch}).encode())
    began = time.monotonic()
    assert launcher.relay.pause(launcher.ended, 60) is False
    assert time.monotonic() - began < 30
    launcher.ended.set()
    assert launcher.relay.pause(launcher.ended, 60) is True


def test_a_service_that_cannot_be_written(launcher, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "denied")

    with open_run(launcher.remote.url) as source:
        contact = source.contact(source.view())
        monkeypatch.setattr(type(launcher.remote._files), "pipe_file", fail)
        with raises(UsageError, "storage-unreachable"), contact.post(StopRequest(new_id())):
            pass
