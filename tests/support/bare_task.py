"""Launches of plain programs: tests what holds for any task without TensorFlow, in seconds."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.support.launching import left_of

ROOT = Path(__file__).parents[2]


class BareLaunch:
    """`tfdist launch` of a Python program in several workers.

    Args:
        folder: where it runs.
        program: the code; `index` is the task's number in it.
        options: for `tfdist launch`.
        workers: how many tasks.
        stderr: where the launcher's own goes; a file by default.
        before: called in the launcher's process before it starts.
        command: the command of the tasks in place of the program.
    """

    def __init__(
        self, folder, program, *options, workers=2, stderr=None, before=None, command=(sys.executable, "program.py")
    ):
        self.folder = folder
        self.run = folder / "run"
        folder.mkdir(exist_ok=True)
        (folder / "bare.yaml").write_text(
            f"strategy: multi_worker_mirrored\nroles: {{worker: {{replicas: {workers}}}}}\n"
        )
        (folder / "program.py").write_text(PROGRAM + textwrap.dedent(program))
        argv = [sys.executable, "-m", "tfdist_cli", "launch", "bare.yaml", "--run-dir", self.run, "--json", *options]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*map(str, argv), "--", *command],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
                preexec_fn=before,  # noqa: PLW1509 this process has no threads that hold locks
            )

    def finish(self, seconds=60):
        """Waits for its exit.

        Returns:
            Its exit code and its stderr.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"the launch did not end within {seconds} s") from None
        assert left_of(self.process.pid) == []
        err = (self.folder / "err").read_text(errors="replace")
        assert "/tfdist_cli/" not in err, err  # no traceback of ours
        return code, err

    @property
    def report(self):
        """The report that it wrote at its end."""
        return json.loads((self.folder / "out").read_text())

    def log(self, task, stream="stdout", attempt=1):
        return (self.run / f"attempt_{attempt}" / f"worker-{task}" / f"{stream}.log").read_bytes()

    def wait_for_output(self, task, text, seconds=20):
        """Waits until a task has written a text."""
        deadline = time.monotonic() + seconds
        while text not in self._stdout_of(task):
            assert time.monotonic() < deadline, f"worker {task} did not write {text}"
            assert self.process.poll() is None, (self.folder / "err").read_text()[-2000:]
            time.sleep(0.02)  # there is no event to wait for

    def wait_for_job_end(self, seconds=20):
        """Waits until the job has ended; the launcher may still run."""
        deadline = time.monotonic() + seconds
        events = self.run / "events.jsonl"
        while '"phase": "ended"' not in (events.read_text() if events.exists() else ""):
            assert time.monotonic() < deadline, "the job did not end"
            time.sleep(0.02)  # there is no event to wait for

    def _stdout_of(self, task):
        try:
            with (self.run / "attempt_1" / f"worker-{task}" / "stdout.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 100_000))
                return file.read()
        except FileNotFoundError:
            return b""

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def peak_memory(pid):
    """The maximal memory of a process so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


PROGRAM = """
import json, os, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def write(data, stream=1):
    left = memoryview(data)
    while left:
        left = left[os.write(stream, left):]
"""
