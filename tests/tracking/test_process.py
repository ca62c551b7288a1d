"""The process of a tracker: it reports a failure once, tries again, and ends when the launcher says so or is gone."""

import os
import signal

import pytest

from tfdist_cli.tracking import process
from tfdist_cli.tracking.process import track


@pytest.fixture
def launcher(monkeypatch, recording, run):
    """Runs the process's function with a scripted launcher: `words` are its looks at the files and its last word."""

    def play(*words, tracker):
        looks = iter(words)

        def script():
            for word in looks:
                if word == "mend":
                    tracker.broken = set()
                    yield None
                else:
                    yield word

        read, write = os.pipe()
        alarms = []
        monkeypatch.setattr(process, "_looks", script)
        monkeypatch.setattr(process, "_ready", lambda seconds: False)
        monkeypatch.setattr(process, "_take_stdout", lambda: write)
        monkeypatch.setattr(process, "make_tracker", lambda name, folder: tracker)
        monkeypatch.setattr(signal, "alarm", alarms.append)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(os, "nice", lambda _: None)
        code = track(run.path, "mlflow")
        os.close(write)
        with os.fdopen(read) as pipe:
            return code, pipe.read(), alarms

    return play


def test_it_ends_with_the_job(launcher, recording, run):
    tracker = recording(rewritable=True)
    run.trained(1, 1)
    assert launcher(None, "3", tracker=tracker) == (0, "", [])
    assert tracker.calls[-1] == 3
    assert tracker.losses() == [(1, 1.0)]


def test_a_launcher_that_was_killed(launcher, recording):
    tracker = recording(rewritable=True)
    code, problem, alarms = launcher(None, "", tracker=tracker)
    assert (code, problem, tracker.calls[-1]) == (0, "", None)
    assert len(alarms) == 1


def test_a_failure_is_reported_once_and_nothing_is_lost(launcher, recording, run):
    tracker = recording(rewritable=False)
    tracker.broken = {"open"}
    run.trained(1, 1)
    code, problem, _ = launcher(None, None, "mend", "0", tracker=tracker)
    assert code == 0
    assert problem.count("ConnectionError") == 1
    assert tracker.losses() == [(1, 1.0)]


def test_a_server_that_stays_away(launcher, recording):
    tracker = recording(rewritable=False)
    tracker.broken = {"open"}
    code, problem, _ = launcher(None, None, "0", tracker=tracker)
    assert (code, problem.count("ConnectionError")) == (1, 1)
