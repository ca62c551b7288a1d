"""The judgement of a training follows from the files that it has written."""

import json

import numpy as np
import pytest

from tests.zoo import engines
from tests.zoo.case import Case
from tests.zoo.engines import ENGINES, Result, judge, results, train

RIGHT = {
    "variable/000/kernel": np.array([1.0, 2000.0]),
    "history/loss": np.array([0.5]),
    "history/val_loss": np.ones(1),
}
CASE = Case(lambda: None, lambda: None)


@pytest.fixture
def judged(tmp_path):
    """Judges a model by the result of each trainer: arrays, or an error."""

    def of(key, *written, right=RIGHT, case=CASE, problem=None):
        folders = {name: tmp_path / name for name in ("keras1", "keras2", key)}
        for name in ("keras1", "keras2"):
            put(results(folders[name], ""), right)
        for task, content in zip(ENGINES[key].trainers, written, strict=False):
            put(results(folders[key], task), content)
        return judge(case, "model", key, folders, problem)

    def put(folder, content):
        folder.mkdir(parents=True, exist_ok=True)
        if "message" in content:
            (folder / "model.json").write_text(json.dumps(content))
        else:
            np.savez(folder / "model.npz", **content)

    return of


def changed(name, value):
    return RIGHT | {name: np.array(value)}


def test_equal_numbers_are_right(judged):
    assert judged("single", RIGHT) == Result("ok")


def test_numbers_above_one_may_differ_in_proportion(judged):
    assert judged("single", changed("variable/000/kernel", [1.0, 2000.01])).state == "ok"
    assert judged("single", changed("variable/000/kernel", [1.01, 2000.0])).state == "wrong"


@pytest.mark.parametrize("value", [[0.6], [np.nan], [0.5, 0.5]])
def test_other_numbers_are_wrong(judged, value):
    assert judged("single", changed("history/loss", value)).state == "wrong"


def test_a_number_that_only_one_training_has_is_wrong(judged):
    assert judged("single", RIGHT | {"history/more": np.ones(1)}).state == "wrong"


def test_workers_that_differ_from_each_other_are_wrong(judged):
    assert judged("mirrored1", RIGHT, changed("variable/000/kernel", [1.0, 2000.0001])).state == "wrong"


def test_draws_of_several_workers_have_to_agree_with_each_other_only(judged):
    right = RIGHT | {"seed/001/state": np.array([7, 12])}
    own = right | {"history/loss": np.array([0.9])}
    assert judged("mirrored1", own, own, right=right).state == "random"
    assert judged("single", own, right=right).state == "wrong"


def test_a_layer_that_can_draw_and_does_not_has_to_be_as_by_keras(judged):
    right = RIGHT | {"seed/001/state": np.array([7, 0])}
    other = right | {"history/loss": np.array([0.9])}
    assert judged("mirrored1", other, other, right=right).state == "wrong"
    assert judged("mirrored1", right, right, right=right).state == "ok"


def test_scores_of_copied_batches_are_not_compared(judged):
    case = Case(lambda: None, lambda: None, copies=True)
    other = changed("history/val_loss", [2.0])
    assert judged("mirrored1", other, other, case=case).state == "ok"
    assert judged("single", other, case=case).state == "wrong"


def test_workers_that_race_have_to_count_updates_and_come_close(judged):
    right = {"variable/001/adam/iteration": np.array(12), **RIGHT}
    near = right | {"history/loss": np.array([0.6]), "variable/000/kernel": np.ones(2)}
    assert judged("async2", near, right=right) == Result("close", pytest.approx(0.1))
    assert judged("async2", near | {"history/loss": np.array([1.7])}, right=right).state == "wrong"
    assert judged("async2", near | {"variable/001/adam/iteration": np.array(13)}, right=right).state == "wrong"
    assert judged("async2", near | {"variable/000/kernel": np.array([1, np.nan])}, right=right).state == "wrong"
    assert judged("async2", near | {"history/more": np.ones(1)}, right=right).state == "wrong"


def test_errors(judged):
    refused = {"type": "TrainingError", "message": "cannot", "code": "not-possible"}
    raw = {"type": "KeyError", "message": "'x'", "code": None}
    assert judged("single", refused) == Result("refused", detail="cannot", code="not-possible")
    assert judged("mirrored2", refused, RIGHT).state == "failed"
    assert judged("async", raw) == Result("failed", detail="KeyError: 'x'")


def test_no_result(judged):
    assert judged("sync", problem="hung: no result in 5 s").state == "hung"
    assert judged("sync", problem="exit codes {'chief:0': 1}").state == "failed"


PROGRAM = """
import os, sys, threading
from pathlib import Path
_, engine, folder, *names = sys.argv
for name in names:
    Path(folder, name).touch()
    if name == "hangs":
        threading.Event().wait()
    if name == "exits":
        os._exit(3)
    Path(folder, name + ".json").write_text("{}")
    if name == "fails":
        os._exit(1)
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_models_are_trained_after_one_that_hangs_or_exits(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(engines, "PROGRAM", program)
    problems = train(
        ENGINES["single"], "single", ["one", "exits", "fails", "two", "hangs", "three"], tmp_path / "out", limit=5
    )
    assert problems == {"exits": "exit codes {'the process': 3}", "hangs": "hung: no result in 5 s"}
    assert all((results(tmp_path / "out", "") / f"{name}.json").exists() for name in ("one", "two", "three"))
