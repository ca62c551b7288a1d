"""A real standalone Spark on this machine: a master and two workers on the loopback interface."""

import os
import shutil
import subprocess
import threading
from contextlib import ExitStack

import psutil
import pytest

from tfdist_cli.launch.spark.launcher import spark_home

_WORKER = ("worker.Worker", "--cores", "2", "--memory", "1g")


def missing():
    """Why Spark cannot run here; empty if it can."""
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        return "needs Java (Debian: openjdk-17-jre-headless)"
    return "" if spark_home() else "needs pyspark: pip install 'tfdist-cli[spark]'"


class Lab:
    """The cluster.

    Args:
        folder: the folder of its state.
        stack: ends the processes.
    """

    def __init__(self, folder, stack):
        self._folder = folder
        self._stack = stack
        master = self._popen("master.Master", "--port", "0")
        self.master = _await_line(master, "Starting Spark master at ").split()[-1]
        self._workers = [
            self._popen(*_WORKER, "--work-dir", folder / name, self.master) for name in ("worker-1", "worker-2")
        ]
        for worker in self._workers:
            _await_line(worker, "Successfully registered")

    def executors(self):
        """The processes of the executors, with those that run most first."""
        found = [child for worker in self._workers for child in psutil.Process(worker.pid).children()]
        found = [child for child in found if child.status() != psutil.STATUS_ZOMBIE]
        return sorted(found, key=lambda executor: -len(executor.children(recursive=True)))

    def _popen(self, name, *arguments):
        command = [f"{spark_home()}/bin/spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
        process = subprocess.Popen(
            [*command, "--webui-port", "0", *map(str, arguments)],
            env={**os.environ, "SPARK_HOME": spark_home(), "SPARK_DAEMON_MEMORY": "256m"},
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)  # a worker ends its executors then
        return process


def _await_line(process, text):
    """Returns the first line of a daemon's log with a text, and reads on."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return line
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    """A standalone cluster of two workers with two cores each."""
    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Lab(tmp_path_factory.mktemp("spark"), stack)
