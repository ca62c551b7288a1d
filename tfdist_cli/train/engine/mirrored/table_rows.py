"""The tables whose rows a step reads and updates where they are, without passing over the other rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.engine.mirrored.row_packing import rows_are_cheaper
from tfdist_cli.train.model.embeddings import EmbeddingTables
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, values
from tfdist_cli.train.optimizers.apply import changed_by_rows
from tfdist_cli.train.optimizers.kernels import rows_of


@dataclass(frozen=True)
class Parameters:
    """The parameters as a step reads them: of some tables only the rows that its batch looks up.

    Args:
        values: the value of each parameter, or its rows.
        scope: the scope in which the model looks these rows up.
        rows: for each such table, by its index in the parameters, the numbers of its rows, each once, shape (n,).
    """

    values: list[tf.Tensor]
    scope: ParameterScope
    rows: dict[int, tf.Tensor]

    def gradients(self, found: list[Any]) -> list[Any]:
        """Returns the gradients with respect to the parameters, given those with respect to `values`."""
        return [
            tf.IndexedSlices(tf.convert_to_tensor(each), self.rows[n]) if n in self.rows and each is not None else each
            for n, each in enumerate(found)
        ]


class TableRows:
    """Decides which tables a step reads and updates row by row, and which gradients cross as rows.

    Args:
        step: the model's step, built, and with its `jit` set.
        element_spec: the `tf.TypeSpec`s of a replica's batch.
        rules: how gradients become updates.
        collectives: the sums over all replicas.
    """

    def __init__(self, step: ModelStep, element_spec: Any, rules: Rules, collectives: Collectives) -> None:
        self._step, self._replicas = step, collectives.replicas
        gathers = collectives.gather is not None and rules.optimized
        self._least: int | None = rules.embeddings.min_bytes if rules.embeddings and gathers else None
        """The size in bytes from which a table's gradient may cross as rows; None if all cross whole."""
        # XLA would compile each number of rows anew; a step of the model's own computes gradients of whole tables.
        whole = step.jit or step.own_step or step.updates_within or self._least is None
        lookups = {} if whole else step.lookups(element_spec)
        sent = [step.parameters[n] for n, count in lookups.items() if self.sends(step.parameters[n], count)]
        changed = changed_by_rows(step.optimizer, sent) if sent else []
        self._tables = EmbeddingTables(step, element_spec, self._least if changed else None, among=changed)

    def __bool__(self) -> bool:
        return bool(self._tables.tables)

    def __contains__(self, variable: keras.Variable) -> bool:
        """Whether steps read and update rows of a table, each once."""
        return any(table.variable is variable for table in self._tables.tables)

    def sends(self, table: keras.Variable, lookups: int | None) -> bool:
        """Whether a gradient with the rows of some lookups crosses as rows."""
        if self._least is None or len(table.shape) < 2:
            return False
        size = int(np.prod(table.shape)) * tf.as_dtype(table.dtype).size
        return size >= self._least and rows_are_cheaper(int(table.shape[0]), lookups, self._replicas)

    def read(self, batch: Any) -> Parameters:
        """Reads the parameters for a train step with a batch."""
        if not self:
            return Parameters(values(self._step.parameters), nullcontext, {})
        lookup = self._tables.lookup([batch])
        rows = {n: own.numbers for n, own in zip(self._tables.parameter_indices, lookup.rows, strict=True)}
        read = [
            rows_of(variable.value, rows[n]) if n in rows else tf.convert_to_tensor(variable.value)
            for n, variable in enumerate(self._step.parameters)
        ]
        return Parameters(read, self._tables.parameter_scope(lookup.positions[0]), rows)
