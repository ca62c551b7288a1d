"""The `DynamicEmbedding` layers of a model in training: what they need of optimizers, engines and checkpoints."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.layers.dynamic_embedding import DynamicEmbedding
from tfdist_cli.train.layers.row_index import RowIndex
from tfdist_cli.train.optimizers.apply import leaf_optimizers
from tfdist_cli.train.optimizers.registry import fused_update_of
from tfdist_cli.train.tf_compat.keras_model import layers_of
from tfdist_cli.train.tf_compat.keras_optimizer import SlotNames, parameters_of

_FULL = re.compile(r"the table (\S+) is full")
"""What the assertion of `RowIndex` says."""


def row_indices(model: keras.Model) -> list[RowIndex]:
    """Returns the indices of a model's dynamic tables."""
    return [layer.index for layer in layers_of(model) if isinstance(layer, DynamicEmbedding) and layer.built]


def index_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of these indices, which checkpoints hold beside the model's own."""
    return [variable for index in row_indices(model) for variable in index.variables]


def track_changes(model: keras.Model) -> bool:
    """Has the tables record which rows change. To be called before steps are traced. Returns whether there are any."""
    indices = row_indices(model)
    for index in indices:
        index.track_changes()
    return bool(indices)


def forget_changes(model: keras.Model) -> None:
    """Takes the current values of all rows for unchanged."""
    for index in row_indices(model):
        if index.tracks_changes:
            index.take_changes()


def attach_slots(model: keras.Model) -> None:
    """Tells each index the slots of its table, which start anew when a row is given to another id."""
    for index in row_indices(model):
        optimizers = leaf_optimizers(model.optimizer)
        index.attach([slot for optimizer in optimizers for slot in _slots_of(optimizer, index.table)])


def _slots_of(optimizer: Any, table: keras.Variable) -> list[tuple[keras.Variable, float]]:
    fused = fused_update_of(optimizer)
    if fused is None or not any(variable is table for variable in parameters_of(optimizer)):
        return []
    first = getattr(optimizer, "initial_accumulator_value", 0.0)
    values = [first if slot.attribute == SlotNames.ACCUMULATORS else 0.0 for slot in fused.slots]
    return list(zip(fused.slot_variables(table), values, strict=True))


def full_table(error: BaseException) -> TrainingError | None:
    """Returns the error to raise in place of one of TensorFlow's if that says that a table is full; otherwise None."""
    found = _FULL.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    if not found:
        return None
    return TrainingError(
        f"the table {found[1]} of a DynamicEmbedding is full: there are more ids than its capacity",
        code="dynamic-embedding-full",
        hint="give the layer a larger capacity, or evict='lru': the training continues from its last checkpoint",
    )


def require_row_updates(model: keras.Model, *, possible: bool) -> None:
    """Checks that a model has no dynamic tables if single rows cannot be updated.

    Args:
        model: the model, built.
        possible: whether the engine and the optimizer can update single rows.

    Raises:
        TrainingError: it has one.
    """
    if row_indices(model) and not possible:
        raise TrainingError(
            "a DynamicEmbedding needs updates of single rows, which this model or its optimizer does not allow",
            code="dynamic-embedding-needs-row-updates",
            hint="use SGD, Adagrad, Adam or another optimizer with fused updates, without use_ema, accumulation or "
            "constraints, and no train_step of the model's own",
        )


def refuse_dynamic_tables(model: keras.Model, strategy: str) -> None:
    """Checks that a model has no dynamic tables.

    Args:
        model: the model, built.
        strategy: why not, for the message.

    Raises:
        TrainingError: it has one.
    """
    if row_indices(model):
        raise TrainingError(
            f"a DynamicEmbedding cannot be trained by {strategy}, only by one process or on parameter servers",
            code="dynamic-embedding-strategy",
            hint="use strategy: parameter_server or single",
        )
