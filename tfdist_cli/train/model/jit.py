"""Decides whether XLA compiles the train step, by timing it before training on the device that will run it.

The gain of XLA depends on the model and the machine. It fuses many small operations into one. On a CPU, its
convolutions are slower than TensorFlow's own.
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
"""Runs a function on the device that runs the train steps, and returns its result when it is computed."""

_STEPS, _REPEATS = 5, 3
_GAIN = 1.05
"""XLA is chosen if it is faster by at least this factor."""
_DEFAULT_DIMENSION = 32
"""The size of a dimension of the batch that is not known."""


def choose_xla(step: ModelStep, element_spec: Any, setting: Jit, run: Runner) -> bool:
    """Returns whether XLA compiles the train step.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        setting: the `jit` setting; with `auto`, both variants are timed.
        run: runs a function on the device that will run the steps.

    Raises:
        TrainingError: `jit` is true, and XLA cannot compile the model.
    """
    if setting is False:
        return False
    if step.updates_within:
        if setting is True:
            raise TrainingError(
                "XLA cannot compile a step that makes several updates, reads a variable after its update, or assigns a "
                "trainable weight",
                code="xla-cannot-compile",
                hint="remove jit, or set it to auto",
            )
        return False
    try:
        compiled = _timed(_steps(step, element_spec, xla=True), run)
    except tf.errors.OpError as error:
        why = error.message.strip().splitlines()[0]
        if setting is True:
            raise TrainingError(
                f"XLA cannot compile the model: {why}", code="xla-cannot-compile", hint="remove jit, or set it to auto"
            ) from error
        log.info("jit: training without XLA, which cannot compile the model: %s", why)
        return False
    if setting is True:
        return True
    gain = _timed(_steps(step, element_spec, xla=False), run) / compiled
    chosen = gain >= _GAIN
    log.info("jit: training %s XLA; it takes %.2f times as long", "with" if chosen else "without", 1 / gain)
    return chosen


def compiles(function: Any, *args: Any) -> bool:
    """Whether XLA can compile a function, which is traced for that, and not run.

    Args:
        function: a `tf.function` with `jit_compile`.
        args: its arguments: tensors, or `tf.TypeSpec`s of them.

    Raises:
        Exception: Python code of the function fails.
    """

    @tf.function(jit_compile=True, autograph=False)
    def flat(*tensors: tf.Tensor) -> Any:
        return function(*tf.nest.pack_sequence_as(args, tensors, expand_composites=True))

    specs = [
        tf.TensorSpec([size or _DEFAULT_DIMENSION for size in each.shape], each.dtype)
        for each in tf.nest.flatten(args, expand_composites=True)
    ]
    compile_traced = flat.experimental_get_compiler_ir(*specs)
    try:
        compile_traced(stage="hlo")
    except (tf.errors.OpError, ValueError) as error:  # no Python code of the function runs here
        log.debug("XLA does not compile updates: %s", error)
        return False
    return True


def _timed(steps: Callable[[], tf.Tensor], run: Runner) -> float:
    """Returns the shortest time of the steps in seconds, after a first run that compiles them."""
    run(steps)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run(steps)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _steps(step: ModelStep, element_spec: Any, *, xla: bool) -> Callable[[], tf.Tensor]:
    """Returns a function that runs some train steps on synthetic values, one after another."""

    @tf.function(autograph=False)
    def steps() -> tf.Tensor:
        # Random, so that TensorFlow cannot fold the step into constants.
        random = tf.random.uniform([])

        def synthetic(spec: Any) -> tf.Tensor:
            value = tf.strings.as_string(random) if spec.dtype == tf.string else tf.cast(random, spec.dtype)
            sizes = [] if spec.shape.rank is None else [size or _DEFAULT_DIMENSION for size in spec.shape]
            return tf.fill(sizes, value)

        variables = [
            [synthetic(variable) for variable in group] for group in (step.parameters, step.state, step.metrics)
        ]
        batch = tf.nest.map_structure(synthetic, element_spec, expand_composites=True)
        train = step.train_with_xla if xla else step.train
        done = tf.constant(0.0)
        for _ in range(_STEPS):
            with tf.control_dependencies([done]):  # one after another, as in training
                inputs = tf.nest.map_structure(tf.identity, (*variables, batch))
            result = train(*inputs)
            done = result.loss + tf.add_n(
                [_first_value(gradient) for gradient in result.gradients if gradient is not None]
            )
        return done

    return steps


def _first_value(gradient: Any) -> tf.Tensor:
    """Returns one value of a gradient, so that the gradient has to be computed."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.cast(tf.reshape(values, [-1])[0], tf.float32)


def run_locally(steps: Callable[[], tf.Tensor]) -> np.ndarray:
    """The `Runner` of engines whose steps run in this process."""
    return np.asarray(steps())
