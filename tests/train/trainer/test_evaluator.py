"""An evaluator scores whole checkpoints, whatever happens to others while it looks at them."""

import json
import threading

import pytest

from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.checkpoint.store import CheckpointFolder, TrainingState
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer import evaluator
from tfdist_cli.train.trainer.config import Validation
from tfdist_cli.train.trainer.evaluator import run_evaluator

pytestmark = pytest.mark.slow

VALIDATION = Validation(lambda shard: batches(*classes(21, seed=1)))


class Looked(CheckpointFolder):
    """A folder whose training ends when it has been looked at some times; notes what is read of it."""

    def __init__(self, path, looks):
        super().__init__(path)
        self.looks, self.ended, self.read = looks, threading.Event(), []

    def steps(self):
        self.looks -= 1
        if self.looks == 0:
            self.ended.set()
        return super().steps()

    def find(self, step):
        self.read.append(step)
        return super().find(step)


@pytest.fixture
def kept(tmp_path):
    step = ModelStep(classifier())
    step.build(batches().element_spec)
    kept = CheckpointFolder(tmp_path / "kept")
    for number in (3, 6, 9):
        kept.save(step, TrainingState(number, 0))
    return Looked(kept.path, 7)


def test_data_without_an_end_cannot_be_scored(tmp_path):
    endless = Validation(lambda shard: batches().repeat())
    with pytest.raises(TrainingError, match="the data to score has no end"):
        run_evaluator(classifier(), endless, CheckpointFolder(tmp_path), None)


def scored(kept, folder):
    """The steps of which it writes a score."""
    run_evaluator(classifier(), VALIDATION, kept, folder, training_ended=kept.ended)
    return [json.loads(line)["step"] for line in (folder / "evaluation.jsonl").read_text().splitlines()]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_checkpoint_gets_no_score_and_is_named_once(kept, tmp_path, log, monkeypatch):
    records = []
    monkeypatch.setattr(evaluator, "emit", lambda kind, **fields: records.append((kind, fields.get("step"))))
    cut(kept.path / "step-00000006" / "variables.index")
    cut(kept.path / "step-00000009" / "variables.index")
    assert scored(kept, tmp_path) == [3]
    for number in (6, 9):
        assert sum(f"step-{number:08d}/variables.index" in line for line in log) == 1
        assert records.count(("checkpoint_damaged", number)) == 1
    assert sorted(path.name for path in kept.path.glob("*step*")) == [f"step-{n:08d}" for n in (3, 6, 9)]


def test_one_that_is_being_replaced_is_scored_under_either_name(kept, tmp_path, log):
    (kept.path / "step-00000006").rename(kept.path / ".replaced-step-00000006")
    assert scored(kept, tmp_path) == [3, 6, 9]
    assert not any("damaged" in line for line in log)


def test_what_has_a_score_is_not_read_again(kept, tmp_path):
    """Whether it has become final is looked up several times a second."""
    assert scored(kept, tmp_path) == [3, 6, 9]
    assert kept.read == [3, 6, 9]
    assert kept.looks < 0


def test_what_an_evaluator_that_was_killed_has_left_is_cleared_away(kept, tmp_path):
    (kept.path / ".evaluator.json.77").write_text("{")
    scored(kept, tmp_path)
    assert not list(kept.path.glob(".evaluator*"))
