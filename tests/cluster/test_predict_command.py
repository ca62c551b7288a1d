"""Processes of `tfdist predict` that are killed are started again: nothing is lost or predicted twice."""

import os
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import pytest

from tfdist_cli.errors import ExitCode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200), pytest.mark.rotates(5, 0)]

ROWS, PART = 100_000, 500


@pytest.fixture
def run(tmp_path):
    """A run with an export that doubles what it is given."""
    (tmp_path / "export").mkdir()
    (tmp_path / "recipe.yaml").write_text("module: none\n")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
    model.export(tmp_path / "export" / "saved_model", verbose=False)
    np.save(tmp_path / "x.npy", np.arange(ROWS, dtype=np.float32)[:, None])
    return tmp_path


def start(run):
    arguments = ["predict", ".", "--data", "x.npy", "--output", "y.npy", "--workers", "2"]
    arguments += ["--part-size", str(PART), "--batch-size", "25"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "tfdist_cli", *arguments]
    with (run / "log").open("a") as log:
        return subprocess.Popen(command, cwd=run, env=environment, stdout=log, stderr=log, start_new_session=True)


def await_parts(run, process, count):
    """Waits until so many parts are done."""
    parts = run / "y.npy.parts"
    while len(list(parts.glob("part-*"))) < count:
        assert process.poll() is None, (run / "log").read_text()
        time.sleep(0.02)  # the parts are files of other processes


def of_first_shard(command, but=None):
    """The processes that predict the first of two shards, but for a killed one."""
    others = [each for each in psutil.Process(command.pid).children() if each != but]
    return [each for each in others if "0/2" in each.cmdline()]


def await_another(run, command, killed):
    """Waits until a process has taken the place of a killed one; only the processes of the command show it."""
    while not of_first_shard(command, killed):
        assert command.poll() is None, (run / "log").read_text()
        time.sleep(0.02)


def test_killed_processes_and_a_killed_command_continue(run):
    command = start(run)
    await_parts(run, command, 5)
    (worker,) = of_first_shard(command)
    worker.kill()
    await_another(run, command, worker)
    await_parts(run, command, 20)
    workers = psutil.Process(command.pid).children()
    command.terminate()
    assert command.wait() == ExitCode.TERMINATED
    assert [len(workers), [each for each in workers if each.is_running()]] == [2, []]
    done = {path: path.stat().st_mtime_ns for path in (run / "y.npy.parts").glob("part-*")}
    assert 20 <= len(done) < ROWS // PART
    again = start(run)
    await_parts(run, again, len(done) + 1)
    assert {path: path.stat().st_mtime_ns for path in done if path.exists()} == done
    assert again.wait() == 0, (run / "log").read_text()
    np.testing.assert_array_equal(np.load(run / "y.npy")[:, 0], 2 * np.arange(ROWS, dtype=np.float32))
    assert not (run / "y.npy.parts").exists()
