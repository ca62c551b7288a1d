"""What a model of the zoo is: how it is built, what it is trained on, and how its training is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

EXAMPLES, BATCH = 24, 4
"""24 examples in batches of 4 per worker."""
CLASSES = 3
EXACT = 1e-5
"""The largest difference of a number, relative to the number where that is larger than 1."""

CASES: dict[str, Case] = {}
"""All models, by name."""


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Args:
        build: makes the compiled model.
        data: makes the arrays `(x, y)` or `(x, y, sample_weight)` of `EXAMPLES` examples.
        copies: whether all workers are given the same batches. What such a model computes from a batch is not a mean
            over its examples (batch statistics, weights that are normalized), so that batches of several workers do
            not add up to a larger one.
        tolerance: the largest relative difference, `EXACT` where the arithmetic is the same.
        refused: by engine, or by "" for all, a part of the sentence with which the model is refused.
        why: the reason for `copies`, `tolerance` or `refused`.
        scored: how many examples the validation has. Of 6 the last batch has 2; of 8 all batches have 4, as they have
            to where Keras takes the mean over batches, whatever their sizes.
        pipeline: makes a Keras layer that the data passes through, batch by batch.
        fit: more arguments of `tfdist.fit`.
        policy: Keras's dtype policy.
        traced_at_random: whether Python draws what the model computes when it is traced, so that two trainings by Keras
            differ, too.
    """

    build: Callable[[], keras.Model]
    data: Callable[[], Any]
    copies: bool = False
    tolerance: float = EXACT
    refused: dict[str, str] = field(default_factory=dict)
    why: str = ""
    scored: int = 6
    pipeline: Callable[[], Any] | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    policy: str = "float32"
    traced_at_random: bool = False

    def refusal(self, engine: str) -> str:
        """A part of the sentence with which an engine refuses the model; empty where it trains it."""
        return self.refused.get(engine, self.refused.get("", ""))


def case(data: Callable[[], Any], **given: Any) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Puts the model that a function builds into the zoo, under the function's name."""

    def add(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        add_case(build.__name__, Case(build, data, **given))
        return build

    return add


def add_case(name: str, added: Case) -> None:
    """Puts a model into the zoo."""
    if name in CASES:
        raise ValueError(f"two models of the zoo are called {name!r}")
    CASES[name] = added


def random() -> np.random.Generator:
    """The source of all data, the same for all models."""
    return np.random.default_rng(1)


def labels() -> np.ndarray:
    """Classes as integers."""
    return random().integers(0, CLASSES, EXAMPLES).astype(np.int32)


def floats(*shape: int) -> np.ndarray:
    """Numbers around 0."""
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
    """6 tokens of a vocabulary of 20, of which 0 is padding at the end."""
    ids = integers(19, 6) + 1
    ids[np.arange(6) >= 6 - random().integers(0, 3, EXAMPLES)[:, None]] = 0
    return ids, labels()


def different(most: int, each: int) -> np.ndarray:
    """Integers below `most`, so many for each example, of which no batch has one twice.

    Of rows that a batch looks up twice, TensorFlow's Keras squares each gradient by itself where its gradients are
    sparse, as they are in one process; see docs/reference/python-api.md.
    """
    size, source = 2 * BATCH, random()
    rows = [source.permutation(most)[: size * each].reshape(size, each) for _ in range(EXAMPLES // size)]
    return np.concatenate(rows).astype(np.int32)


def words() -> Any:
    """Texts of three words."""
    vocabulary = np.array(["the", "cat", "sat", "on", "a", "mat"])
    return np.array([[" ".join(vocabulary[row])] for row in integers(6, 3)], dtype=object), labels()


def numbers() -> Any:
    """8 numbers and a number to predict."""
    x = floats(8)
    return x, x[:, :1] - 0.5 * x[:, 1:2]


def sgd() -> keras.optimizers.Optimizer:
    """An optimizer that does not make rounding larger, as one that divides by the gradient's size does."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def classifier(inputs: Any, features: Any, optimizer: Any = None, **compiled: Any) -> keras.Model:
    """A compiled model with a dense layer of 3 classes on some features, shape (batch, n)."""
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="classes", dtype="float32")(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or sgd(), loss, **({"metrics": ["accuracy"]} | compiled))
    return model


def branches(shape: tuple[int | None, ...], *layers: Any, dtype: str = "float32") -> keras.Model:
    """A classifier whose features are those of several layers, each beside the others on the same input."""
    inputs = keras.Input(shape, dtype=dtype)
    features = [_pooled(layer(inputs)) for layer in layers]
    return classifier(inputs, keras.layers.concatenate(features) if len(features) > 1 else features[0])


def _pooled(value: Any) -> Any:
    """Features as (batch, 2), with weights before and after what was computed."""
    value = keras.ops.cast(value, "float32")
    value = keras.layers.Flatten()(value)
    return keras.layers.Dense(2, "tanh")(value)
