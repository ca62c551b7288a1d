"""One run of Weights & Biases for a job: the calls of its library."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.recorded import trained_run
from tfdist_cli.tracking.feed import Feed
from tfdist_cli.tracking.tracker import make_tracker


class Run:
    """Records what is written."""

    def __init__(self, **settings):
        self.settings = settings
        self.rows = []
        self.axes = {}
        self.parameters = {}
        self.exit_code = "open"
        self.config = SimpleNamespace(update=self._configure)

    def _configure(self, values, *, allow_val_change):
        assert allow_val_change, "a launch with other settings would fail"
        self.parameters.update(values)

    def define_metric(self, name, *, step_metric):
        self.axes[name] = step_metric

    def log(self, row):
        self.rows.append(row)

    def finish(self, *, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch):
    """The runs, in the order of `wandb.init`."""
    runs = []

    def init(**settings):
        runs.append(Run(**settings))
        return runs[-1]

    fake = ModuleType("wandb")
    vars(fake).update(init=init, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "tfdist_cli.tracking.trackers.wandb", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def launch(run, folder, exit_code):
    folder.mkdir(exist_ok=True)
    feed = Feed(run.path, make_tracker("wandb", folder), folder)
    feed.pass_on()
    feed.close(exit_code)


def test_one_run_has_all_launches(tmp_path, runs):
    run, folder = trained_run(tmp_path / "digits-1"), tmp_path / "tracker"
    launch(run, folder, exit_code=None)
    run.trained(20, 80, values={"loss": 0.0625})
    launch(run, folder, exit_code=0)
    first, second = runs
    assert first.settings["id"] == second.settings["id"]
    assert (first.settings["project"], first.settings["name"], first.settings["resume"]) == (
        "digits",
        "digits-1",
        "allow",
    )
    assert (first.exit_code, second.exit_code) == (1, 0)
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    expected = [(line["step"], line["values"]["loss"]) for line in lines if line["split"] == "train"]
    rows = first.rows + second.rows
    assert [(row["global_step"], row["train/loss"]) for row in rows if "train/loss" in row] == expected
    assert [row["seconds"] for row in rows if "system/chief-0/cpu" in row] == [0, 1, 2]
    assert first.parameters["train.epochs"] == 3
    assert first.parameters["tfdist"]["commit"] == "0123456789abcdef"
    assert first.axes == {"*": "global_step", "system/*": "seconds"}
