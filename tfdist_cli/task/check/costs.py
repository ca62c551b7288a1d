"""What a training takes: bytes that cross the network in a step, and bytes that each task stores."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfdist_cli.finding import Finding
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.engine.mirrored.gradient_reduction import GradientReduction
from tfdist_cli.train.engine.parameter_server.asynchronous.local_steps import LocalSteps
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.engine.table_rows import TableRows
from tfdist_cli.train.model.embeddings import EmbeddingTables, Lookup
from tfdist_cli.train.model.train_step import ModelStep, values
from tfdist_cli.train.optimizers.apply import supports_sparse_updates, why_not_fused
from tfdist_cli.train.optimizers.terms import Terms
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
        """Takes the step. Returns its loss, and the bytes that it pulls and pushes.

        If parameters cross once in several steps, it is a step's part of them. Rows that several of these steps look up
        are counted for each: they cross at most so often.
        """
        transport = Transport(
            self.step.parameters,
            tables.parameter_indices,
            self.rules.wire,
            packed=self.rules.optimized,
            terms=self._terms(),
        )
        whole, sizes, loss = tf.function(self._stepping(transport, tables), autograph=False)(batch)[:3]
        steps = self.rules.updates.steps_per_round
        return float(loss), {name: int(size - whole[name]) + int(whole[name]) // steps for name, size in sizes.items()}

    def _terms(self) -> dict[int, Terms]:
        """What updates take of terms, as far as it crosses with the gradients."""
        updates = self.rules.updates
        none = updates.local_steps > 1 or updates.delay_compensation or self.step.updates_within
        return {} if none else self.step.terms(self.element_spec)

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
        local = self.rules.updates.local_steps > 1
        sizes = self._local_steps(transport, tables).sizes if local else transport.sizes

        def stepping(batch: Any) -> tuple[Any, ...]:
            lookup = tables.lookup([batch])
            no_rows = Lookup([replace(each, count=tf.constant(0)) for each in lookup.rows], lookup.positions)
            pulled = transport.pull(lookup)
            scope = tables.parameter_scope(lookup.positions[0])
            result = step.train(pulled.values, values(step.state), values(step.metrics), batch, scope)
            pushed = transport.push(result.gradients, pulled)
            return sizes(no_rows), sizes(lookup), result.loss, pushed.packed

        return stepping

    def _local_steps(self, transport: Transport, tables: EmbeddingTables) -> LocalSteps:
        return LocalSteps(self.step.optimizer, self.step.parameters, tables.parameter_indices, transport, None)


class _OwnValues(Collectives):
    """Stands for the sums over replicas: each is the value of one of them.

    Args:
        replicas: how many there are.
        gathers: whether rows of tables would be gathered.
    """

    def __init__(self, replicas: int, *, gathers: bool) -> None:
        self.replicas = replicas
        self._gathers = gathers

    @property
    def gather(self) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]] | None:
        return (lambda numbers, rows: (numbers, rows)) if self._gathers else None

    def all_reduce_together(self, values: Sequence[tf.Tensor], context: Any) -> list[tf.Tensor]:  # noqa: ARG002
        return list(values)


class _Bytes(StepTimer):
    """Adds up bytes, and measures no time."""

    def __init__(self) -> None:
        super().__init__(on=False)
        self.sums = [tf.constant(0.0, tf.float64)]

    def add_bytes(self, sizes: Callable[[], Mapping[str, Any]]) -> None:
        self.sums += [tf.cast(size, tf.float64) for size in sizes().values()]


@dataclass(frozen=True)
class MirroredStep:
    """The step of a mirrored worker, up to its update.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a worker's batch.
        rules: how gradients become updates.
        workers: how many workers there are.
        gathers: whether they have direct connections, over which rows of tables cross.
    """

    step: ModelStep
    element_spec: Any
    rules: Rules
    workers: int
    gathers: bool

    def reduced(self, batch: Any) -> int:
        """Takes the step. Returns the bytes of gradients that the worker adds to the sums of all."""
        return int(tf.function(self._stepping, autograph=False)(batch))

    def _stepping(self, batch: Any) -> tf.Tensor:
        step = self.step
        rules = self.rules if self.gathers else replace(self.rules, embeddings=None)
        tables = TableRows(step, self.element_spec, rules, batches=self.workers, gathers=True)
        reduction = GradientReduction(_OwnValues(self.workers, gathers=self.gathers), rules, tables)
        sent = _Bytes()

        def update(optimizer: Any, gradients: list[Any], variables: list[Any], _assigned: Any) -> list[tf.Tensor]:
            if optimizer is not None:
                reduction.summed(optimizer, gradients, variables, None, sent)
            return values(variables)

        (read,) = tables.read([batch])
        result = step.train(read.values, values(step.state), values(step.metrics), batch, read.scope, update=update)
        if not step.updates_within:
            gradients = read.gradients(result.gradients, summed=tables.summed())
            update(step.optimizer, gradients, step.parameters, ())
        return tf.add_n(sent.sums)
