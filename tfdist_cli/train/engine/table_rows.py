"""The tables whose rows a step reads and updates where they are, without passing over the other rows."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.model.embeddings import EmbeddingTables, RowReads
from tfdist_cli.train.model.evaluation import ParameterReader
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, values
from tfdist_cli.train.optimizers.apply import changed_by_rows
from tfdist_cli.train.optimizers.terms import Terms
from tfdist_cli.train.variables.rows import rows_of
from tfdist_cli.train.variables.sharding import variable_bytes


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

    def gradients(self, found: list[Any], *, summed: Container[int]) -> list[Any]:
        """Returns the gradients with respect to the parameters.

        Args:
            found: the gradients with respect to `values`.
            summed: the indices of tables whose gradients of a row that was looked up several times are summed.
        """
        return [
            self._of_table(each, self.rows[n], n in summed) if n in self.rows else each for n, each in enumerate(found)
        ]

    @staticmethod
    def _of_table(found: Any, rows: tf.Tensor, summed: bool) -> Any:
        if found is None:
            return None
        if summed or not isinstance(found, tf.IndexedSlices):
            return tf.IndexedSlices(tf.convert_to_tensor(found), rows)
        return tf.IndexedSlices(found.values, tf.gather(rows, found.indices))


class TableRows:
    """Decides which tables a step reads and updates row by row, and which gradients cross as rows.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a replica's batch.
        rules: how gradients become updates. With `jit: true`, steps read whole tables: XLA would compile each number of
            rows anew.
        batches: how many batches an update has.
        gathers: whether other processes take part in an update, which gather the rows of all. If not, whole tables are
            updated on a GPU, which passes over them in little time.
    """

    def __init__(
        self, step: ModelStep, element_spec: Any, rules: Rules, *, batches: int = 1, gathers: bool = False
    ) -> None:
        self._step, self._element_spec, self._batches = step, element_spec, batches
        possible = (gathers or not tf.config.list_logical_devices("GPU")) and rules.optimized
        self._least: int | None = rules.embeddings.min_bytes if rules.embeddings and possible else None
        """The size in bytes from which rows of a table are read, updated or sent; None if all tables are whole."""
        # A step of the model's own computes gradients of whole tables.
        whole = rules.jit is True or step.own_step or step.updates_within or self._least is None
        lookups = {} if whole else step.lookups(element_spec)
        large = [step.parameters[n] for n, count in lookups.items() if self.pays(step.parameters[n], count)]
        changed = changed_by_rows(step.optimizer, large) if large else []
        self._tables = EmbeddingTables(step, element_spec, self._least if changed else None, among=changed)

    def __bool__(self) -> bool:
        return bool(self._tables.tables)

    def __contains__(self, variable: keras.Variable) -> bool:
        """Whether steps read and update rows of a table."""
        return any(table is variable for table in self.variables)

    @property
    def variables(self) -> list[keras.Variable]:
        """The tables of which steps read and update rows."""
        return [table.variable for table in self._tables.tables]

    def pays(self, table: keras.Variable, lookups: int | None) -> bool:
        """Whether the rows of some lookups take less time than the whole table."""
        if self._least is None or len(table.shape) < 2:
            return False
        return variable_bytes(table) >= self._least and rows_are_cheaper(int(table.shape[0]), lookups, self._batches)

    def terms(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> dict[int, Terms]:
        """Returns what an update takes of each term of the gradients that have some, see `ModelStep.terms`."""
        return self._step.terms(self._element_spec, optimizer, variables)

    def summed(self) -> set[int]:
        """Returns the indices of the tables of whose gradients an update takes the sums over a row's lookups alone."""
        if not self:
            return set()
        return set(self._tables.parameter_indices) - set(self._step.terms(self._element_spec))

    def evaluation_reader(self) -> ParameterReader:
        """Returns a function that reads the parameters for test steps; all but rows of tables are read now.

        TensorFlow would copy a table whose rows change for each other read.
        """
        whole = self._tables.evaluated_completely
        tables = [table.variable for table in self._tables.tables if table.parameter_index not in whole]
        parameters, scope = RowReads(tuple(tables)).parameters_of(self._step)
        return lambda _batch: (parameters, scope)

    def read(self, batches: Sequence[Any]) -> list[Parameters]:
        """Reads the parameters for train steps with some batches, once; returns those of each batch."""
        if not self:
            return [Parameters(values(self._step.parameters), nullcontext, {})] * len(batches)
        lookup = self._tables.lookup(batches)
        rows = {n: own.numbers for n, own in zip(self._tables.parameter_indices, lookup.rows, strict=True)}
        read = [
            rows_of(variable.value, rows[n]) if n in rows else tf.convert_to_tensor(variable.value)
            for n, variable in enumerate(self._step.parameters)
        ]
        return [Parameters(read, self._tables.parameter_scope(own), rows) for own in lookup.positions]


def rows_are_cheaper(rows: int, lookups: int | None, batches: int) -> bool:
    """Whether the gradient of a table is summed as rows in less time than as a whole table.

    A replica sends its rows to each other one, and all of them add up the rows of all. Of a whole table, it sends and
    adds up a part.

    Args:
        rows: the rows of the table.
        lookups: the lookups of a batch; None if they are not known, which is assumed to be few.
        batches: the number of batches in an update.
    """
    return lookups is None or lookups * batches <= rows
