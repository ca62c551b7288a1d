"""Trains one model after another, each by an update rule, on its cluster, or in one process with larger batches.

rules.py OUT CASE...

Variables and histories are written to OUT.npz; counts are printed as JSON.
"""

import contextlib
import json
import os
import sys
from collections import defaultdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import unrolling  # type: ignore[import-not-found] # beside this file
from gradient_layers import Looked, every  # type: ignore[import-not-found] # beside this file
from tensorflow.python.data.experimental.ops.testing import sleep

import tfdist_cli as tfdist
from tfdist_cli.errors import TfdistError
from tfdist_cli.spec.sections.updates import EmbeddingRule, LearningRate, ShardRule, Updates
from tfdist_cli.train.cluster.join import join
from tfdist_cli.train.engine.base import WorkerReport
from tfdist_cli.train.engine.batch_sizes import BatchSizes
from tfdist_cli.train.engine.mirrored.memory_updates import MemoryUpdates
from tfdist_cli.train.trainer.reporting import ProgressReporter
from tfdist_cli.train.variables.placement import PlacementRules

with contextlib.suppress(ImportError):  # not for Python 3.10
    import keras_rs  # noqa: F401 it draws random numbers at its import, which no case may do after its seed is set

BATCH, STEPS = 8, 36
SPANNING = ("prefetch", "push 4", "local 3", "proportional")
"""Rules by which the steps of an execution depend on each other."""
ROWS = 50
IN_CLUSTER = "TF_CONFIG" in os.environ
unrolling.at_once()
random = np.random.default_rng(0)
X = random.normal(size=(480, 6)).astype(np.float32)
Y = (X[:, :3] + random.normal(size=(480, 3))).argmax(axis=1)
IDS = random.integers(0, ROWS, (480, 4)).astype(np.int32)
optimizers, layers = keras.optimizers, keras.layers


class Counts(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self):
        super().__init__(name="examples")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_true)[0])

    def result(self):
        return self.count


def dense():
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, "relu"), layers.Dropout(0.0), layers.Dense(3)])


def dropping():
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, "relu"), layers.Dropout(0.3), layers.Dense(3)])


class PartlyUsed(layers.Dense):
    """Has another kernel, which the loss does not depend on."""

    def build(self, input_shape):
        super().build(input_shape)
        self.unused = self.add_weight(shape=self.kernel.shape, name="unused")


def wide():
    """The kernels of its second layer have 2.1 MB: they cross in shared memory."""
    return keras.Sequential([keras.Input((6,)), layers.Dense(724, "relu"), PartlyUsed(724, "relu"), layers.Dense(3)])


def factored():
    """Workers of one host update parts of it; the gradient of the second kernel crosses as two factors."""
    hidden = layers.Dense(256, "relu", kernel_regularizer=keras.regularizers.L2(1e-3)), layers.Dense(64, "relu")
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dropout(0.0), layers.Dense(3)])


def tables():
    ids = keras.Input((4,), dtype="int32")
    own = layers.Embedding(ROWS, 3)(ids[:, 1])
    shared = layers.Embedding(ROWS, 8, mask_zero=True)
    pooled = layers.GlobalAveragePooling1D()(shared(ids))
    features = layers.Concatenate()([pooled, layers.Flatten()(shared(ids[:, :2])), own])
    return keras.Model(ids, layers.Dense(3)(features))


def gradients():
    return keras.Sequential([keras.Input((6,)), *every(), layers.Dense(3)])


def looked():
    ids = keras.Input((4,), dtype="int32")
    return keras.Model(ids, layers.Dense(3)(Looked(layers.Embedding(ROWS, 8))(ids)))


def indexed():
    ids = keras.Input((4,), dtype="int32")
    numbers = layers.IntegerLookup(vocabulary=list(range(ROWS)))(ids)
    return keras.Model(ids, layers.Dense(3)(layers.Flatten()(layers.Embedding(ROWS + 1, 3)(numbers))))


def frozen():
    ids = keras.Input((4,), dtype="int32")
    vectors = layers.Flatten()(layers.Embedding(ROWS, 8, trainable=False)(ids))
    return keras.Model(ids, layers.Dense(3)(layers.BatchNormalization()(vectors)))


class Positioned(layers.Embedding):
    """Adds the row of each position, and scales the sum."""

    def build(self, input_shape=None):
        super().build(input_shape)
        self.positions = self.add_weight(shape=(4, self.output_dim), name="positions")

    def call(self, inputs):
        rows = super().call(inputs) + keras.ops.take(self.positions, keras.ops.arange(4), axis=0)
        return rows * self.output_dim**0.5


def features():
    from keras_rs.layers import DistributedEmbedding, FeatureConfig, TableConfig  # noqa: PLC0415 not for Python 3.10

    ids = keras.Input((4,), dtype="int32")
    # The default initializer is drawn once, at the import: it does not depend on the seed of a case.
    shared = TableConfig("shared", ROWS, 8, initializer="uniform", combiner="sqrtn")
    configs = [FeatureConfig("one", shared, (None,), (None, 8)), FeatureConfig("all", shared, (None, 4), (None, 8))]
    weights = keras.ops.cast(ids, "float32") / ROWS + 1.0
    looked_up = DistributedEmbedding(configs)([ids[:, 1], ids], [weights[:, 1], weights])
    positioned = layers.Flatten()(Positioned(ROWS, 3)(ids))
    return keras.Model(ids, layers.Dense(3)(layers.Concatenate()([*looked_up, positioned])))


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "steady": lambda: optimizers.SGD(optimizers.schedules.PolynomialDecay(0.1, 1, 0.1)),
    "steady doubled": lambda: optimizers.SGD(optimizers.schedules.PolynomialDecay(0.2, 1, 0.2)),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "normed": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "decaying": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "nadam decaying": lambda: optimizers.Nadam(0.01, weight_decay=1.0),
    "clipped": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "nadam": lambda: optimizers.Nadam(0.01, clipnorm=0.1),
}
RULES: dict[str, dict[str, Any]] = {
    "async": {},
    "compensated": {"updates": Updates(delay_compensation=0.5)},
    "prefetch": {"updates": Updates(prefetch=True)},
    "push 4": {"updates": Updates(push_every=4)},
    "local 3": {"updates": Updates(local_steps=3)},
    "sync": {"updates": Updates(mode="sync")},
    "scaled sync": {"updates": Updates(mode="sync"), "learning_rate": LearningRate(scale="linear")},
    "proportional": {"updates": Updates(mode="sync", batch="proportional")},
    "sync 1": {"updates": Updates(mode="sync", aggregate=1)},
    "sync 2": {"updates": Updates(mode="sync", aggregate=2)},
    "bounded 0": {"updates": Updates(mode="bounded", staleness=0)},
    "bounded 2": {"updates": Updates(mode="bounded", staleness=2)},
    "bfloat16": {"wire": "bfloat16"},
    "float16": {"wire": "float16"},
}
NETWORKS = {
    "dense": dense,
    "dropping": dropping,
    "wide": wide,
    "factored": factored,
    "gradients": gradients,
    "tables": tables,
    "looked": looked,
    "indexed": indexed,
    "frozen": frozen,
    "features": features,
}
OF_IDS = "tables", "looked", "indexed", "frozen", "features"


def inputs(network):
    return IDS if network in OF_IDS else X


def batches(shard, network, fold, *options):
    """Batches: `fold` of them, in sequence or one of each worker, are one batch of a single process."""
    x = inputs(network)
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH if IN_CLUSTER else BATCH * fold, drop_remainder=True)
    data = data.shard(shard.count, shard.index).repeat().skip(shard.step)
    if "slow" in options and shard.index == 1:
        data = data.apply(sleep(40_000))
    if "ends" in options and shard.index == 1:
        data = data.take(10)
    if "fails" in options and shard.index == 1:
        bad = data.map(lambda x, y: (tf.debugging.check_numerics(x * np.inf, "my own mistake"), y))
        data = data.take(10).concatenate(bad)
    return data


def take_turns(self, sizes, seconds):
    """Observes updates by changing the sizes of two workers after each execution, whatever the times."""
    assert len(sizes) == len(seconds) == 2
    assert min(seconds) > 0
    if list(sizes) == self._sizes:
        self._sizes = {8: [3, 13], 3: [15, 1], 15: [8, 8]}[sizes[0]]


def train(case):
    """Trains the case `rule/network/optimizer/fold[/option...]`; returns what was counted."""
    rule, network, optimizer, fold, *options = case.split("/")
    keras.utils.clear_session()
    keras.utils.set_random_seed(11)
    given = dict(RULES[rule])
    if "turns" in options:
        BatchSizes.observe = take_turns  # type: ignore[method-assign] # for this process alone
    if "rows" in options or "whole" in options:
        given["embeddings"] = EmbeddingRule(min_bytes=0) if "rows" in options else None
    if cluster.placement:  # only this program changes where variables go from model to model
        cluster.placement._rules = PlacementRules(shard=ShardRule(min_bytes=100) if "spread" in options else None)
    with cluster.strategy.scope():
        model = NETWORKS[network]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy", Counts()])
    counted.clear()
    steps = STEPS * (1 if not IN_CLUSTER or given.get("updates", Updates()).synchronous else int(fold))
    steps += 1 if "odd" in options else 0
    own_times = {"slow", "ends", "fails", "odd", "long", "turns"} & {*options}
    epochs = 1 if "odd" in options else 20 if "long" in options else 2
    steps *= 10 if "long" in options else 1
    history = tfdist.fit(
        model,
        lambda shard: batches(shard, network, int(fold), *options),
        epochs=epochs,
        steps_per_epoch=steps // epochs,
        steps_per_execution=6 if rule in SPANNING or own_times else 2,  # tracing is most of the time
        validation_data=None if "long" in options else (inputs(network)[:61], Y[:61]),
        **given,
    )
    for number, variable in enumerate([*model.variables, *model.optimizer.variables]):
        written[f"{case}/{number:02}"] = variable.numpy()
    for name, found in history.history.items():
        if name != "examples":
            written[f"{case}/history/{name}"] = np.array(found)
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "examples": int(sum(history.history["examples"])),
        "validated": history.history.get("val_examples", [None])[-1],
        **counted,
    }


def note(progress, execution):
    """Adds up the reports of each worker."""
    counted["losses"] += len(execution.losses)
    for worker, steps in execution.steps.items():
        own = counted["workers"].setdefault(worker, defaultdict(int) | {"staleness": []})
        own["steps"] += steps
        own["examples"] += execution.examples.get(worker, 0)
        report = execution.reports.get(worker, WorkerReport(0.0, 0))  # mirrored workers have none
        own["batches"] += report.batches
        own["dropped"] += report.dropped
        own["staleness"] += report.staleness
    count(progress, execution)


class Counted(dict):
    """The sums of the workers' reports in one training."""

    def clear(self):
        super().clear()
        self.update(losses=0, workers={}, runs_in_memory=0)


def begin_in_memory(updates):
    """Notes that mirrored workers update parts, in memory that they share."""
    counted["runs_in_memory"] += 1
    begin(updates)


cluster = join()
counted, written, facts = Counted(), {}, {}
count = ProgressReporter.count
if IN_CLUSTER:
    ProgressReporter.count = note  # type: ignore[method-assign] # for this process alone
    begin, MemoryUpdates.begin = MemoryUpdates.begin, begin_in_memory  # type: ignore[method-assign] # as above
for name in sys.argv[2:]:
    try:
        facts[name] = train(name)
    except TfdistError as error:
        facts[name] = {"code": error.code, "error": str(error)}
    except tf.errors.OpError as error:
        facts[name] = {"error": f"{type(error).__name__}: {error.message}"}
np.savez(f"{sys.argv[1]}.npz", **written)
print(json.dumps(facts))
