"""What a synchronous worker has to do: compute the gradients of its batch, and update its part of the weights.

Each process trains a model of its own, and exchanges nothing. It updates as many values as a worker's part has: those
of the last variables that fit in, and a variable that makes up for the rest.
"""

import json
import os
from typing import Any

import keras
import tensorflow as tf

from benchmarks.programs.batches import batches
from benchmarks.programs.models import compiled
from benchmarks.workload import FOREVER, Stopwatch, Workload, take_task_index

BETAS, EPSILON, RATE = (0.9, 0.999), 1e-7, 1e-3
workload = Workload.read()
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
stopwatch = Stopwatch(workload, reports=take_task_index() == 0)
model = compiled(keras, workload.size, seed=workload.seed)
variables = [variable.value for variable in model.trainable_variables]
rest = sum(int(tf.size(variable)) for variable in variables) // workers
updated = []
for variable in reversed(variables):
    if int(tf.size(variable)) <= rest:
        updated.append(variable)
        rest -= int(tf.size(variable))
slots = [[tf.Variable(tf.zeros_like(variable)) for _ in BETAS] for variable in updated]
more, *more_slots = [tf.Variable(tf.zeros([rest])) for _ in (None, *BETAS)]
kept = [tf.Variable(tf.zeros_like(variable)) for variable in variables]
"""The gradients: TensorFlow would not compute those that nothing uses."""
count = tf.Variable(0.0)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def update(variable: tf.Variable, slots: list[tf.Variable], gradient: tf.Tensor, updates: tf.Tensor) -> Any:
    """Applies Adam."""
    return tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=slots[0].handle,
        v=slots[1].handle,
        beta1_power=BETAS[0] ** (updates + 1),
        beta2_power=BETAS[1] ** (updates + 1),
        lr=RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        epsilon=EPSILON,
        grad=gradient,
    )


def step(iterator: Any, number: tf.Tensor, total: tf.Tensor, right: tf.Tensor) -> list[tf.Tensor]:
    """Takes a step; returns the next number, and the totals of losses and of right predictions."""
    with tf.control_dependencies([total]):
        examples, target = next(iterator)
    with tf.GradientTape() as tape:
        logits = model(examples, training=True)
        loss = loss_of(target, logits)
    gradients = tape.gradient(loss, variables)
    of = {id(variable): gradient for variable, gradient in zip(variables, gradients, strict=True)}
    updates = count + tf.cast(number, tf.float32)
    pairs = zip(kept, gradients, strict=True)
    with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=to.handle, value=each) for to, each in pairs]):
        largest = max(gradients, key=lambda each: each.shape.num_elements())
        made = [update(each, own, of[id(each)], updates) for each, own in zip(updated, slots, strict=True)]
        made.append(update(more, more_slots, tf.reshape(largest, [-1])[:rest], updates))
    hits = tf.equal(tf.argmax(logits, -1), tf.cast(target, tf.int64))
    with tf.control_dependencies(made):
        return [number + 1, total + loss, right + tf.reduce_mean(tf.cast(hits, tf.float32))]


@tf.function(autograph=False)
def execution(iterator: Any) -> tf.Tensor:
    """Takes the steps of an execution; returns the totals of their losses and of right predictions, shape (2,)."""
    goes_on = lambda number, *_: number < workload.steps_per_execution  # noqa: E731 the loop's condition
    start = [tf.constant(0), tf.constant(0.0), tf.constant(0.0)]
    _, *totals = tf.while_loop(goes_on, lambda *now: step(iterator, *now), start, parallel_iterations=1)
    count.assign_add(float(workload.steps_per_execution))
    return tf.stack(totals)


iterator = iter(batches(workload))
for epoch in range(FOREVER):
    totals = tf.add_n([execution(iterator) for _ in range(workload.steps // workload.steps_per_execution)])
    stopwatch.epoch_ended(epoch, dict(zip(("loss", "accuracy"), (totals / workload.steps).numpy(), strict=True)))
