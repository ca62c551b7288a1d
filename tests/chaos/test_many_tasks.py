"""Two hundred tasks: what a launcher does for each must not grow with their number."""

import json
import signal
import sys
import time

import psutil
import pytest

from tests.support.bare_task import peak_memory

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timed,
    pytest.mark.timeout(100),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]
TASKS = 200
MOST_MEMORY = 100e6


def computed(process):
    times = process.cpu_times()
    return times.user + times.system


def test_two_hundred_tasks_start_and_end_with_little_of_a_core(bare):
    """Measured: 0.5 s of a core to start 200 and 0.2 s to end them; 0.4 s and 0.15 s for 50."""
    launch = bare("", workers=TASKS, command=("sleep", "1000"))
    process = psutil.Process(launch.process.pid)
    events = launch.run / "events.jsonl"
    deadline = time.monotonic() + 40
    while not events.exists() or events.read_bytes().count(b'"started"') < TASKS:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # nothing announces it
    assert (started := computed(process)) < 3
    began = time.monotonic()
    assert launch.process.poll() is None
    time.sleep(2)  # what is measured is a time in which nothing happens
    assert (computed(process) - started) / (time.monotonic() - began) < 0.2
    assert peak_memory(process.pid) < MOST_MEMORY
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish(40)[0] == 130
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert sum(line["event"] == "exited" for line in lines) == TASKS
