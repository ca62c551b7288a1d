"""Trainings in a real standalone Spark of two workers, on this machine."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.lab.spark import spark  # noqa: F401 - a fixture
from tests.support.launching import MIRRORED, RECIPE_YAML, finish, project, start

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PATIENCE = 120
"""A generous timeout: on an idle machine each wait takes a few seconds."""
LONG = RECIPE_YAML.replace("epochs: 4", "epochs: 100000").replace("every_steps: 40", "every_steps: 200")


def launched(spark, folder, *arguments):  # noqa: F811 - the fixture above
    return start(folder, "--on", "spark", "--set", f"spark.master_url={spark.master}", "--run-dir", "run", *arguments)


def await_event(process, folder, name):
    """Waits until the run has an event, by polling: nothing announces it."""
    path, deadline = folder / "run" / "events.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if found := [event for event in events if event["event"] == name]:
            return found[-1]
        time.sleep(0.1)
    raise AssertionError(f"no event {name}")


def started_in(folder):
    """The processes whose current folder is the launch's: those that it has started, also by way of Spark."""
    found = psutil.process_iter(["cwd", "status", "cmdline"])
    return [each.info for each in found if each.info["cwd"] == str(folder) and each.info["status"] != "zombie"]


@pytest.mark.rotates(5, 2)
def test_the_training_survives_an_executor_and_ends_with_ctrl_c(spark, tmp_path):  # noqa: F811
    """One training for all three: a start of Spark's executors takes seconds."""
    folder = project(tmp_path, cluster=MIRRORED, recipe_yaml=LONG)
    process = launched(spark, folder)
    await_event(process, folder, "checkpoint")
    spark.executors()[0].kill()
    resumed = await_event(process, folder, "resumed")
    assert resumed["attempt"] == 2
    assert resumed["step"] >= 200
    process.send_signal(signal.SIGINT)
    done = finish(process, PATIENCE)
    assert done.code == 130, done.stderr
    assert done.report["attempts"] == 2
    assert Path(done.report["checkpoints"][-1]["path"]).is_dir()
    assert not started_in(folder)  # drivers, agents and tasks of both attempts
    assert not psutil.wait_procs(spark.executors(), timeout=20)[1]
