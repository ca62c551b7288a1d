"""Whether XLA compiles a model's forward and backward pass: tried before the training, where the steps will run.

What XLA gains depends on the model and the machine: many small operations become one, and on a CPU convolutions become
slower than TensorFlow's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Jit
from tfdist_cli.train.model.train_step import ModelStep

log = logging.getLogger("tfdist")

Runner = Callable[[Callable[[], tf.Tensor]], Any]
"""Runs a function where the training's steps run, and returns its result once it is there."""

_STEPS, _ROUNDS = 5, 3
_GAIN = 1.05
"""How much faster XLA has to be."""
_UNKNOWN = 32
"""What is taken for a size that a batch's shape leaves open."""


def wants_xla(step: ModelStep, element_spec: Any, wanted: Jit, run: Runner) -> bool:
    """Whether steps are to be compiled by XLA.

    Args:
        step: the model's pure functions, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        wanted: what the user asks for; `auto` takes the quicker way of the two.
        run: runs something where the steps will run.

    Raises:
        TrainingError: it is asked for, and XLA cannot compile the model.
    """
    if wanted is False:
        return False
    try:
        compiled = _timed(_steps(step, element_spec, xla=True), run)
    except tf.errors.OpError as error:
        why = error.message.strip().splitlines()[0]
        if wanted is True:
            raise TrainingError(
                f"XLA cannot compile the model: {why}", hint="leave jit out, or let it be auto"
            ) from error
        log.info("jit: XLA cannot compile the model, which trains without it: %s", why)
        return False
    if wanted is True:
        return True
    gain = _timed(_steps(step, element_spec, xla=False), run) / compiled
    chosen = gain >= _GAIN
    log.info("jit: %s XLA, which takes a step in %.2f of the time", "with" if chosen else "without", 1 / gain)
    return chosen


def _timed(steps: Callable[[], tf.Tensor], run: Runner) -> float:
    """Seconds that the steps take at the least; they have run once before, so that they are compiled."""
    run(steps)
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run(steps)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _steps(step: ModelStep, element_spec: Any, *, xla: bool) -> Callable[[], tf.Tensor]:
    """Some steps with values that are made up, one after the other."""

    @tf.function(autograph=False)
    def steps() -> tf.Tensor:
        # Drawn, so that TensorFlow cannot compute in advance what follows from it.
        drawn = tf.random.uniform([])

        def made_up(spec: Any) -> tf.Tensor:
            value = tf.strings.as_string(drawn) if spec.dtype == tf.string else tf.cast(drawn, spec.dtype)
            sizes = [] if spec.shape.rank is None else [size or _UNKNOWN for size in spec.shape]
            return tf.fill(sizes, value)

        given = [[made_up(variable) for variable in group] for group in (step.parameters, step.state, step.metrics)]
        batch = tf.nest.map_structure(made_up, element_spec, expand_composites=True)
        train = step.train_with_xla if xla else step.train
        done = tf.constant(0.0)
        for _ in range(_STEPS):
            with tf.control_dependencies([done]):  # one after the other, as in a training
                begun = tf.nest.map_structure(tf.identity, (*given, batch))
            result = train(*begun)
            done = result.loss + tf.add_n([_any(gradient) for gradient in result.gradients if gradient is not None])
        return done

    return steps


def _any(gradient: Any) -> tf.Tensor:
    """One of a gradient's values, so that it has to be computed."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.cast(tf.reshape(values, [-1])[0], tf.float32)


def runs_here(steps: Callable[[], tf.Tensor]) -> np.ndarray:
    """A runner for engines whose steps run in this process."""
    return np.asarray(steps())
