"""Signs of life, from a process of their own."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tfdist_cli.launch.process.task_output import OutputParser
from tfdist_cli.protocol import liveness_probe

ROOT = str(Path(__file__).parents[2])
PROGRAM = """
import sys
from tfdist_cli.protocol import heartbeat
heartbeat.PERIOD, heartbeat.PROBE_PERIOD = 0.01, 0.05
heartbeat.start()
heartbeat.start()
"""
WAITS = "sys.stdin.read()\n"
HELD = "import ctypes; ctypes.PyDLL(None).sleep(int(sys.stdin.readline()))  # unlike a CDLL, it keeps the interpreter\n"


def run(program, **environment):
    env = os.environ | {"PYTHONPATH": ROOT, "TFDIST_RECORDS": "1"} | environment
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program],
        env=env,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def beats(process, count):
    return [json.loads(process.stderr.readline().removeprefix(b"\x1e")) for _ in range(count)]


def ended(condition, seconds=10):
    """Whether a condition that nothing announces comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.slow
def test_they_come_while_the_process_waits_and_only_if_another_process_listens():
    with run(WAITS) as process:
        first, _, third = beats(process, 3)
        (probe,) = psutil.Process(process.pid).children()
        process.communicate()
    assert first["kind"] == third["kind"] == "beat"
    assert 0 < first["computed"] <= third["computed"] < 10
    assert ended(lambda: not probe.is_running())
    with run(WAITS, TFDIST_RECORDS="0") as process:
        assert process.communicate()[1] == b""


@pytest.mark.slow
def test_a_call_that_keeps_the_interpreter_is_reported_from_a_stopped_process():
    with run(HELD) as process:
        parsed = OutputParser().feed(process.communicate(b"1\n")[1])
    held = [record for record in parsed.records if record.get("held")]
    assert held
    assert all(record["kind"] == "beat" and record["computed"] > 0 for record in held)
    assert (parsed.log, parsed.lines) == (b"", [])


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_pause_is_no_sign_of_life_and_harmless(whole_group):
    """Its stacks must not be read when it continues: its threads run then, and the process may crash."""
    kill = os.killpg if whole_group else os.kill
    with run(WAITS) as process:
        beats(process, 1)
        kill(process.pid, signal.SIGSTOP)
        process_state = psutil.Process(process.pid)
        assert ended(lambda: process_state.status() == psutil.STATUS_STOPPED)
        while select.select([process.stderr], [], [], 0)[0]:
            os.read(process.stderr.fileno(), 65536)
        assert not select.select([process.stderr], [], [], 1)[0]
        kill(process.pid, signal.SIGCONT)
        beats(process, 1)
        _, written = process.communicate()
    assert process.returncode == 0
    parsed = OutputParser().feed(written)
    assert (parsed.log, [record for record in parsed.records if record.get("held")]) == (b"", [])


FORKS = "import os, time\nif os.fork() == 0: time.sleep(100)\nsys.stderr.flush(); sys.stdin.read()\n"


@pytest.mark.slow
def test_the_process_beside_a_task_ends_with_it_though_a_child_holds_the_pipe():
    with run(FORKS) as process:
        beats(process, 1)
        task = psutil.Process(process.pid)
        # A child has its parent's command line until it executes another program.
        assert ended(lambda: sum("-S" in child.cmdline() for child in task.children()) == 1 < len(task.children()))
        other, probe = sorted(task.children(), key=lambda child: "-S" in child.cmdline())
        process.kill()
        assert ended(lambda: not probe.is_running())
        other.kill()


def test_a_task_outlives_the_process_beside_it():
    with run(WAITS) as process:
        beats(process, 1)
        (probe,) = psutil.Process(process.pid).children()
        probe.kill()
        assert all(beat["kind"] == "beat" for beat in beats(process, 20))
        process.communicate()
    assert process.returncode == 0


def test_a_system_without_proc_is_asked_by_ps(tmp_path):
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert ended(lambda: liveness_probe.look(process.pid)[0] == "S")
        assert liveness_probe.look(process.pid)[1] == pytest.approx(0, abs=1)
        assert liveness_probe.look(process.pid, tmp_path) == ("S", None)
        process.send_signal(signal.SIGSTOP)
        assert ended(lambda: liveness_probe.look(process.pid)[0] == "T")
        assert liveness_probe.look(process.pid, tmp_path) == ("T", None)
    finally:
        process.kill()
        process.wait()
    assert liveness_probe.look(process.pid)[0] == liveness_probe.look(process.pid, tmp_path)[0] == "X"
