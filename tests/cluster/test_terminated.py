"""SIGTERM ends a training within an evaluation: its state is saved, and the next launch finishes the epoch."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.launching import await_event, finish, project, start
from tests.support.tasks import program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PS = {"chief": 1, "ps": 1, "worker": 2}
MIRRORED = {"worker": 2}
STAGES = {"chief": 1, "worker": 2}


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("roles", "mode", "where"),
    [
        (PS, "async", "validation"),
        (PS, "sync", "validation"),
        (MIRRORED, "none", "validation"),
        (PS, "async", "tfdist.evaluate"),
        (PS, "async", "tfdist.predict"),
        (PS, "async", "model.evaluate"),
        (PS, "sync", "model.predict"),
        (MIRRORED, "none", "model.evaluate"),
        (STAGES, "none", "validation"),
    ],
)
def test_sigterm_in_an_evaluation_saves_and_ends(roles, mode, where, cluster):
    tasks = cluster(**roles)
    env = {"TFDIST_STRATEGY": "model_parallel"} if roles is STAGES else {}
    signalled = [task for task in tasks.tasks if roles is MIRRORED or task == "chief:0"]
    tasks.start(program("terminated.py", tasks.folder, where, mode), env=env)
    tasks.await_path(signalled[0], tasks.folder / "begun")
    for task in signalled:
        tasks.processes[task].send_signal(signal.SIGTERM)
    for task in signalled:
        assert tasks.code_of(task, timeout=25) == 143, tasks.outputs()
    tasks.finish(25)
    (saved,) = (tasks.folder / "kept").glob("step-*")
    assert saved.name.lstrip("step-0") == "20"
    again = tasks.start(program("terminated.py", tasks.folder, "nothing", mode), env=env).finish()
    assert {task: one.code for task, one in again.items()} == dict.fromkeys(tasks.tasks, 0), tasks.outputs()
    assert again[signalled[0]].result == [40, [0, 1]]


SCOPE = """
import signal, sys
from pathlib import Path
import tfdist_cli as tfdist
with tfdist.scope():
    Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""


@pytest.mark.rotates(5)
def test_sigterm_ends_mirrored_tasks_outside_of_a_training(cluster):
    tasks = cluster(**MIRRORED)
    (tasks.folder / "scope.py").write_text(SCOPE)
    for task in tasks.tasks:
        tasks.start([sys.executable, "scope.py", str(tasks.folder / task)], task)
    for task in tasks.tasks:
        tasks.await_path(task, tasks.folder / task)
    for task in tasks.tasks:
        tasks.processes[task].send_signal(signal.SIGTERM)
    assert [tasks.code_of(task, timeout=25) for task in tasks.tasks] == [-signal.SIGTERM] * 2, tasks.outputs()


def test_sigterm_ends_mirrored_tasks_that_connect(cluster):
    """TensorFlow has a handler of its own for a moment: the signal is sent as soon as the kernel shows one."""
    tasks = cluster(**MIRRORED)
    (tasks.folder / "scope.py").write_text(SCOPE)
    for task in tasks.tasks:
        tasks.start([sys.executable, "scope.py", str(tasks.folder / task)], task)
    signalled = tasks.processes[tasks.tasks[0]]
    while not _catches(signalled.pid, signal.SIGTERM):
        assert signalled.poll() is None, tasks.outputs()
    signalled.send_signal(signal.SIGTERM)
    assert tasks.code_of(tasks.tasks[0], timeout=25) == -signal.SIGTERM, tasks.outputs()
    assert tasks.code_of(tasks.tasks[1], timeout=25) != 0, tasks.outputs()


def _catches(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


PROGRAM = """
import signal, sys
if sys.argv[1] != "none":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
open("up", "w").close()  # the test waits for it
while True:
    signal.pause()
"""


@pytest.mark.rotates(5)
@pytest.mark.parametrize("exits", ["none", "0", "3"])
@pytest.mark.parametrize("signalled", ["launcher", "task"])
def test_the_exit_code_of_a_program_that_sigterm_ends(exits, signalled, tmp_path):
    folder = project(tmp_path / "project", cluster="strategy: single\nroles: {worker: {}}\n")
    (folder / "program.py").write_text(PROGRAM)
    os.mkfifo(folder / "up")
    launcher = start(folder, "--run-dir", "run", "--", sys.executable, "program.py", exits)
    (folder / "up").read_bytes()
    if signalled == "launcher":
        launcher.send_signal(signal.SIGTERM)
    else:
        # The program may run before its launcher has recorded that.
        os.kill(await_event(launcher, "run", "started")["pid"], signal.SIGTERM)
    expected = 143 if signalled == "launcher" or exits == "none" else int(exits)
    assert finish(launcher).code == expected
