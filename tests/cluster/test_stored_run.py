"""A training with its run directory, its data and its recipe in a bucket continues on an empty machine."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support.launching import PARAMETER_SERVER, RECIPE, RECIPE_YAML, finish, project, start
from tests.support.s3 import BUCKET
from tests.support.tasks import ROLE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
FROM_FILES = '''

def dataset(params, split, shard):
    """Each worker reads its own files."""
    import tfdist_cli as tfdist

    def parsed(line):
        *x, y = tf.io.decode_csv(line, [0.0] * 8 + [0])
        return tf.stack(x), y

    return tfdist.read_lines(tfdist.list_files(params["data"] + "/*.csv", shard)).map(parsed)
'''


def launch(folder, steps, s3):
    arguments = ["--run-dir", f"s3://{BUCKET}/runs/a", "--track", "csv"]
    arguments += ["--set", f"train.max_steps={steps}", "--set", "train.epochs=null"]
    arguments += ["--set", "train.steps_per_epoch=32"]  # the length of files is not known
    done = finish(start(folder, *arguments, env=s3.environment))
    assert done.code == 0, done.stderr
    return done.report


@pytest.mark.rotates(5, 4)
def test_a_training_resumes_after_its_disk_is_gone(s3, tmp_path, monkeypatch):
    """Its recipe, which is in the bucket, has changed there by then."""
    recipe = f"{RECIPE_YAML}params: {{data: 's3://{BUCKET}/data'}}\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cluster = (PARAMETER_SERVER % "").replace("recipe.yaml", f"s3://{BUCKET}/recipes/four/recipe.yaml")
    (tmp_path / "cluster.yaml").write_text(cluster)
    for name, text in {"recipe.yaml": recipe, "four_classes.py": RECIPE + FROM_FILES}.items():
        s3.client.put_object(Bucket=BUCKET, Key=f"recipes/four/{name}", Body=text.encode())
    x = np.random.default_rng(0).random((512, 8), np.float32)
    rows = ["".join(f"{value}," for value in row) + f"{row[:4].argmax()}\n" for row in x]
    for part in range(4):
        s3.client.put_object(Bucket=BUCKET, Key=f"data/{part}.csv", Body="".join(rows[part::4]).encode())
    first = launch(tmp_path, 80, s3)
    for folder in ("runs", "cache"):
        shutil.rmtree(tmp_path / folder)
    s3.client.put_object(Bucket=BUCKET, Key="recipes/four/four_classes.py", Body=b"raise ValueError('another recipe')")
    second = launch(tmp_path, 120, s3)
    shutil.rmtree(tmp_path / "cache")
    assert (first["step"], first["examples"], second["step"]) == (80, 80 * 16, 120)
    names = {name.removeprefix("runs/a/") for name in s3.names("runs/a/")}
    assert {"checkpoints/step-00000120/state.json", "export/saved_model/saved_model.pb", "export/model.keras"} <= names
    content = s3.client.get_object(Bucket=BUCKET, Key="runs/a/metrics.jsonl")["Body"].read()
    steps = [json.loads(line)["step"] for line in content.splitlines() if json.loads(line)["split"] == "train"]
    assert (steps[0] < 80, steps[-1], steps) == (True, 120, sorted(steps)), "one file, in which the second continues"
    assert "tracking/csv/metrics.csv" in names
    arguments = ["export", f"s3://{BUCKET}/runs/a", "--format", "keras", "--out", str(tmp_path / "m.keras")]
    command = [sys.executable, "-m", "tfdist_cli", *arguments]
    exported = subprocess.run(command, env=os.environ | s3.environment, capture_output=True, check=False)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "m.keras").is_file()


class Pods:
    """Tasks that no launcher follows, each with a disk of its own, as the pods of rendered manifests have.

    Args:
        cluster: makes a cluster.
        folder: of the recipe and the disks.
        s3: the service.
    """

    url = f"s3://{BUCKET}/runs/pods"

    def __init__(self, cluster, folder, s3):
        self._cluster = cluster
        self._folder = project(folder, recipe=RECIPE, recipe_yaml=RECIPE_YAML)
        self._s3 = s3
        self._disks = 0

    def start(self, roles, steps, run="pods"):
        """Starts all tasks on new disks."""
        made = self._cluster(**roles)
        settings = {"train.max_steps": steps, "train.epochs": "null"}
        argv = [*ROLE, "--planned", "--recipe", str(self._folder / "recipe.yaml")]
        argv += [f"--set={key}={value}" for key, value in settings.items()]
        url = self.url.replace("pods", run)
        for task in made.tasks:
            self._disks += 1
            disk = self._folder / f"disk{self._disks}" / "run"
            own = {"TFDIST_RUN_DIR": str(disk), "TFDIST_RUN_URL": url, "TFDIST_RUN_SECRET": "of a test"}
            made.start(argv, task, env={**self._s3.environment, **own})
        return made

    def kill_chief(self, made):
        """Kills the chief when the service has a checkpoint, and takes its disk away. Returns the others' codes."""
        chief, *others = made.tasks
        made.await_that(chief, self.checkpoints)
        os.kill(made.processes[chief].pid, signal.SIGKILL)
        assert made.code_of(chief) == -signal.SIGKILL
        codes = {task: made.code_of(task) for task in others}
        made.await_that(None, lambda: json.loads(self.read("launcher.json"))["state"] == "lost")
        shutil.rmtree(self._folder / f"disk{self._disks - len(others)}")
        return codes

    def checkpoints(self):
        """The steps of the complete checkpoints in the service."""
        return [int(name.split("/")[-2][5:]) for name in self._s3.names("runs/pods/") if name.endswith("state.json")]

    def read(self, name, run="pods"):
        return self._s3.client.get_object(Bucket=BUCKET, Key=f"runs/{run}/{name}")["Body"].read()

    def scores(self, run="pods"):
        """Each step that has metrics of the validation, with their values."""
        lines = [json.loads(line) for line in self.read("metrics.jsonl", run).splitlines()]
        return {line["step"]: line["values"] for line in lines if line["split"] == "test"}


@pytest.mark.rotates(5, 1)
def test_pods_without_a_volume_resume_after_the_chief_is_killed(cluster, s3, tmp_path):
    pods, roles = Pods(cluster, tmp_path / "pods", s3), {"chief": 1, "ps": 1, "worker": 2}
    codes = pods.kill_chief(pods.start(roles, 1_000_000))
    assert set(codes.values()) == {143}, codes
    saved = pods.checkpoints()[-1]
    again = pods.start(roles, saved + 48)
    ended = again.finish(120)
    assert {task: one.code for task, one in ended.items()} == dict.fromkeys(again.tasks, 0), again.outputs()
    assert f"(step {saved})" in ended["chief:0"].err
    lines = [json.loads(line) for line in pods.read("metrics.jsonl").splitlines()]
    steps = [line["step"] for line in lines if line["split"] == "train"]
    assert (steps[0] <= saved, steps[-1], steps) == (True, saved + 48, sorted(set(steps))), "one run"
    argv = [sys.executable, "-m", "tfdist_cli"]
    shown = subprocess.run([*argv, "status", pods.url, "--json"], capture_output=True, check=True)
    told = json.loads(shown.stdout)
    assert (told["state"], told["step"], [each["state"] for each in told["tasks"]]) == ("done", saved + 48, ["done"])
    exported = [*argv, "export", pods.url, "--format", "keras", "--out", str(tmp_path / "m.keras")]
    assert subprocess.run(exported, check=False).returncode == 0


@pytest.mark.rotates(5, 4)
def test_mirrored_pods_resume_exactly(cluster, s3, tmp_path):
    """The first worker is the chief. The others read its checkpoint in the service."""
    pods, roles = Pods(cluster, tmp_path / "pods", s3), {"worker": 2}
    pods.kill_chief(pods.start(roles, 1_000_000))
    steps = pods.checkpoints()[-1] + 48
    for run in ("pods", "whole"):
        made = pods.start(roles, steps, run)
        assert {task: one.code for task, one in made.finish(120).items()} == dict.fromkeys(made.tasks, 0)
    assert pods.scores() == pods.scores("whole")
