"""`tfdist profile`, with this process in place of the launcher and of its task."""

import json
import os
import threading

import pytest

from tests.profiling.test_xplane import xplane
from tests.support.codes import codes_in
from tfdist_cli.launch.run.requests import take_requests

PATH = "profile/plugins/profile/now/worker-1.xplane.pb"
ACCEPTED = {"event": "profile", "answer": "accepted", "path": PATH}
PROFILED = {"event": "profiled", "task": "worker:1", "recorded": 2.0, "took": 0.1, "bytes": 100}
WHY = {"reason": "why", "hint": ""}
REFUSED = {"event": "profile", "answer": "refused", "code": "profile-in-progress", **WHY}
FAILED = {"event": "profile_failed", "code": "profiler-in-use", **WHY}
EXITED = {"event": "exited", "task": "worker:1"}


@pytest.fixture
def run(tmp_path):
    """The directory of a run with two workers."""
    tasks = [{"task": task, "address": "h:1"} for task in ("chief:0", "worker:0", "worker:1")]
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": tasks}))
    (tmp_path / "events.jsonl").touch()
    return tmp_path


@pytest.fixture
def answering(run):
    """This process is the run's launcher, and writes these events after a request."""
    lock = (run / "launcher.lock").open("w")
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    threads, over = [], threading.Event()

    def answer(*events):
        def launch():
            taken = []
            while not taken and not over.wait(0.01):
                taken = list(take_requests(run))
            requests.extend(taken)
            for event in events:
                if event["event"] == "profiled":
                    (run / PATH).parent.mkdir(parents=True, exist_ok=True)
                    (run / PATH).write_bytes(xplane())
                with (run / "events.jsonl").open("a") as file:
                    file.write(json.dumps({"request": taken[0].request, **event}) + "\n")

        requests = []
        threads.append(threading.Thread(target=launch))
        threads[-1].start()
        return requests

    yield answer
    over.set()
    for thread in threads:
        thread.join()
    lock.close()


def test_the_table_and_the_file(tfdist, run, answering):
    requests = answering(ACCEPTED, PROFILED)
    result = tfdist("profile", run, "--task", "worker:1", "--duration", 2)
    assert result.code == 0, result.err
    assert [(each.task, each.seconds) for each in requests] == [("worker:1", 2.0)]
    header, row, last = result.out.splitlines()
    assert header.split() == ["operation", "device", "ms", "share", "times"]
    assert row.split() == ["MatMul", "CPU", "0.0", "100%", "2"]
    assert last == f"worker:1: 2.0 s in {run / PATH}"


def test_another_folder_and_json(tfdist, run, answering, tmp_path):
    answering(ACCEPTED, PROFILED)
    result = tfdist("profile", run, "--task", "worker:1", "--output", tmp_path / "out", "--json")
    found = json.loads(result.out)
    path = tmp_path / "out" / "plugins" / "profile" / "now" / "worker-1.xplane.pb"
    assert (found["task"], found["path"], found["bytes"]) == ("worker:1", str(path), 100)
    assert found["operations"] == [{"device": "CPU", "name": "MatMul", "count": 2, "seconds": 1.5e-9}]
    assert path.read_bytes() == xplane()
    assert not (run / PATH).exists()


@pytest.mark.parametrize(
    ("events", "code", "exit_code"),
    [
        ([REFUSED], "profile-in-progress", 2),
        ([ACCEPTED, FAILED], "profiler-in-use", 1),
        ([ACCEPTED, EXITED | {"task": "worker:0"}, EXITED], "task-exited", 1),
        ([ACCEPTED, {"event": "phase", "phase": "ended"}], "run-ended", 1),
        ([ACCEPTED], "profile-timeout", 124),
        ([], "profile-timeout", 124),
    ],
)
def test_there_is_no_profile(events, code, exit_code, tfdist, run, answering):
    answering(*events)
    timeout = 0.3 if code == "profile-timeout" else 60
    result = tfdist("profile", run, "--task", "worker:1", "--duration", 0.1, "--timeout", timeout)
    assert (codes_in(result.err), result.code) == ([code], exit_code)


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["--task", "worker:7"], ["unknown-task"]),
        (["--task", "boss"], ["invalid-task"]),
        (["--task", "worker:1"], ["run-not-running"]),
        (["--task", "worker:1", "--duration", "61"], []),
        ([], []),
    ],
)
def test_what_cannot_be_profiled(arguments, codes, tfdist, run):
    (run / "launcher.lock").touch()
    result = tfdist("profile", run, *arguments)
    assert (result.code, codes_in(result.err)) == (2, codes)
