"""Tasks that write without a pause, or unexpected bytes: logs are exact, and the launcher stays small and
responsive."""

import os
import signal
import sys
import time

import pytest

from tests.support.bare_task import peak_memory

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timed,
    pytest.mark.timeout(150),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and waits for readers there only"),
]
MOST_MEMORY = 100e6
ANSWERED = 5.0
"""Seconds from Ctrl-C to the end of the job on a busy machine; on a quiet one it is a fifth of a second."""
FLOOD = """
block = b"".join(b"line %d of what is written without a pause\\n" % number for number in range(5000))
began, steps = time.monotonic(), 0
if index == 0:
    with open("sent", "wb") as copy:
        while time.monotonic() < began + 4:
            write(block)
            copy.write(block)
else:
    while time.monotonic() < began + 3:
        time.sleep(0.02)
        steps += 1
        print("step", steps, flush=True)
    print("last step", flush=True)
    time.sleep(1)
"""
FOREVER = """
write(b"begun\\n")
while True:
    write(b"a line of what is written without a pause\\n" * 1000)
"""


def test_a_flood_is_logged_byte_for_byte_and_slows_no_process_else_down(bare):
    launch = bare(FLOOD)
    launch.wait_for_output(1, b"last step")
    peak = peak_memory(launch.process.pid)
    assert launch.finish()[0] == 0
    sent = (launch.folder / "sent").read_bytes()
    assert len(sent) > 5e6
    assert launch.log(0) == sent
    assert peak < MOST_MEMORY
    assert launch.log(1).count(b"step") > 50, "the other task continues; alone it makes 150 steps"


def test_ctrl_c_is_heard_in_a_flood(bare):
    launch = bare(FOREVER)
    launch.wait_for_output(0, b"without a pause")
    began = time.monotonic()
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130
    assert time.monotonic() - began < ANSWERED


def test_ctrl_c_is_heard_though_no_process_reads_what_the_launcher_writes(bare):
    reading, writing = os.pipe()
    try:
        launch = bare(FOREVER, stderr=writing)
        launch.wait_for_output(0, b"without a pause")
        log = launch.run / "attempt_1" / "worker-0" / "stdout.log"
        size = log.stat().st_size
        while log.stat().st_size < size + 1e6:
            time.sleep(0.02)  # the tasks go on: this is more than the pipe, and all that could wait for it, hold
        began = time.monotonic()
        launch.process.send_signal(signal.SIGINT)
        launch.wait_for_job_end()
        assert time.monotonic() - began < ANSWERED
    finally:
        os.close(writing)
        os.close(reading)  # only now the report at the end notices that it has no reader
    launch.process.wait(20)


def test_whatever_is_written_is_logged_as_it_came(bare):
    """A line that does not end, bytes that are no text, small writes, carriage returns, empty lines."""
    launch = bare(
        r"""
        sent = open("sent", "wb", buffering=0)
        plain = os.write
        def both(stream, data):
            sent.write(data[: (done := plain(stream, data))])
            return done
        os.write = both
        write(b"x" * 5_000_000)
        write(bytes(range(30)) * 1000 + bytes(range(31, 256)) * 5000 + b"\n\xff")
        for number in range(100_000):
            os.write(1, b"ab\n" if number % 7 == 0 else b"c")
        write(b"\r 10%" * 100_000)
        write(b"\n" * 200_000)
        write(b"over")
        time.sleep(0.5)
        """,
        workers=1,
    )
    launch.wait_for_output(0, b"over", seconds=60)
    peak = peak_memory(launch.process.pid)
    assert launch.finish()[0] == 0
    assert launch.log(0) == (launch.folder / "sent").read_bytes()
    assert peak < MOST_MEMORY


def test_records_that_are_none_do_no_harm(bare):
    launch = bare(
        r"""
        for number in range(500):
            write(b'\x1e{"kind": "progress", "step": %d, "metrics": [1]}\n\x1e{}{\n\x1e\x1e\n' % number, 2)
            write(b'\x1e{"kind": "state"}\x1e[1]\n\x1e{"kind": 3}\n\x1e' + b'{"a": ' * 5000 + b"\n", 2)
        """,
        workers=1,
    )
    assert launch.finish()[0] == 0
