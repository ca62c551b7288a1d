"""Models with each of Keras's optimizers and their options."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, optimizers

from tests.zoo.case import Case, add_case, case, classifier, integers, labels, vectors

schedules = optimizers.schedules


class Halved(schedules.LearningRateSchedule):
    """A user-defined schedule."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {}


class Plain(optimizers.Optimizer):
    """A user-defined optimizer."""

    def __init__(self, learning_rate: float = 0.05, **given: Any) -> None:
        super().__init__(learning_rate=learning_rate, name="plain", **given)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, gradient * keras.ops.cast(learning_rate, variable.dtype))


class MySGD(optimizers.SGD):
    """A user-defined subclass of a Keras optimizer."""


def _several() -> optimizers.Optimizer:
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.05), {"hidden.*": optimizers.Adagrad(0.05)})
    )


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.01),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "lion": lambda: optimizers.Lion(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop_centered_with_momentum": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "schedule_free_adamw": lambda: optimizers.ScheduleFreeAdamW(0.01),
    "multi_optimizer": _several,
    "optimizer_of_the_users_own": Plain,
    "derived_optimizer": lambda: MySGD(0.1, momentum=0.9),
    "weight_decay": lambda: optimizers.SGD(0.1, weight_decay=0.02),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.1),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.05),
    "global_clipnorm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "moving_averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "moving_averages_that_overwrite": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "accumulation_and_moving_averages": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3, use_ema=True),
    "accumulation_with_a_schedule": lambda: optimizers.SGD(
        schedules.PiecewiseConstantDecay([3], [0.1, 0.01]), gradient_accumulation_steps=2
    ),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, loss_scale_factor=16.0),
    "loss_scale_optimizer": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=4
    ),
    "cosine_decay": lambda: optimizers.SGD(schedules.CosineDecay(0.01, 6, warmup_target=0.1, warmup_steps=3)),
    "cosine_decay_restarts": lambda: optimizers.SGD(schedules.CosineDecayRestarts(0.1, 3)),
    "exponential_decay": lambda: optimizers.Adam(schedules.ExponentialDecay(0.05, 3, 0.8, staircase=True)),
    "inverse_time_decay": lambda: optimizers.SGD(schedules.InverseTimeDecay(0.1, 3, 0.5)),
    "piecewise_constant_decay": lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01])),
    "polynomial_decay": lambda: optimizers.SGD(schedules.PolynomialDecay(0.1, 4, 0.01, power=2.0, cycle=True)),
    "schedule_of_the_users_own": lambda: optimizers.SGD(Halved()),
}


def _dense(optimizer: Any) -> keras.Model:
    inputs = keras.Input((8,))
    model = classifier(inputs, layers.Dense(6, "tanh", name="hidden")(inputs), optimizer)
    # Keras's fit would build it while tracing a function, where ScheduleFreeAdamW cannot copy the weights.
    model.optimizer.build(model.trainable_variables)
    return model


for _name, _make in OPTIMIZERS.items():
    add_case(_name, Case(lambda make=_make: _dense(make()), vectors))  # type: ignore[misc]


def _embedded(optimizer: Any) -> keras.Model:
    inputs = keras.Input((2,), dtype="int32")
    return classifier(inputs, layers.Flatten()(layers.Embedding(20, 4)(inputs)), optimizer)


def _rows() -> Any:
    """Ids that a batch looks up several times."""
    return integers(20, 2), labels()


for _name in ("sgd", "adam", "rmsprop", "lion", "multi_optimizer"):
    add_case(f"{_name}_of_embeddings", Case(lambda make=OPTIMIZERS[_name]: _embedded(make()), _rows))  # type: ignore[misc]


@case(vectors, policy="mixed_float16", tolerance=1e-2, why="float16 has 11 bits")
def mixed_float16():
    return _dense(optimizers.Adam(0.01))


@case(vectors, policy="mixed_bfloat16", tolerance=5e-2, why="bfloat16 has 8 bits")
def mixed_bfloat16():
    return _dense(optimizers.SGD(0.1))


@case(vectors, policy="bfloat16", tolerance=5e-2, why="bfloat16 has 8 bits")
def bfloat16():
    return _dense(optimizers.SGD(0.1))


@case(vectors, policy="float64")
def float64():
    return _dense(optimizers.Adam(0.01))


@case(vectors)
def weights_with_rules():
    """Every regularizer, constraint and initializer."""
    inputs = keras.Input((8,))
    regularizers, constraints = keras.regularizers, keras.constraints
    rules = [
        {"kernel_regularizer": regularizers.L1(0.01), "kernel_constraint": constraints.MaxNorm(1.0)},
        {"kernel_regularizer": regularizers.L2(0.01), "kernel_constraint": constraints.MinMaxNorm(0.1, 1.0)},
        {"kernel_regularizer": regularizers.L1L2(0.01, 0.01), "kernel_constraint": constraints.NonNeg()},
        {"kernel_regularizer": regularizers.OrthogonalRegularizer(0.01), "kernel_constraint": constraints.UnitNorm()},
        {"kernel_regularizer": Squared(), "kernel_constraint": Bounded(), "activity_regularizer": "l2"},
    ]
    features = [layers.Dense(3, "tanh", **rule)(inputs) for rule in rules]
    return classifier(inputs, layers.concatenate(features))


class Squared(keras.regularizers.Regularizer):
    """A regularizer of a user's own."""

    def __call__(self, x: Any) -> Any:
        return 0.01 * keras.ops.sum(keras.ops.square(x))


class Bounded(keras.constraints.Constraint):
    """A constraint of a user's own."""

    def __call__(self, w: Any) -> Any:
        return keras.ops.clip(w, -0.5, 0.5)


class Half(keras.initializers.Initializer):
    """An initializer of a user's own."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return keras.ops.ones(shape, dtype) * 0.5


@case(vectors)
def initial_values():
    inputs = keras.Input((8,))
    kinds = [
        getattr(keras.initializers, name)(seed=number)
        for number, name in enumerate((
            "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "LecunNormal", "LecunUniform", "Orthogonal",
            "RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling",
        ))
    ]  # fmt: skip
    kinds += [
        keras.initializers.Constant(0.1),
        keras.initializers.Identity(),
        keras.initializers.Ones(),
        keras.initializers.Zeros(),
        Half(),
    ]
    made = layers.concatenate([layers.Dense(2, "tanh", kernel_initializer=kind)(inputs) for kind in kinds])
    waves = layers.Conv1D(6, 4, kernel_initializer=keras.initializers.STFT(window=None))(layers.Reshape((8, 1))(inputs))
    return classifier(inputs, layers.concatenate([made, layers.Flatten()(waves)]))
