"""The recipe `ctr`: clicks from files or generated, and splits without data."""

import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli import Shard
from tfdist_cli.datasets import click_generator
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.task.module import RecipeModule

RECIPE = Path(__file__).parents[2] / "recipes" / "ctr.yaml"


@pytest.fixture
def load(monkeypatch):
    """Returns a function that loads the recipe with changed params."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "ctr", raising=False)

    def load_with(*overrides):
        return RecipeModule.load(load_recipe(RECIPE, ["params.examples={train: 50, test: 40}", *overrides]))

    yield load_with
    del sys.modules["ctr"]


@pytest.mark.slow
def test_files_give_what_the_same_lines_in_memory_give(load, tmp_path):
    click_generator.write(tmp_path, rows=50, test_rows=40)
    module = load(f"params.files={{train: {tmp_path}/train*, test: {tmp_path}/test.tsv}}")
    for split, count in (("train", 50), ("test", 40)):
        (x, y), (known_x, known_y) = (
            next(one.dataset(split, Shard()).batch(100).as_numpy_iterator()) for one in (module, load())
        )
        assert len(y) == count
        np.testing.assert_array_equal(y, known_y)
        for name in known_x:
            np.testing.assert_array_equal(x[name], known_x[name])


@pytest.mark.parametrize("files", ["{train: clicks.tsv}", "clicks.tsv", "[test.tsv]"])
def test_a_split_without_files(load, files):
    with raises(UsageError, "unknown-split") as caught:
        load(f"params.files={files}").dataset("test", Shard())
    assert "'test'" in str(caught.value)
    assert "evaluate=null" in str(caught.value.hint)


def test_a_split_that_is_not_generated(load):
    with raises(UsageError, "unknown-split"):
        load().dataset("validation", Shard())


def test_the_best_auc_is_logged_with_the_models(load, caplog):
    (callback,) = load().callbacks()
    with caplog.at_level(logging.INFO, "tfdist"):
        callback.on_epoch_end(0, {"auc": 0.6})
        callback.on_epoch_end(1, {"auc": 0.6, "val_auc": 0.7})
    best = click_generator.generate(40, "test").best_auc
    [message] = caplog.messages
    assert re.findall(r"0\.\d{4}", message) == ["0.7000", f"{best:.4f}"]


def test_the_best_auc_of_a_users_files_is_not_known(load):
    assert load("params.files={train: a, test: b}").callbacks() == []


def test_without_a_test_there_is_no_best_auc_of_it(load):
    recipe = load()
    del recipe.params["examples"]["test"]
    assert recipe.callbacks() == []
