"""A training whose run directory is in a bucket continues on a machine that has nothing of it."""

import json
import shutil

import pytest

from tests.support.launching import finish, project, start
from tests.support.s3 import BUCKET

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200), pytest.mark.rotates(3, 0)]
SINGLE = "strategy: single\nroles: {chief: {}}\nrecipe: recipe.yaml\n"


def launch(folder, steps, s3):
    arguments = ["--run-dir", f"s3://{BUCKET}/runs/a", "--track", "csv"]
    arguments += ["--set", f"train.max_steps={steps}", "--set", "train.epochs=null"]
    done = finish(start(folder, *arguments, env=s3.environment))
    assert done.code == 0, done.stderr
    return done.report


def test_a_training_resumes_after_its_disk_is_gone(s3, tmp_path):
    project(tmp_path, SINGLE)
    first = launch(tmp_path, 80, s3)
    shutil.rmtree(tmp_path / "runs")
    second = launch(tmp_path, 120, s3)
    assert (first["step"], second["step"], second["examples"]) == (80, 120, 40 * 16)
    names = s3.names("runs/a/")
    assert {"checkpoints/step-00000120/state.json", "export/saved_model/saved_model.pb", "export/model.keras"} <= {
        name.removeprefix("runs/a/") for name in names
    }
    content = s3.client.get_object(Bucket=BUCKET, Key="runs/a/metrics.jsonl")["Body"].read()
    steps = [json.loads(line)["step"] for line in content.splitlines() if json.loads(line)["split"] == "train"]
    assert (steps[0] <= 80, steps[-1]) == (True, 120), "one file for both launches"
    assert [name for name in names if "/tracking/csv/" in name]
    local = [path.name for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir()]
    assert "step-00000120" in local
