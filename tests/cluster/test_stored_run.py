"""A training with its run directory and its data in a bucket continues on a machine that has nothing of it."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support.launching import PARAMETER_SERVER, RECIPE, RECIPE_YAML, finish, project, start
from tests.support.ports import free_address
from tests.support.s3 import BUCKET

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200), pytest.mark.rotates(3, 1)]
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


def test_a_training_resumes_after_its_disk_is_gone(s3, tmp_path):
    recipe = f"{RECIPE_YAML}params: {{data: 's3://{BUCKET}/data'}}\n"
    project(tmp_path, PARAMETER_SERVER % "", RECIPE + FROM_FILES, recipe)
    x = np.random.default_rng(0).random((512, 8), np.float32)
    rows = ["".join(f"{value}," for value in row) + f"{row[:4].argmax()}\n" for row in x]
    for part in range(4):
        s3.client.put_object(Bucket=BUCKET, Key=f"data/{part}.csv", Body="".join(rows[part::4]).encode())
    first = launch(tmp_path, 80, s3)
    shutil.rmtree(tmp_path / "runs")
    second = launch(tmp_path, 120, s3)
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


def test_tasks_without_a_launcher_resume_after_their_disk_is_gone(s3, tmp_path):
    """As pods do: the chief uploads the run, and a later one on an empty disk brings it back."""
    folder = project(tmp_path, PARAMETER_SERVER % "", RECIPE, RECIPE_YAML)
    url, tasks = f"s3://{BUCKET}/runs/pods", ("ps:0", "worker:0", "worker:1", "chief:0")
    hosts = {"chief": [str(free_address())], "ps": [str(free_address())]}
    hosts["worker"] = [str(free_address()) for _ in range(2)]
    settings = [f"--set=roles.{role}.hosts={json.dumps(each)}" for role, each in hosts.items()]
    settings += ["--set=roles.worker.replicas=null"]
    environ = os.environ | s3.environment | {"TFDIST_RUN_SECRET": "of a test"}

    def train(steps):
        argv = [
            "--cluster",
            "cluster.yaml",
            "--run-dir",
            url,
            f"--set=train.max_steps={steps}",
            "--set=train.epochs=null",
        ]
        command = [sys.executable, "-m", "tfdist_cli", "role", *argv, *settings, "--task"]
        running = [
            subprocess.Popen([*command, task], cwd=folder, env=environ, stderr=subprocess.PIPE, text=True)
            for task in tasks
        ]
        said = running[-1].communicate(timeout=120)[1]
        for each in running[:-1]:
            each.communicate(timeout=60)
        assert running[-1].returncode == 0, said

    train(80)
    shutil.rmtree(folder / "runs")
    train(120)
    content = s3.client.get_object(Bucket=BUCKET, Key="runs/pods/metrics.jsonl")["Body"].read()
    steps = [json.loads(line)["step"] for line in content.splitlines() if json.loads(line)["split"] == "train"]
    assert (steps[0] <= 80, steps[-1], steps) == (True, 120, sorted(steps)), "one file, in which the second continues"
    assert "runs/pods/checkpoints/step-00000120/state.json" in s3.names("runs/pods/")
    command = [sys.executable, "-m", "tfdist_cli", "status", url, "--json"]
    told = json.loads(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)
    assert (told["state"], told["step"], [each["state"] for each in told["tasks"]]) == ("done", 120, ["done"])
