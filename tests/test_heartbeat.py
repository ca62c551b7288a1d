"""Signs of life, from a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tfdist_cli.launch.output import OutputParser

ROOT = str(Path(__file__).parents[1])
PROGRAM = """
import sys
from tfdist_cli import heartbeat
heartbeat.PERIOD = 0.01
heartbeat.begin()
heartbeat.begin()
sys.stdin.read()
"""


def test_they_come_while_the_process_waits_and_only_if_somebody_listens():
    def run(**environment):
        argv = [sys.executable, "-c", PROGRAM]
        env = os.environ | {"PYTHONPATH": ROOT} | environment
        return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with run(TFDIST_RECORDS="1") as process:
        beats = [json.loads(process.stderr.readline().removeprefix("\x1e")) for _ in range(3)]
        process.communicate()
    assert [beat["kind"] for beat in beats] == ["beat"] * 3
    assert 0 < beats[0]["computed"] <= beats[2]["computed"] < 10
    with run(TFDIST_RECORDS="0") as process:
        assert process.communicate()[1] == ""


HELD = """
import ctypes
from tfdist_cli import heartbeat
heartbeat.PERIOD, heartbeat.HELD_SECONDS = 0.01, 1
heartbeat.begin()
ctypes.PyDLL(None).sleep(2)  # unlike a CDLL, it keeps the interpreter
"""


def test_a_call_that_keeps_the_interpreter_is_told_from_a_stopped_process():
    env = os.environ | {"PYTHONPATH": ROOT, "TFDIST_RECORDS": "1"}
    done = subprocess.run([sys.executable, "-c", HELD], env=env, capture_output=True, check=True)
    parsed = OutputParser().feed(done.stderr.replace(b"0:00:01", b"0:00:05"))
    assert {"kind": "beat", "held": True} in parsed.records
    assert b'File "<string>", line 6 in <module>' in parsed.log
    assert parsed.lines == []
