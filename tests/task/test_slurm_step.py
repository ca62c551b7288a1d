"""Tests of a task in a Slurm step, and of its parent process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist_cli.protocol.records import RECORD_SEPARATOR, TASK_FILE

TASK = """
import os, signal, sys, time
from pathlib import Path
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.launcher_exit import exit_with_launcher
from tfdist_cli.task.slurm_step import fork_task
parent = os.getpid()
fork_task(TaskId("worker", 1), Path(sys.argv[1]), {"task": "worker:1"}, decides=sys.argv[2] == "decides")
exit_with_launcher()
assert os.getppid() == parent and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("here", flush=True)
exec(sys.argv[3])
"""


def start(folder, decides, code, env=None):
    return subprocess.Popen(
        [sys.executable, "-c", TASK, str(folder), decides, code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | (env or {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "ends"),
    [("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("raise ValueError", 1)],
)
@pytest.mark.parametrize("decides", ["decides", "serves"])
def test_the_exit_code_of_the_parent(code, ends, decides, tmp_path):
    process = start(tmp_path, decides, code)
    out, err = process.communicate(timeout=60)
    assert out == "here\n"
    assert process.returncode == (ends if decides == "decides" else 0), err
    assert ("tfdist: worker:1 exited" in err) == (decides == "serves" and ends != 0)
    assert not list(tmp_path.iterdir())


def test_the_temporary_folder_is_removed(tmp_path):
    code = "import tempfile; print(tempfile.NamedTemporaryFile(delete=False).name); os._exit(0)"
    process = start(tmp_path / "run", "decides", code, {"TMPDIR": str(tmp_path)})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert Path(out.split()[-1]).parent.parent == tmp_path
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "ends"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)])
def test_start_and_exit_are_reported_to_a_launcher(code, ends, tmp_path):
    process = start(tmp_path, "serves", code, {"TFDIST_ATTEMPT": "2"})
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    folder = tmp_path / "attempt_2" / "worker-1"
    assert (folder / "stdout.raw").read_text() == "here\n"
    assert json.loads((folder / "task.json").read_text()) == {"task": "worker:1"}
    lines = (folder / "stderr.raw").read_text().removesuffix("\n").split("\n")
    records = [json.loads(line[1:]) for line in lines if line.startswith(RECORD_SEPARATOR)]
    assert [record["kind"] for record in records] == ["started", "exited"]
    assert records[1]["code"] == ends
    assert lines[-1].startswith("tfdist: worker:1 exited")


def begin(run_dir, attempt):
    """Writes the files of an attempt's first task."""
    folder = run_dir / f"attempt_{attempt}" / "chief-0"
    folder.mkdir(parents=True)
    (folder / TASK_FILE).write_text("{}")


@pytest.mark.slow
def test_a_task_is_killed_after_a_later_attempt_has_begun(tmp_path):
    """Slurm may requeue a job while the tasks on a lost node still run."""
    for attempt in (1, 4):  # an earlier attempt, and one of another launch
        begin(tmp_path, attempt)
    process = start(tmp_path, "decides", "time.sleep(100)", {"TFDIST_ATTEMPT": "2"})
    stdout = tmp_path / "attempt_2" / "worker-1" / "stdout.raw"
    while not stdout.exists() or "here" not in stdout.read_text():
        assert process.poll() is None
    (tmp_path / "attempt_5").mkdir()  # a refused launch, or one whose job is queued
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    begin(tmp_path, 3)
    assert process.wait(30) == 137
    assert "worker:1 of attempt 2" in stdout.with_name("stderr.raw").read_text()


LEAVES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "serves" else lambda *_: sys.exit(4))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("decides", "name", "ends"), [("serves", "SIGTERM", 5), ("decides", "SIGTERM", 4), ("serves", "SIGKILL", -9)]
)
def test_a_task_gets_the_signal_that_the_launcher_has_written(decides, name, ends, tmp_path):
    """In place of SIGTERM, which reaches all tasks of a job, one that ignores it gets another signal."""
    process = start(tmp_path, decides, LEAVES, {"TFDIST_ATTEMPT": "1"})
    folder = tmp_path / "attempt_1" / "worker-1"
    while not (folder / "stdout.raw").exists() or "ready" not in (folder / "stdout.raw").read_text():
        assert process.poll() is None
    (folder / "stop").write_text(name)
    process.wait(30)
    lines = (folder / "stderr.raw").read_text().split("\n")
    records = [json.loads(line[1:]) for line in lines if line.startswith(RECORD_SEPARATOR)]
    assert [record["code"] for record in records if record["kind"] == "exited"] == [ends]


def test_the_task_handles_a_signal_to_both(tmp_path):
    task = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("ready", flush=True)
signal.pause()
"""
    process = start(tmp_path, "decides", task)
    assert process.stdout.readline() == "here\n"
    assert process.stdout.readline() == "ready\n"
    (child,) = [int(word) for word in _children(process.pid)]
    os.kill(process.pid, signal.SIGTERM)
    os.kill(child, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_a_task_exits_with_its_parent(tmp_path):
    process = start(tmp_path, "decides", "signal.pause()")
    assert process.stdout.readline() == "here\n"
    process.kill()
    assert process.stdout.read() == ""  # no process has the pipe open any more


def test_a_folder_that_is_not_writable_is_named(tmp_path):
    (tmp_path / "attempt_1").write_text("")
    process = start(tmp_path, "decides", "pass", {"TFDIST_ATTEMPT": "1"})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "UsageError" in err
    assert str(tmp_path / "attempt_1") in err


def _children(pid):
    return (open(f"/proc/{pid}/task/{pid}/children").read()).split()  # noqa: PTH123 - one line of the kernel's
