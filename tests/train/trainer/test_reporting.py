"""Tests of progress reports."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tfdist_cli.train.engine.base import Execution
from tfdist_cli.train.trainer.reporting import ProgressReporter


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("tfdist_cli.train.trainer.reporting.time.monotonic", lambda: now.seconds)
    return now


@pytest.mark.parametrize("first", [0, 40])
def test_the_first_steps_are_reported_at_once(tmp_path, clock, first):
    progress = ProgressReporter(
        tmp_path, engine=SimpleNamespace(is_chief=True), first=first, total=first + 10, epochs=1
    )
    progress.begin_epoch()
    reported = []
    for done in range(1, 5):
        clock.seconds += 0.4
        steps, examples = {"worker:0": 1}, {"worker:0": 8}
        progress.count(Execution(first + done - 1, np.zeros(1), np.zeros(1), steps, examples, 0, {}))
        if progress.due():
            progress.report("train", first + done, 1, {"loss": 0.5})
            reported.append(done)
    assert reported == [1, 4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps_per_second"]) for line in lines] == [(first + 1, 2.5), (first + 4, 2.5)]


def test_only_the_chief_reports(tmp_path):
    progress = ProgressReporter(tmp_path, engine=SimpleNamespace(is_chief=False), first=0, total=10, epochs=1)
    assert not progress.due()
    progress.report("train", 1, 1, {"loss": 0.5})
    assert not (tmp_path / "metrics.jsonl").exists()
