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
        self, gradients: list[Any], variables: list[keras.Variable], context: Any, timer: StepTimer
    ) -> tuple[list[Any], tf.Tensor]:
        """The gradients summed over all replicas, and whether they exceed the range of the wire's type."""
        if self._collectives.replicas == 1:
            return gradients, tf.constant(False)
        tables = {
            n: TableGradient(each, tuple(variable.shape), distinct=variable in self._tables)
            for n, (each, variable) in enumerate(zip(gradients, variables, strict=True))
            if isinstance(each, tf.IndexedSlices) and self._tables.pays(variable, each.values.shape[0])
        }
        dense = [None if n in tables else each for n, each in enumerate(gradients)]
        shapes = [variable.shape for variable in variables]
        packing = GradientPacking(shapes, self._rules.wire, packed=self._rules.optimized)
        summed, overflow = packing.sums(dense, lambda value: self._collectives.all_reduce(value, context))
        sent: Any = packing.size(dense)
        if tables and self._collectives.gather:
            rows = RowPacking(self._rules.wire, self._collectives.gather)
            for n, own in zip(tables, rows.sums(list(tables.values())), strict=True):
                summed[n] = own if variables[n] in self._tables else tf.convert_to_tensor(own)
            overflow |= rows.overflow
            sent += rows.bytes
        timer.add_bytes(lambda: {"reduced": sent})
        timer.end("all_reduce", summed)
        return summed, overflow
