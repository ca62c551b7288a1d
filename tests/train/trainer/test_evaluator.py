"""Tests of the evaluator task: it evaluates undamaged checkpoints while the training changes the folder."""

import json
import threading

import keras
import pytest

from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer import evaluator
from tfdist_cli.train.trainer.config.validation import Validation
from tfdist_cli.train.trainer.evaluator import run_evaluator
from tfdist_cli.train.trainer.reporting import flatten_metrics

pytestmark = pytest.mark.slow

VALIDATION = Validation(lambda shard: batches(*classes(21, seed=1)))


class LimitedFolder(CheckpointFolder):
    """A checkpoint folder whose training ends after `steps` was called some times; records which steps are read."""

    def __init__(self, path, reads_left):
        super().__init__(path)
        self.reads_left, self.ended, self.read = reads_left, threading.Event(), []

    def steps(self):
        self.reads_left -= 1
        if self.reads_left == 0:
            self.ended.set()
        return super().steps()

    def find(self, step):
        self.read.append(step)
        return super().find(step)


@pytest.fixture
def checkpoints(tmp_path):
    step = ModelStep(classifier())
    step.build(batches().element_spec)
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for number in (3, 6, 9):
        checkpoints.save(step, TrainingState(number, 0))
    return LimitedFolder(checkpoints.path, 7)


def test_infinite_data_is_an_error(tmp_path):
    endless = Validation(lambda shard: batches().repeat())
    with raises(TrainingError, "endless-evaluation-data"):
        run_evaluator(classifier(), endless, CheckpointFolder(tmp_path), None)


def evaluated(checkpoints, folder):
    """Returns the steps that the evaluator reports."""
    run_evaluator(classifier(), VALIDATION, checkpoints, folder, training_ended=checkpoints.ended)
    return [json.loads(line)["step"] for line in (folder / "evaluation.jsonl").read_text().splitlines()]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_skipped_and_reported_once(checkpoints, tmp_path, log, monkeypatch):
    records = []
    monkeypatch.setattr(evaluator, "emit", lambda kind, **fields: records.append((kind, fields.get("step"))))
    truncate(checkpoints.path / "step-00000006" / "variables.index")
    truncate(checkpoints.path / "step-00000009" / "variables.index")
    assert evaluated(checkpoints, tmp_path) == [3]
    for number in (6, 9):
        assert sum(f"step-{number:08d}/variables.index" in line for line in log) == 1
        assert records.count(("checkpoint_damaged", number)) == 1
    assert sorted(path.name for path in checkpoints.path.glob("*step*")) == [f"step-{n:08d}" for n in (3, 6, 9)]


def test_a_checkpoint_that_is_being_replaced_is_evaluated(checkpoints, tmp_path, log):
    (checkpoints.path / "step-00000006").rename(checkpoints.path / ".replaced-step-00000006")
    assert evaluated(checkpoints, tmp_path) == [3, 6, 9]
    assert not any("damaged" in line for line in log)


def test_an_evaluated_checkpoint_is_not_read_again(checkpoints, tmp_path):
    """The evaluator checks several times a second whether the newest one has become final."""
    assert evaluated(checkpoints, tmp_path) == [3, 6, 9]
    assert checkpoints.read == [3, 6, 9]
    assert checkpoints.reads_left < 0


def test_the_last_weights_of_a_training_are_evaluated_though_their_step_is(checkpoints, tmp_path):
    """A training that was stopped within an epoch saves its step again, with averaged or restored weights."""
    other = ModelStep(classifier())
    other.build(batches().element_spec)

    class Replaced(LimitedFolder):
        def mark_evaluated(self, steps, scores=None):
            super().mark_evaluated(steps, scores)
            if 9 in steps and not self.ended.is_set():
                self.save(other, TrainingState(9, 0, final=True))
                self.ended.set()

    assert evaluated(Replaced(checkpoints.path, 100), tmp_path) == [3, 6, 9, 9]
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [line["final"] for line in lines] == [False, False, False, True]
    assert lines[2]["values"] != lines[3]["values"]


def test_temporary_files_of_a_killed_evaluator_are_removed(checkpoints, tmp_path):
    (checkpoints.path / ".evaluator.json.77").write_text("{")
    evaluated(checkpoints, tmp_path)
    assert not list(checkpoints.path.glob(".evaluator*"))


class Two(keras.metrics.Sum):
    """Has an array of two values, as `F1Score` has one of each class."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred)

    def result(self):
        return keras.ops.stack([super().result()] * 2)


def test_a_metric_with_several_values_has_one_entry_for_each(tmp_path):
    model = classifier(metrics=[Two(name="two")])
    step = ModelStep(model)
    step.build(batches().element_spec)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(step, TrainingState(3, 0, final=True))
    metrics = run_evaluator(model, VALIDATION, folder, tmp_path)
    line = json.loads((tmp_path / "evaluation.jsonl").read_text())
    assert line["values"] == flatten_metrics(metrics)
    assert {"two[0]", "two[1]"} <= line["values"].keys()
