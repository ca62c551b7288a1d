"""The cases of the zoo: how a model is built, its data, and how its training is compared with that by Keras."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

EXAMPLES, BATCH = 24, 4
"""The number of examples, and the size of a worker's batch."""
CLASSES = 3
EXACT = 1e-5
"""The largest difference of a number, relative for numbers above 1."""

ONE_UPDATE = {"stages": "updates-within-step"}
"""Refused: stages support steps with one update, which assigns no weights itself."""
ONE_LAYER = {"stages": "model-not-splittable"}
"""Refused: only one layer has weights."""

CASES: dict[str, Case] = {}
"""All cases by name."""


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Args:
        build: returns the compiled model.
        data: returns the arrays `(x, y)` or `(x, y, sample_weight)` with `EXAMPLES` examples.
        copies: whether all workers get the same batches. Required if the loss of a batch is not a mean over its
            examples (batch statistics, normalized weights): then the batches of several workers are not equivalent to
            one larger batch.
        tolerance: the largest relative difference; `EXACT` if the arithmetic is the same.
        refused: the code of the error with which the model is refused, by engine, or by "" for all engines.
        why: the reason for `copies`, `tolerance` or `refused`.
        scored: the number of validation examples. With 6, the last batch has 2 examples. With 8, all batches have 4,
            which is required where Keras takes the mean over batches regardless of their sizes. With 0, the training
            has no validation.
        validation: returns the arrays of the validation, if they differ from the first examples of `data`.
        pipeline: returns a Keras layer that is mapped over the batches, and draws random numbers.
        prepare: returns a function that is mapped over the batches, and draws none.
        fit: returns further arguments of both `fit`s, such as callbacks.
        policy: the dtype policy of Keras.
        example: the page below https://keras.io/examples, or of Keras's guides, whose model and training this is.
        traced_at_random: whether Python code draws random values while the model is traced, so that two trainings by
            Keras differ as well.
    """

    build: Callable[[], keras.Model]
    data: Callable[[], Any]
    copies: bool = False
    tolerance: float = EXACT
    refused: dict[str, str] = field(default_factory=dict)
    why: str = ""
    scored: int = 6
    validation: Callable[[], Any] | None = None
    pipeline: Callable[[], Any] | None = None
    prepare: Callable[[], Any] | None = None
    fit: Callable[[], dict[str, Any]] = dict
    policy: str = "float32"
    example: str = ""
    traced_at_random: bool = False

    def refusal(self, engine: str) -> str:
        """Returns the code of the error with which an engine refuses the model; "" if it trains it."""
        return self.refused.get(engine, self.refused.get("", ""))


def case(data: Callable[[], Any], **given: Any) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Adds the model that a function builds to the zoo, under the name of the function."""

    def add(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        add_case(build.__name__, Case(build, data, **given))
        return build

    return add


def add_case(name: str, added: Case) -> None:
    """Adds a model to the zoo."""
    if name in CASES:
        raise ValueError(f"two models of the zoo have the name {name!r}")
    CASES[name] = added


def random() -> np.random.Generator:
    """The random generator of all data, with a fixed seed."""
    return np.random.default_rng(1)


def labels() -> np.ndarray:
    """Integer class labels."""
    return random().integers(0, CLASSES, EXAMPLES).astype(np.int32)


def floats(*shape: int) -> np.ndarray:
    """Normally distributed numbers."""
    return random().normal(size=(EXAMPLES, *shape)).astype(np.float32)


def integers(most: int, *shape: int) -> np.ndarray:
    """Integers below `most`."""
    return random().integers(0, most, (EXAMPLES, *shape)).astype(np.int32)


def vectors() -> Any:
    """8 numbers, 3 classes."""
    return floats(8), labels()


def sequences() -> Any:
    """6 steps of 4 numbers."""
    return floats(6, 4), labels()


def images() -> Any:
    """8 × 8 pixels of 3 colours from 0 to 255."""
    return random().uniform(0, 255, (EXAMPLES, 8, 8, 3)).astype(np.float32), labels()


def volumes() -> Any:
    """4 × 4 × 4 points of 2 numbers."""
    return floats(4, 4, 4, 2), labels()


def tokens() -> Any:
    """6 tokens from a vocabulary of 20, padded with 0 at the end."""
    ids = integers(19, 6) + 1
    ids[np.arange(6) >= 6 - random().integers(0, 3, EXAMPLES)[:, None]] = 0
    return ids, labels()


def words() -> Any:
    """Texts of three words."""
    vocabulary = np.array(["the", "cat", "sat", "on", "a", "mat"])
    return np.array([[" ".join(vocabulary[row])] for row in integers(6, 3)], dtype=object), labels()


def numbers() -> Any:
    """8 numbers and a number to predict."""
    x = floats(8)
    return x, x[:, :1] - 0.5 * x[:, 1:2]


def sgd() -> keras.optimizers.Optimizer:
    """An optimizer that does not amplify rounding errors, unlike those that divide by the size of the gradient.

    It is linear, too: with the same batch on two workers, a row that each looks up once is updated as by one of them.
    """
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> keras.optimizers.Optimizer:
    """Adam with an epsilon above the rounding errors, which it would otherwise amplify where a gradient is zero."""
    return keras.optimizers.Adam(1e-3, epsilon=1e-4)


def classifier(inputs: Any, features: Any, optimizer: Any = None, **compiled: Any) -> keras.Model:
    """A compiled classifier with a dense layer of 3 classes on features of shape (batch, n)."""
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="classes", dtype="float32")(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or sgd(), loss, **({"metrics": ["accuracy"]} | compiled))
    return model


def branches(shape: tuple[int | None, ...], *layers: Any, dtype: str = "float32") -> keras.Model:
    """A classifier on the concatenated outputs of several layers, all applied to the same input."""
    inputs = keras.Input(shape, dtype=dtype)
    features = [_pooled(layer(inputs)) for layer in layers]
    return classifier(inputs, keras.layers.concatenate(features) if len(features) > 1 else features[0])


def _pooled(value: Any) -> Any:
    """Features of shape (batch, 2)."""
    value = keras.ops.cast(value, "float32")
    value = keras.layers.Flatten()(value)
    return keras.layers.Dense(2, "tanh")(value)
