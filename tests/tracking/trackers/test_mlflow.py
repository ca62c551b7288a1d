"""One MLflow run for a job. With MLflow installed, its own store; otherwise an interface like its one, in memory."""

import importlib.util
import json
import sys

import pytest

from tests.support import mlflow_client
from tests.support.recorded import trained_run
from tfdist_cli.tracking.feed import Feed
from tfdist_cli.tracking.tracker import make_tracker


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "tracker"
    folder.mkdir()
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    if importlib.util.find_spec("mlflow") is None:
        mlflow_client.install(monkeypatch)
    return folder


def launch(run, folder, exit_code):
    """Follows the run as a process does that a launch starts."""
    feed = Feed(run.path, make_tracker("mlflow", folder), folder)
    feed.pass_on()
    feed.close(exit_code)


def tracked(folder):
    """The client, and the run."""
    client = sys.modules["mlflow"].MlflowClient()
    return client, client.get_run(json.loads((folder / "run.json").read_text())["run_id"])


def test_one_run_has_all_launches(tmp_path, folder):
    run = trained_run(tmp_path / "digits-1")
    launch(run, folder, exit_code=143)
    client, first = tracked(folder)
    assert (first.info.run_name, first.info.status) == ("digits-1", "KILLED")
    assert client.get_experiment_by_name("digits").experiment_id == first.info.experiment_id
    assert first.data.params["train.epochs"] == "3"
    assert first.data.tags["mlflow.source.git.commit"] == "0123456789abcdef"
    assert first.data.tags["tfdist.keras"] == "3.15.1"
    run.settings(epochs=4)
    run.trained(20, 80, values={"loss": 0.0625, "f1[0]": 0.5})
    launch(run, folder, exit_code=0)
    client, second = tracked(folder)
    assert (second.info.run_id, second.info.status) == (first.info.run_id, "FINISHED")
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    expected = [(line["step"], line["values"]["loss"]) for line in lines if line["split"] == "train"]
    history = client.get_metric_history(second.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == expected
    assert second.data.metrics["train/f1_0_"] == 0.5
    assert second.data.metrics["worker-1/staleness_mean"] == 0.5
    assert second.data.metrics["system/chief-0/cpu"] == 0.5
    # MLflow does not change parameters.
    assert (second.data.params["train.epochs"], second.data.tags["changed.train.epochs"]) == ("3", "4")


@pytest.mark.parametrize(("exit_code", "status"), [(0, "FINISHED"), (1, "FAILED"), (130, "KILLED"), (None, "KILLED")])
def test_the_end_of_the_job(run, folder, exit_code, status):
    launch(run, folder, exit_code)
    assert tracked(folder)[1].info.status == status


def test_more_values_than_a_request_may_have(run, folder):
    (run.path / "recipe.yaml").write_text(json.dumps({"params": {f"p{n}": n for n in range(250)}}))
    run.trained(1, 1, values={f"m{n}": float(n) for n in range(1500)})
    launch(run, folder, exit_code=0)
    data = tracked(folder)[1].data
    assert (data.params["params.p249"], data.metrics["train/m1499"]) == ("249", 1499.0)
