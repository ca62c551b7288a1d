"""The values of a run's files under the names that trackers use."""

import json
import math

import pytest

from tests.support.recorded import trained_run
from tfdist_cli.tracking.description import Describer
from tfdist_cli.tracking.measurements import SOURCES, Reader


def read(run, source):
    reader = Reader(run.path)
    lines = (run.path / source).read_text().splitlines()
    return {(m.series, m.name, m.step): m.value for line in lines for m in reader.read(source, json.loads(line))}


def test_reports_of_the_training_and_of_validations(tmp_path):
    found = read(trained_run(tmp_path / "run"), "metrics.jsonl")
    assert found["train", "loss", 40] == found["epoch", "loss", 40] == 0.25
    assert found["train", "steps_per_second", 40] == 21.0
    assert found["test", "loss", 40] == 0.5
    assert found["worker-1", "steps_per_second", 60] == 11.0
    assert (found["worker-1", "staleness_mean", 60], found["worker-1", "dropped", 60]) == (0.5, 1.0)


def test_what_tasks_use_is_placed_by_seconds(tmp_path):
    found = read(trained_run(tmp_path / "run"), "resources.jsonl")
    assert found["system/chief-0", "cpu", 0] == found["system/chief-0", "cpu", 2] == 0.5
    assert (found["system/chief-0", "gpu_0_percent", 1], found["system/chief-0", "gpu_0_memory", 1]) == (80, 1e9)


def test_within_an_epoch_there_is_no_epoch(run):
    run.trained(1, 7, done=False)
    assert {series for series, *_ in read(run, "metrics.jsonl")} == {"train"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_training_that_diverges_is_shown(run, value):
    run.trained(1, 7, values={"loss": value, "name": "text", "flag": True, "none": None})
    found = read(run, "metrics.jsonl")
    assert repr(found["train", "loss", 7]) == repr(value)
    assert {name for _, name, _ in found} == {"loss", "epoch"}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("line", [{}, {"time": "2026-01-01"}, {"time": "2026-01-01", "step": "x", "tasks": {"a": 1}}])
def test_damaged_lines_have_no_values(run, source, line):
    assert list(Reader(run.path).read(source, line)) == []


def test_the_description_has_settings_commit_and_versions_and_no_environment(tmp_path):
    run = trained_run(tmp_path / "digits-7")
    (run.path / "cluster.yaml").write_text("name: digits\nroles: {worker: {replicas: 2, env: {TOKEN: secret}}}\n")
    found = Describer(run.path).read()
    assert (found.name, found.project) == ("digits-7", "digits")
    assert found.parameters["train.epochs"] == 3
    assert found.parameters["roles.worker.replicas"] == 2
    assert found.parameters["roles.worker.env"] == ["TOKEN"]
    assert "secret" not in str(found)
    assert found.facts["commit"] == "0123456789abcdef"
    assert (found.facts["tensorflow"], found.facts["keras"]) == ("2.21.0", "3.15.1")
