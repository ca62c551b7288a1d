"""Models of Keras's examples of graphs: attention over the edges of one graph, messages within molecules."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

from tests.zoo.case import EXAMPLES, adam, case, floats, integers, labels, random

NODES, ATOM, BOND, MOST = 30, 6, 3, 5


class GraphAttention(layers.Layer):
    """Weighs the neighbors of each node by sums over the edges that lead to it."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shapes: Any) -> None:
        rule = {"initializer": "glorot_uniform", "regularizer": keras.regularizers.l2(1e-4)}
        self.kernel = self.add_weight(shape=(shapes[0][-1], self.units), name="kernel", **rule)
        self.attention = self.add_weight(shape=(2 * self.units, 1), name="attention", **rule)

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        moved = ops.matmul(nodes, self.kernel)
        pairs = ops.reshape(ops.take(moved, edges, axis=0), (-1, 2 * self.units))
        scores = ops.squeeze(ops.leaky_relu(ops.matmul(pairs, self.attention)), -1)
        scores = ops.exp(ops.clip(scores, -2, 2))
        total = tf.math.unsorted_segment_sum(scores, edges[:, 0], NODES)
        weights = scores / (ops.take(total, edges[:, 0]) + 1e-7)
        return tf.math.unsorted_segment_sum(ops.take(moved, edges[:, 1], axis=0) * weights[:, None], edges[:, 0], NODES)


class GraphNetwork(keras.Model):
    """Predicts the classes of nodes of the one graph that it holds. The data is the nodes' numbers."""

    def __init__(self) -> None:
        super().__init__()
        source = random()
        self.nodes = ops.convert_to_tensor(source.normal(size=(NODES, 8)).astype(np.float32))
        self.edges = ops.convert_to_tensor(source.integers(0, NODES, (90, 2)))
        self.before, self.out = layers.Dense(8, "relu"), layers.Dense(3)
        self.attentions = [GraphAttention(4), GraphAttention(4)]

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        x = self.before(nodes)
        heads = [attention([x, edges]) for attention in self.attentions]
        return self.out(ops.relu(ops.concatenate(heads, axis=-1)) + x)

    def train_step(self, data: Any) -> dict[str, Any]:
        indices, classes = data
        with tf.GradientTape() as tape:
            found = ops.take(self([self.nodes, self.edges]), indices, axis=0)
            loss = self.compute_loss(y=classes, y_pred=found)
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(grads, self.trainable_weights)
        return self.compute_metrics(None, classes, found, None)

    def test_step(self, data: Any) -> dict[str, Any]:
        indices, classes = data
        found = ops.take(self([self.nodes, self.edges]), indices, axis=0)
        self.compute_loss(y=classes, y_pred=found)
        return self.compute_metrics(None, classes, found, None)


@case(
    lambda: (random().permutation(NODES)[:EXAMPLES], labels()),
    scored=8,
    example="graph/gat_node_classification",
)
def attention_over_edges():
    model = GraphNetwork()
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")]
    )
    return model


def _molecules() -> Any:
    """Padded atoms, bonds and pairs, with the numbers of atoms."""
    counts = random().integers(2, MOST + 1, EXAMPLES).astype(np.int64)
    pairs = integers(1000, MOST, 2).astype(np.int64) % counts[:, None, None]
    return (floats(MOST, ATOM), floats(MOST, BOND), pairs, counts), random().integers(0, 2, EXAMPLES)


def _merged() -> Any:
    """Returns a function that merges the molecules of a batch to one graph: no input has the size of the batch."""

    def prepared(molecules: Any, y: Any) -> Any:
        atoms, bonds, pairs, counts = molecules
        numbers = tf.range(tf.shape(counts)[0])
        first = tf.cumsum(counts, exclusive=True)
        merged = (
            tf.boolean_mask(atoms, tf.sequence_mask(counts, MOST)),
            tf.reshape(bonds, (-1, BOND)),
            tf.reshape(pairs + first[:, None, None], (-1, 2)),
            tf.repeat(numbers, counts),
        )
        return merged, y

    return prepared


class Messages(layers.Layer):
    """Sends messages along the bonds, whose matrices follow from the bonds' features, and updates atoms by a GRU."""

    def __init__(self, units: int, steps: int) -> None:
        super().__init__()
        self.units, self.steps = units, steps
        self.update = layers.GRUCell(units)

    def build(self, shapes: Any) -> None:
        self.kernel = self.add_weight(shape=(BOND, self.units**2), initializer="glorot_uniform", name="kernel")
        self.bias = self.add_weight(shape=(self.units**2,), initializer="zeros", name="bias")
        self.update.build((None, self.units))

    def call(self, inputs: Any) -> Any:
        atoms, bonds, pairs = inputs
        atoms = ops.pad(atoms, [(0, 0), (0, self.units - ATOM)])
        matrices = ops.reshape(ops.matmul(bonds, self.kernel) + self.bias, (-1, self.units, self.units))
        for _ in range(self.steps):
            sent = ops.squeeze(ops.matmul(matrices, ops.take(atoms, pairs[:, 1], axis=0)[:, :, None]), -1)
            received = tf.math.unsorted_segment_sum(sent, pairs[:, 0], tf.shape(atoms)[0])
            atoms, _ = self.update(received, [atoms])
        return atoms


class PerMolecule(layers.Layer):
    """Returns the mean of each molecule's atoms."""

    def call(self, inputs: Any) -> Any:
        return tf.math.segment_mean(*inputs)


@case(
    _molecules,
    prepare=_merged,
    scored=0,
    tolerance=1e-2,
    why="Keras weighs the reported loss of a batch by its number of atoms, and workers have other batches",
    fit=lambda: {"class_weight": {0: 2.0, 1: 0.5}},
    example="graph/mpnn-molecular-graphs",
)
def messages_in_molecules():
    atoms, bonds = keras.Input((ATOM,), name="atoms"), keras.Input((BOND,), name="bonds")
    pairs, molecule = keras.Input((2,), dtype="int32", name="pairs"), keras.Input((), dtype="int32", name="molecule")
    x = PerMolecule()([Messages(8, 2)([atoms, bonds, pairs]), molecule])
    model = keras.Model([atoms, bonds, pairs, molecule], layers.Dense(1, "sigmoid")(layers.Dense(8, "relu")(x)))
    model.compile(adam(), losses.BinaryCrossentropy(), metrics=[keras.metrics.AUC(name="AUC")])
    return model
