"""Sums the gradients of a step over all replicas: packed as one tensor, and those of large tables as rows."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.engine.mirrored.gradient_packing import GradientPacking
from tfdist_cli.train.engine.mirrored.row_packing import RowPacking, TableGradient
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.engine.table_rows import TableRows
from tfdist_cli.train.optimizers.terms import SummedTerms, summed_terms, tensors_of, whole_table


class GradientReduction:
    """Sums gradients.

    Args:
        collectives: the sums over all replicas.
        rules: how gradients become updates.
        tables: the tables whose gradients are rows.
    """

    def __init__(self, collectives: Collectives, rules: Rules, tables: TableRows) -> None:
        self._collectives, self._rules, self._tables = collectives, rules, tables

    def summed(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Any],
        variables: list[keras.Variable],
        context: Any,
        timer: StepTimer,
    ) -> tuple[list[Any], tf.Tensor]:
        """Sums the gradients over all replicas.

        Args:
            optimizer: makes the update.
            gradients: this replica's, one for each variable: a tensor or a `tf.IndexedSlices`.
            variables: the variables.
            context: the replica context.
            timer: measures the phases.

        Returns:
            The sums, and whether one exceeds the range of the wire's type: bool, shape (). A sum is a tensor or, of
            tables of which rows are updated, a `tf.IndexedSlices` with distinct rows. It is a `SummedTerms` if the
            update takes more of the terms than their sum.
        """
        if self._collectives.replicas == 1:
            return gradients, tf.constant(False)
        sparse = [n for n, each in enumerate(gradients) if isinstance(each, tf.IndexedSlices)]
        taken = self._tables.terms(optimizer, variables) if sparse else {}
        kinds = {n: taken[n] for n in sparse if n in taken}
        gather = self._collectives.gather
        tables = {
            n: TableGradient(
                gradients[n],
                tuple(variables[n].shape),
                distinct=n not in kinds and variables[n] in self._tables,
                terms=kinds.get(n),
            )
            for n in sparse
            if gather and self._tables.pays(variables[n], gradients[n].values.shape[0])
        }
        dense: list[Any] = [None if n in tables else each for n, each in enumerate(gradients)]
        whole = {n: summed_terms(dense[n], kinds[n], int(variables[n].shape[0])) for n in kinds if n not in tables}
        dense = [whole[n].total if n in whole else each for n, each in enumerate(dense)]
        dense += [each.terms for each in whole.values()]
        shapes = [variable.shape for variable in [*variables, *(variables[n] for n in whole)]]
        squares = range(len(variables), len(dense))
        packing = GradientPacking(shapes, self._rules.wire, packed=self._rules.optimized, squares=squares)
        summed, overflow = packing.sums(dense, lambda values: self._collectives.all_reduce_together(values, context))
        sent: Any = packing.size(dense)
        for n, terms in zip(whole, summed[len(variables) :], strict=True):
            summed[n] = SummedTerms(summed[n], terms, kinds[n])
        del summed[len(variables) :]
        if tables and gather:
            rows = RowPacking(self._rules.wire, gather)
            for n, own in zip(tables, rows.sums(list(tables.values())), strict=True):
                summed[n] = own if variables[n] in self._tables else whole_table(own)
            overflow |= rows.overflow
            sent += rows.bytes
        timer.add_bytes(lambda: {"reduced": sent})
        timer.end("all_reduce", tensors_of(summed))
        return summed, overflow
