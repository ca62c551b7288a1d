"""Profiles of the tasks of a training, which goes on and counts each step."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import PARAMETER_SERVER, RECIPE, finish, project, start
from tfdist_cli.launch.run.history import read_run
from tfdist_cli.launch.run.requests import Answers, LocalContact, ProfileRequest, post_request
from tfdist_cli.protocol.run_files import read_lines

pytestmark = pytest.mark.cluster

CALLBACKS = '''

class Until(keras.callbacks.Callback):
    """Trains until the test has what it wants."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = pathlib.Path(os.environ["TFDIST_RUN_DIR"], "enough").exists()


def callbacks(params):
    return [Until()]
'''
RECIPE_YAML = "module: four_classes\ntrain: {epochs: 100000, batch_size: 16}\n"


def profile(run, task):
    """Starts `tfdist profile` for a task of the run."""
    argv = [sys.executable, "-m", "tfdist_cli", "profile", run, "--task", task, "--json"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_step(launched, run, step):
    """Waits until the training has reported a step."""
    while not any(line["step"] >= step for line in read_lines(run / "metrics.jsonl")):
        assert launched.poll() is None, launched.communicate()
        time.sleep(0.05)


@pytest.mark.rotates(5, 0)
def test_tasks_are_profiled_while_the_training_goes_on(tmp_path):
    recipe = "import os\nimport pathlib\n" + RECIPE + CALLBACKS
    folder = project(tmp_path, PARAMETER_SERVER % "", recipe=recipe, recipe_yaml=RECIPE_YAML)
    run = folder / "run"
    launched = start(folder, "--run-dir", run)
    try:
        await_step(launched, run, 320)
        commands = [profile(run, "worker:1"), profile(run, "chief")]
        assert "worker:1" in commands[0].stderr.readline()  # it is accepted
        again = ProfileRequest("again", "worker:1", 2.0)
        view = read_run(run)
        answers = Answers(LocalContact(view), view, again.request, "profiled", time.monotonic() + 30)
        with post_request(run, again):
            refused = answers.first("profile")
        assert refused is not None
        assert refused["code"] == "profile-in-progress"
        worker, chief = (json.loads(command.communicate()[0]) for command in commands)
        (run / "enough").touch()
        done = finish(launched)
    finally:
        launched.kill()
    assert done.code == 0, done.stderr
    for each in (worker, chief):
        assert 2.0 <= each["recorded"] < 4.0
        assert each["bytes"] == Path(each["path"]).stat().st_size
    assert worker["path"].endswith("/worker-1.xplane.pb")
    assert any("MatMul" in each["name"] for each in worker["operations"])
    assert not any("MatMul" in each["name"] for each in chief["operations"])  # the workers take the steps
    step, workers = done.report["step"], done.report["workers"].values()
    assert step % 32 == 0
    assert sum(each["steps"] for each in workers) == step
    assert sum(each["examples"] for each in workers) == 16 * step
