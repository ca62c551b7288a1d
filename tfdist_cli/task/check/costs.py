"""What a training takes: bytes that cross the network in a step, and bytes that each task stores."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfdist_cli.finding import Finding
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.model.embeddings import EmbeddingTables
from tfdist_cli.train.model.train_step import ModelStep, values
from tfdist_cli.train.optimizers.apply import supports_sparse_updates, why_not_fused
from tfdist_cli.train.variables.placement import PlacementRules
from tfdist_cli.train.variables.sharding import variable_bytes


def memory() -> int:
    """Returns the memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_memory() -> int:
    """Returns the most memory that this process has had, in bytes, since `reset_peak` if Linux knows it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Lets `peak_memory` begin anew: initial values took memory that a worker's step does not take."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def bytes_of(variables: Sequence[keras.Variable]) -> int:
    """Returns the size of variables in bytes."""
    return sum(map(variable_bytes, variables))


def bytes_per_ps(step: ModelStep, recipe: Recipe, servers: int) -> list[int]:
    """Returns the bytes that each ps will store of a model, its metrics and the slots of its optimizer."""
    trained = bytes_of(step.parameters) or 1
    own = {id(variable) for variable in step.parameters}
    slots = bytes_of(step.optimizer_variables)
    variables = [
        (tuple(each.shape), size := variable_bytes(each), slots * size // trained if id(each) in own else 0)
        for each in [*step.model.variables, *step.metrics]
    ]
    return PlacementRules(recipe.placement, recipe.shard).planned_bytes(variables, servers)


def part_per_worker(layers: Sequence[tuple[keras.Layer, int]], workers: int) -> list[float]:
    """Returns the part of a model's bytes that each worker holds.

    Args:
        layers: the layers, each with its stage.
        workers: the number of workers, a multiple of that of the stages.
    """
    stages = 1 + max(stage for _, stage in layers)
    stored, seen = [0] * stages, set[int]()
    for layer, stage in layers:
        own = [variable for variable in layer.weights if id(variable) not in seen]
        seen.update(map(id, own))
        stored[stage] += bytes_of(own)
    whole = sum(stored) * (workers // stages) or 1
    return [stored[worker % stages] / whole for worker in range(workers)]


@dataclass(frozen=True)
class WorkerStep:
    """The step of a worker of parameter servers, as far as it computes in the worker.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        rules: how gradients become updates.
    """

    step: ModelStep
    element_spec: Any
    rules: Rules

    def tables(self) -> EmbeddingTables:
        """Returns the tables of which only rows cross the network."""
        rows = self._why_no_rows() is None
        return EmbeddingTables(self.step, self.element_spec, self._min_bytes() if rows else None)

    def take(self, batch: Any, tables: EmbeddingTables) -> tuple[float, dict[str, int]]:
        """Takes the step. Returns its loss, and the bytes that it pulls and pushes."""
        transport = Transport(self.step.parameters, tables.parameter_indices, self.rules.wire)
        sizes, loss = tf.function(self._stepping(transport, tables), autograph=False)(batch)[:2]
        return float(loss), {name: int(size) for name, size in sizes.items()}

    def findings(self, tables: EmbeddingTables, place: str) -> Iterator[Finding]:
        """Yields the large tables that each step fetches completely."""
        whole = list(tables.whole)
        reason = self._why_no_rows()
        if reason and not self.step.own_step:  # such a step has no lookups that could be found
            every = EmbeddingTables(self.step, self.element_spec, self._min_bytes())
            whole = [*every.whole, *((table.variable, reason) for table in every.tables)]
        for table, why in whole:
            yield Finding(
                code="table-fetched-completely",
                level="warning",
                place=place,
                message=f"each step fetches the whole table {table.path}, {variable_bytes(table) / 1e6:,.1f} MB, "
                f"and not only the rows of its batch: {why}",
                fix="read the table by keras.ops.take only, as keras.layers.Embedding does, with ids that come from "
                "the batch, and use an optimizer with row updates; see docs/explanation/variables.md",
            )

    def _min_bytes(self) -> int | None:
        return self.rules.embeddings.min_bytes if self.rules.embeddings else None

    def _why_no_rows(self) -> str | None:
        """Returns why the optimizer cannot update single rows; None if it can."""
        if self.step.own_step:
            return "a train_step of the model's own computes gradients of whole tables"
        optimizer, parameters = self.step.optimizer, self.step.parameters
        if supports_sparse_updates(optimizer, parameters):
            return None
        return why_not_fused(optimizer, parameters) or "the optimizer updates whole variables"

    def _stepping(self, transport: Transport, tables: EmbeddingTables) -> Callable[[Any], tuple[Any, ...]]:
        step = self.step

        def stepping(batch: Any) -> tuple[Any, ...]:
            lookup = tables.lookup([batch])
            pulled = transport.pull(lookup)
            scope = tables.parameter_scope(lookup.positions[0])
            result = step.train(pulled.values, values(step.state), values(step.metrics), batch, scope)
            pushed = transport.push(result.gradients, pulled)
            return transport.sizes(lookup), result.loss, pushed.packed

        return stepping
