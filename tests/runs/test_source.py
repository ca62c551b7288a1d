"""Runs by their directory: how their end is awaited."""

import subprocess
import sys
from dataclasses import replace

import psutil

from tests.support.recorded import trained_run
from tfdist_cli.launch.run.history import read_run
from tfdist_cli.runs.source import RunSource

SECONDS = 30
NOTEBOOK = """
import signal, subprocess, sys
launcher = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
print(launcher.pid, flush=True)
signal.pause()
"""
"""A process that has started a launcher, and does not ask whether it has ended."""


def test_a_launcher_that_its_parent_does_not_reap_has_ended(tmp_path):
    source = RunSource(trained_run(tmp_path / "run").path)
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as notebook:
        try:
            view = replace(read_run(source.path), launcher=int(notebook.stdout.readline()))
            assert not source.wait(view, 0)
            notebook.stdin.close()
            assert source.wait(view, SECONDS)
            assert psutil.Process(view.launcher).status() == psutil.STATUS_ZOMBIE
            assert source.wait(view, None)
        finally:
            notebook.kill()
    assert source.wait(view, 0), "there is no such process any more"
