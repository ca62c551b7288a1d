"""Examples of an update, divided among workers of different speeds."""

import itertools

import keras
import numpy as np
import pytest

from tests.support.compare import batches, classifier, difference
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Execution, Rules
from tfdist_cli.train.engine.batch_sizes import BatchSizes, divided
from tfdist_cli.train.model.metrics import MetricTotals

BATCH, STEPS = 8, 6


def observed(sizes, seconds_of, updates):
    """The sizes of some updates, if each worker takes the seconds that a function of its batch returns."""
    used = []
    for _ in range(updates):
        now = [end - begin for begin, end in itertools.pairwise(sizes.bounds)]
        used.append(now)
        sizes.observe(now, [seconds(size) for seconds, size in zip(seconds_of, now, strict=True)])
    return used


def test_a_worker_of_half_the_speed_takes_half_as_many_examples():
    sizes = BatchSizes(3, 20)
    used = observed(sizes, [lambda n: n, lambda n: n, lambda n: 2 * n], 9)
    assert used[0] == [20, 20, 20]
    assert used[-1] == [24, 24, 12]
    assert sizes.bounds == [0, 24, 48, 60]


def test_sizes_change_rarely_and_settle_where_all_take_the_same_time():
    """Part of a step's time does not depend on the batch."""
    seconds_of = [lambda n: 5 + n, lambda n: 5 + 2 * n]
    used = observed(BatchSizes(2, 32), seconds_of, 1000)
    changes = [after for before, after in itertools.pairwise(used) if before != after]
    assert 1 <= len(changes) <= 3
    assert {sum(each) for each in used} == {64}
    one, other = (seconds(size) for seconds, size in zip(seconds_of, used[-1], strict=True))
    assert abs(one - other) / max(one, other) < 0.1


def test_workers_of_nearly_the_same_speed_keep_their_batches():
    used = observed(BatchSizes(2, 50), [lambda n: n, lambda n: 1.03 * n], 100)
    assert used[-1] == [50, 50]


def test_a_pause_of_one_step_changes_nothing():
    sizes = BatchSizes(2, 16)
    for step in range(64):
        sizes.observe([16, 16], [1.0, 9.0 if step % 8 == 3 else 1.0])
    assert sizes.bounds == [0, 16, 32]


def test_updates_that_were_ordered_before_a_change_do_not_count():
    sizes = BatchSizes(2, 16)
    for _ in range(100):
        sizes.observe([20, 12], [1.0, 9.0])
    assert sizes.bounds == [0, 16, 32]


@pytest.mark.parametrize(
    ("sizes", "seconds", "expected"),
    [
        ([10, 10], [1.0, 1.0], [10, 10]),
        ([2, 2], [1.0, 1000.0], [3, 1]),
        ([1, 1, 1], [1.0, 5.0, 9.0], [1, 1, 1]),
        ([7, 7, 7], [1.0, 1.0, 1.001], [7, 7, 7]),
    ],
)
def test_each_worker_keeps_an_example_and_the_sum_stays(sizes, seconds, expected):
    assert divided(sizes, seconds)[0] == expected


def turns(self, sizes, seconds):
    """Observes by changing the sizes with each update, whatever the times."""
    assert len(seconds) == len(sizes) == 2
    assert min(seconds) > 0
    self._sizes = {(8, 8): [3, 13], (3, 13): [15, 1], (15, 1): [8, 8]}[tuple(self._sizes)]


MODELS = {
    "mean": {},
    "sum": {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")},
    "none": {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")},
}


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(("size", "case"), [(3, "mean"), (1, "mean"), (3, "sum"), (3, "none"), (3, "regularized")])
def test_batches_of_any_sizes_train_as_one_process_with_the_whole_batch(case, size, servers, monkeypatch):
    monkeypatch.setattr(BatchSizes, "observe", turns)

    def build():
        keras.utils.set_random_seed(7)
        layer = keras.layers.Dense(4, "relu", kernel_regularizer="l2" if case == "regularized" else None)
        model = classifier(layer, optimizer=keras.optimizers.Adam(0.01))
        if MODELS.get(case):
            model.compile(keras.optimizers.Adam(0.01), MODELS[case]["loss"], metrics=["accuracy"])
        return model

    data = batches().unbatch().batch(BATCH, drop_remainder=True)
    rules = Rules(updates=Updates(mode="sync", batch="proportional"))
    engine, model = local_engine(monkeypatch, servers(2), build, data, rules)
    executions: list[Execution] = []
    for _ in range(2):
        done = sum(len(each.losses) for each in executions)
        executions += engine.run(STEPS, first=done, size=size, adapts=False, pause=NoPause())
    plain = build()
    whole = data.repeat().rebatch(2 * BATCH, drop_remainder=True)
    history = plain.fit(whole, steps_per_epoch=2 * STEPS, shuffle=False, verbose=0).history
    assert difference(plain.variables, model.variables) < 1e-6
    examples = [sum(each.examples[f"worker:{worker}"] for each in executions) for worker in range(2)]
    assert sum(examples) == 2 * STEPS * 2 * BATCH
    assert examples[0] != examples[1]
    totals = MetricTotals(engine._step)
    for execution in executions:
        totals.add(execution.metrics)
    for name, value in totals.logs().items():
        np.testing.assert_allclose(value, history[name][0], rtol=1e-5, err_msg=name)
    losses = np.concatenate([execution.losses for execution in executions])
    np.testing.assert_allclose(np.mean(losses), history["loss"][0], rtol=1e-5)
