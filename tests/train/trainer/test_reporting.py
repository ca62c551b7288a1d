"""Tests of progress reports."""

import json
import select
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


def test_a_training_after_restored_epochs_keeps_their_lines(tmp_path):
    """Keras's `initial_epoch` and `BackupAndRestore`, of which the reporter hears when callbacks have begun."""
    lines = [{"step": step, "epoch": step // 10, "epoch_done": True} for step in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    progress = ProgressReporter(tmp_path, engine=SimpleNamespace(is_chief=True), first=0, total=40, epochs=4)
    progress.begin(20, 2)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == lines[:2]
    assert progress.due(), "the first steps are reported at once"


def test_only_the_chief_reports(tmp_path):
    progress = ProgressReporter(tmp_path, engine=SimpleNamespace(is_chief=False), first=0, total=10, epochs=1)
    assert not progress.due()
    progress.report("train", 1, 1, {"loss": 0.5})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_each_workers_figures_are_sent_at_the_end(clock, monkeypatch):
    sent = []
    monkeypatch.setattr("tfdist_cli.train.trainer.reporting.emit", lambda kind, **fields: sent.append((kind, fields)))
    progress = ProgressReporter(None, engine=SimpleNamespace(is_chief=True), first=40, total=600, epochs=1)
    names = [f"worker:{index}" for index in range(60)]
    clock.seconds += 30.0  # the time in which functions are traced belongs to no worker's rate
    for number in range(3):
        clock.seconds += 0.5
        for name in names if number else names[:-1]:
            steps = 20 if name == "worker:0" else 10
            counts = {name: steps}, {name: 8 * steps}
            progress.count(Execution(0, np.zeros(steps), np.zeros(1), *counts, ended=clock.seconds))
    progress.finish()
    assert [kind for kind, _ in sent] == ["workers", "workers", "result"]
    assert sent[-1][1]["first"] == 40
    workers = {name: figures for _, fields in sent[:-1] for name, figures in fields["workers"].items()}
    assert list(workers) == names
    assert workers["worker:0"] == [60, 480, 40.0]
    assert workers["worker:9"] == [30, 240, 20.0]
    assert workers["worker:59"] == [20, 160, 20.0]  # it joined later


def test_a_rate_is_measured_from_the_ends_of_executions_that_are_counted_together(clock, monkeypatch):
    sent = []
    monkeypatch.setattr("tfdist_cli.train.trainer.reporting.emit", lambda kind, **fields: sent.append((kind, fields)))
    progress = ProgressReporter(None, engine=SimpleNamespace(is_chief=True), first=0, total=3, epochs=1)
    attempt = []
    for number in range(3):
        clock.seconds += 0.5
        counts = {"worker:0": 1}, {"worker:0": 8}
        attempt.append(Execution(number, np.zeros(1), np.zeros(1), *counts, ended=clock.seconds))
    for execution in attempt:
        clock.seconds += 0.001
        progress.count(execution)
    progress.finish()
    assert sent[0][1]["workers"] == {"worker:0": [3, 24, 2.0]}


def test_the_rates_of_many_workers_are_sent_in_several_records(clock, monkeypatch):
    sent = []
    monkeypatch.setattr("tfdist_cli.train.trainer.reporting.emit", lambda kind, **fields: sent.append((kind, fields)))
    progress = ProgressReporter(None, engine=SimpleNamespace(is_chief=True), first=0, total=600, epochs=1)
    steps = {f"worker:{index}": 1 + index for index in range(120)}
    progress.count(Execution(0, np.zeros(1), np.zeros(1), steps, steps, 0, {}))
    clock.seconds += 1.0
    progress.report("train", 600, 1, {"loss": 0.5})
    assert [kind for kind, _ in sent] == ["progress", "rates", "rates"]
    assert all(len(json.dumps({"kind": kind} | fields)) < select.PIPE_BUF for kind, fields in sent)
    assert {name: rate for _, fields in sent for name, rate in fields["workers"].items()} == steps
