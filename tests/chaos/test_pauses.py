"""All processes of a training are stopped for a while and continue, like on a suspended machine: no task is lost.

`TFDIST_TEST_PAUSES=100` makes a hundred such pauses, on a machine whose cores other programs want too.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.support.chaos import MIRRORED, SERVERS, UNDISTURBED, accuracy, check_metrics

PAUSES = int(os.environ.get("TFDIST_TEST_PAUSES", "2"))
A_LAUNCH = min(PAUSES, 4)
"""Pauses of each launch, the first of them while its tasks start."""
LONG = 5.5
"""Seconds of a pause: longer than any watch over the interpreter that a task has."""
pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@contextmanager
def busy(count):
    """Other programs that want a core each."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def pause(training, *, launcher):
    """Stops all processes of the launch, perhaps but for the launcher, and lets them go on."""
    root = psutil.Process(training.process.pid)
    stopped = [root] if launcher else []
    for process in (*stopped, *root.children(recursive=True)):
        stopped += [] if process in stopped else [process]
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    time.sleep(LONG)  # what is tried is that time passes
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    return len(stopped)


@pytest.mark.rotates(5, 4)
@pytest.mark.parametrize("trial", range(-(-PAUSES // A_LAUNCH)))
def test_a_pause_of_all_tasks_costs_none(train, trial):
    chance = random.Random(trial)
    with busy(os.cpu_count() if PAUSES > A_LAUNCH else 0):
        training = train((SERVERS, MIRRORED)[trial % 2], "--max-restarts", 0)
        training.until(lambda: any(line["event"] == "started" for line in training.lines("events.jsonl")))
        for number in range(A_LAUNCH):
            time.sleep(chance.uniform(0, 3))  # wherever it is then
            assert training.process.poll() is None, "it was over before the last pause"
            assert pause(training, launcher=bool(number % 2)) > 2
        done = training.finish(200)
    assert done.code == 0, done.stderr[-5000:]
    assert done.processes_left == []
    assert abs(accuracy(done) - UNDISTURBED) <= 0.01
    check_metrics(done.run_dir)
    written = [path.read_text() for path in done.run_dir.glob("attempt_*/*/stderr.log")]
    assert not [text for text in written if "recent call first" in text], "stacks were read"
