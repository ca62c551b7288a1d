"""Another training of a model by the functions of the one before: what was traced and compiled is kept with the model.

Keras keeps a model's function until `compile`. Here, too, the model keeps the engine of its last training, or of an
evaluation that needed one of its own. It is used again unless something has changed that the functions were traced
from: what `compile` sets, the variables, which layers are trained, the type of a batch, or the rules. Other attributes
of layers are those of the trace, as in Keras.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.engine.base import Engine, Rules, Sharing
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import leaf_optimizers
from tfdist_cli.train.tf_compat.keras_model import compiled_as, layers_of
from tfdist_cli.train.tf_compat.keras_optimizer import learning_rate

_ATTRIBUTE = "tfdist_last_training"
"""The attribute of a model that holds its last training, so that both are freed together."""


@dataclass(frozen=True)
class TrainingTraits:
    """What the functions of a training are traced from, in addition to the model itself.

    Args:
        batch: see `type_of`; of a worker's batch.
        rules: how gradients become updates.
        share: what each worker sees of the data.
        tracks_changes: whether dynamic tables record which rows change.
        eagerly: whether TensorFlow runs functions eagerly: it runs none that was traced.
    """

    batch: tuple[Any, list[str]]
    rules: Rules
    share: Sharing
    tracks_changes: bool = False
    eagerly: bool = field(default_factory=tf.config.functions_run_eagerly)


def type_of(element_spec: Any) -> tuple[Any, list[str]]:
    """Returns what can be compared of the type of a batch: the order of keys in a dict makes no difference.

    Args:
        element_spec: its `tf.TypeSpec`s.
    """
    specs = tf.nest.flatten(element_spec)
    return tf.nest.pack_sequence_as(element_spec, [0 for _ in specs]), [repr(each) for each in specs]


@dataclass(frozen=True)
class TracedParts:
    """The parts of a model that a function was traced from.

    Args:
        objects: they are compared by identity.
        trained: of each layer, whether it is trained.
    """

    objects: list[Any] = field(repr=False)
    trained: list[bool]

    @classmethod
    def of(cls, model: keras.Model, *objects: Any) -> TracedParts:
        """Returns those of a model now.

        Args:
            model: the model.
            objects: others than what `compile` has made, its layers and their variables.
        """
        layers = layers_of(model)
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        trained = [bool(layer.trainable) for layer in layers]
        return cls([compiled_as(model), *objects, *variables, *layers], trained)

    def are(self, now: TracedParts) -> bool:
        """Whether they are those of another moment."""
        return (
            self.trained == now.trained
            and len(self.objects) == len(now.objects)
            and all(own is other for own, other in zip(self.objects, now.objects, strict=True))
        )


@dataclass(frozen=True)
class LastTraining:
    """The last training or evaluation of a model.

    Args:
        engine: its engine, closed.
        step: the model's step.
        traits: what its functions were traced from.
        strategy: the strategy that it ran with.
        model: the parts of the model that they were traced from.
    """

    engine: Engine
    step: ModelStep
    traits: TrainingTraits
    strategy: Any
    model: TracedParts

    @classmethod
    def of(cls, engine: Engine, step: ModelStep, traits: TrainingTraits, strategy: Any) -> LastTraining:
        """Returns the training of an engine that is about to train, or to evaluate."""
        return cls(engine, step, traits, strategy, _parts_of(step.model))

    def keep(self) -> None:
        """Keeps it with the model. It has ended, and as it was to."""
        setattr(self.step.model, _ATTRIBUTE, self)

    def is_of(self, model: keras.Model, strategy: Any) -> bool:
        """Whether the model and the workers are those that the functions were made for: they can evaluate it."""
        return self.strategy is strategy and self.engine.is_current and self.model.are(_parts_of(model))

    def suits(self, model: keras.Model, traits: TrainingTraits, strategy: Any) -> bool:
        """Whether its functions are those of another training, too."""
        return self.traits == traits and self.is_of(model, strategy)


def take_last_training(model: keras.Model) -> LastTraining | None:
    """Returns the last training of a model, and forgets it; None if there was none, or it has failed."""
    last = getattr(model, _ATTRIBUTE, None)
    setattr(model, _ATTRIBUTE, None)
    return last


def _parts_of(model: keras.Model) -> TracedParts:
    optimizer = model.optimizer
    rates = [learning_rate(inner) for inner in leaf_optimizers(optimizer)]
    # `model.make_train_function(force=True)` asks for a new trace
    made = [model.train_function, optimizer, *rates, *optimizer.variables, *model.metrics_variables]
    return TracedParts.of(model, *made)
