"""A new update rule is a module that implements it and a row in the table of modes, and nothing else."""

from contextlib import nullcontext
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tests.support.compare import batches, classifier
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import UPDATE_MODES, UpdateMode, Updates
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.base import Execution, Rules
from tfdist_cli.train.model.train_step import values


class InTurn:
    """The module of the new rule: workers train one after the other, each with a gradient of two batches."""

    def __init__(self, context):
        self.context = context
        self.function = tf.function(self.update, autograph=False)

    @classmethod
    def check(cls, updates, optimizer, workers):
        if workers > 3:
            raise TrainingError("that would take too long", code="too-many-workers")

    @classmethod
    def batches_per_update(cls, updates, workers):
        return 2

    def run(self, iterators, steps, *, first, size, adapts, pause):
        for step in range(first, first + steps):
            worker = step % len(self.context.workers)
            function = partial(self.function, tf.constant(step, tf.int64))
            remote = self.context.coordinator.schedule(lambda own, run=function: run(own), args=(iterators,))
            name = f"worker:{worker}"
            yield Execution(step, remote.fetch()[None], np.zeros(self.context.totals.size), {name: 1}, {name: 16})

    def update(self, step, iterator):
        context, gradients, losses = self.context, [], []
        for _ in range(2):
            batch = next_batch(iterator)
            lookup = context.tables.lookup([batch])
            pulled = context.transport.pull(lookup)
            state = context.seeds.state_for_step(values(context.step.state), step)
            result = context.step.train(pulled.values, state, context.totals.initial_values(), batch)
            gradients.append(context.transport.push(result.gradients, pulled))
            losses.append(result.loss)
        context.apply(context.transport.gradients(gradients), [True] * len(result.gradients))
        return tf.add_n(losses) / 2


@pytest.fixture
def in_turn(monkeypatch):
    """The row of the new rule; the models read the table when they are made."""
    row = UpdateMode("workers train one after the other", f"{__name__}:InTurn", synchronous=False)
    with monkeypatch.context() as patch:
        patch.setitem(UPDATE_MODES, "in_turn", row)
        Updates.model_rebuild(force=True)
        yield Rules(updates=Updates(mode="in_turn"))
    Updates.model_rebuild(force=True)


def test_a_rule_of_one_module_and_one_row_trains(in_turn, servers, monkeypatch):
    keras.utils.set_random_seed(7)
    engine, model = local_engine(
        monkeypatch, servers(2), lambda: classifier(optimizer=keras.optimizers.SGD(0.1)), batches(), in_turn
    )
    executions = list(engine.run(24, first=0, size=1, adapts=False, pause=NoPause()))
    losses = [float(execution.losses[0]) for execution in executions]
    assert [next(iter(execution.steps)) for execution in executions[:4]] == ["worker:0", "worker:1"] * 2
    assert int(model.optimizer.iterations) == 24
    assert np.mean(losses[-6:]) < 0.9 * np.mean(losses[:6])


def test_a_rule_refuses_what_it_cannot_train(in_turn, servers, monkeypatch):
    with raises(TrainingError, "too-many-workers"):
        local_engine(monkeypatch, servers(1), classifier, batches(), in_turn, workers=4)


def test_stale_gradients_of_scaled_losses_are_refused(servers, monkeypatch):
    def scaled():
        return classifier(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))

    for staleness in (None, 1):
        rules = Rules(updates=Updates(mode="bounded" if staleness else "sync", staleness=staleness))
        refused = raises(TrainingError, "loss-scaling-unsupported") if staleness else nullcontext()
        with refused:
            local_engine(monkeypatch, servers(1), scaled, batches(), rules)


@pytest.mark.parametrize("mode", UPDATE_MODES)
def test_every_row_names_the_keys_of_the_mode(mode):
    row = UPDATE_MODES[mode]
    keys = {*row.keys, *(key for key, _ in row.required), *(key for pair in row.exclusive for key in pair)}
    assert keys == set(row.keys) <= set(Updates.model_fields)
