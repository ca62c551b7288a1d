"""The stages of a check: import the module, build the model, draw batches, take a step. Each may find a problem."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TfdistError
from tfdist_cli.finding import Finding
from tfdist_cli.protocol.check_report import ReportWriter
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.strategies import computes_gradients
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.check import costs
from tfdist_cli.task.check.examples import digests, same_examples
from tfdist_cli.task.data import RecipeData
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.task.recipe import checkpoints_of_run, training_arguments
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.data import mismatch
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.engine.base import Rules, Sharing
from tfdist_cli.train.engine.mirrored.collectives import Membership
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.engine.model_parallel.stages import divided, measured_times
from tfdist_cli.train.engine.parameter_server.update_rule import check_updates_within, rule_of
from tfdist_cli.train.model.embeddings import unused_table_optimizers
from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.stages import layers_in_order
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.op_errors import is_users
from tfdist_cli.train.trainer.arguments import as_callbacks
from tfdist_cli.train.trainer.checks import check_callbacks, check_targets, check_validation, data_errors_explained
from tfdist_cli.train.trainer.config.data_length import check_ends, known_steps_of_pass, worker_shards
from tfdist_cli.train.trainer.config.training import OPEN_END, TrainingConfig
from tfdist_cli.train.trainer.config.training_arguments import TrainingArguments
from tfdist_cli.train.trainer.evaluate import Watch

MOST_SHARDS = 16
"""The most shards of which a batch is drawn."""


class _Stop(Exception):
    """A problem was found without which the next stage makes no sense."""


@dataclass(frozen=True)
class _Replicas:
    """Stands for a cluster's strategy, of which the length of an epoch depends on the number of replicas only."""

    num_replicas_in_sync: int


class _NoPause:
    """The pause of a single step."""

    def wanted(self) -> bool:
        return False

    def agreed(self) -> bool:
        return False

    def ends(self) -> bool:
        return False


class RecipeCheck:
    """The check of a recipe on a cluster.

    Args:
        cluster: the cluster.
        recipe: the recipe.
        folder: a folder that stands for the run's directory.
        report: where everything is reported.
        tasks: check the data of these tasks only; of all if there are none.
    """

    def __init__(
        self, cluster: Cluster, recipe: Recipe, folder: Path, report: ReportWriter, tasks: Sequence[TaskId] = ()
    ) -> None:
        self._cluster, self._recipe, self._report, self._folder = cluster, recipe, report, folder
        self._tasks = set(tasks)
        addresses = {task: Address("127.0.0.1", 1) for task in cluster.tasks if task.traits.listens}
        trainer = next(task for task in cluster.tasks if task.traits.trains)
        self._environment = Environment(cluster.strategy, trainer, addresses, folder)
        computing = [task for task in cluster.tasks if computes_gradients(cluster.strategy, task.role)]
        staged = self._environment.traits.staged
        self._workers = computing if staged else []
        """The workers that each hold a part of the model."""
        self._trainers = [trainer] if staged else computing
        self._place = recipe.module
        self._program: object = None
        """The recipe's module, as Python has imported it."""

    @property
    def _context(self) -> ClusterContext:
        stages = self._recipe.stage_count(len(self._workers)) if self._workers else 1
        strategy: Any = _Replicas(len(self._workers) // stages or len(self._trainers))
        return ClusterContext(self._environment, strategy)

    def run(self) -> None:
        """Runs all stages, up to the first one that finds an error which the others depend on."""
        base = costs.memory()
        with contextlib.suppress(_Stop):
            with self._stage("importing the recipe's module"):
                self._module = RecipeModule.load(self._recipe)
            self._program = self._module.module
            self._place = str(self._module.module.__file__)
            self._step = self._built_model()
            self._draw_shards()
            with self._stage("reading the first batch", "dataset"):
                config = self._configure()
                data = checked(config.data, Shard(0, max(1, len(self._shards)))).prefetch(1)
                batch, spec = next(iter(data)), data.element_spec
                check_targets(self._step.model, spec)
            with self._stage("building the model", "model"):
                self._step.build(spec)
            self._report_model(config, batch, spec)
            self._divide(batch)
            self._take_steps(config, batch, spec, base)

    def _built_model(self) -> ModelStep:
        with self._stage("making the model", "model"):
            keras.utils.set_random_seed(self._recipe.train.seed)
            return ModelStep(self._module.model())

    @cached_property
    def _data(self) -> RecipeData:
        return RecipeData(self._recipe, self._module, self._step.model)

    @cached_property
    def _share(self) -> Sharing:
        """What each worker sees of the data."""
        coordinated = self._environment.traits.has_ps
        return self._arguments.share_of(self._data.source.one_pass(), coordinated=coordinated)

    @cached_property
    def _arguments(self) -> TrainingArguments:
        checkpoints = checkpoints_of_run(self._recipe, self._folder)
        return training_arguments(self._recipe, self._module, checkpoints)

    @cached_property
    def _shards(self) -> list[Shard]:
        return worker_shards(self._context, self._share, len(self._trainers))

    def _draw_shards(self) -> None:
        """Draws a batch of each worker's shard."""
        drawn, sizes = [], []
        with self._stage("calling dataset()", "dataset"):
            shards = self._chosen_shards()
        for shard in shards:
            with self._stage(f"drawing a batch of shard {shard.index} of {shard.count}", "dataset"):
                examples = self._data.drawn(shard)
                sizes.append(cardinality(examples))
                found = digests(examples, self._recipe.train.batch_size)
            if not found:
                self._add(
                    Finding(
                        code="empty-shard",
                        level="error",
                        place=self._place_of("dataset"),
                        message=f"there is no data for shard {shard.index} of {shard.count}",
                        fix="use fewer workers or more data, or shard the data by examples instead of files",
                    )
                )
                raise _Stop
            drawn.append((shard.index, found))
        self._report.facts("shards", count=len(self._shards), examples=sizes)
        if self._share == "split":
            for finding in same_examples(drawn, len(self._shards), self._place_of("dataset")):
                self._add(finding)

    def _chosen_shards(self) -> list[Shard]:
        chosen = [
            shard
            for shard, task in zip(self._shards, self._trainers, strict=False)
            if not self._tasks or task in self._tasks
        ]
        return [*chosen[: MOST_SHARDS - 1], *chosen[MOST_SHARDS - 1 :][-1:]]

    def _configure(self) -> TrainingConfig:
        """Returns the configuration of the training, checked."""
        arguments, recipe, train = self._arguments, self._recipe, self._recipe.train
        rules = Rules(recipe.updates, recipe.learning_rate, recipe.wire, recipe.embeddings, train.jit is True)
        source, steps = self._data.source, arguments.steps_per_epoch
        if steps is None:
            steps = known_steps_of_pass(self._context, source.one_pass(), rules, self._share, len(self._trainers))
        if steps is None:
            check_ends(source.one_pass(), self._shards[0])
            steps = OPEN_END
        config = TrainingConfig(
            source.batches(repeat=train.repeat),
            steps,
            share=self._share,
            epochs=train.epochs,
            max_steps=train.max_steps,
            validation=self._data.validation,
            callbacks=as_callbacks(arguments.callbacks),
            checkpoints=arguments.checkpoints.config() if arguments.checkpoints else None,
            rules=rules,
        )
        check_callbacks(config)
        check_validation(self._context, config.validation)
        return config

    def _divide(self, batch: Any) -> None:
        """Divides the layers among workers that each hold a part of the model."""
        self._parts: list[float] = []
        if count := len(self._workers):
            with self._stage("dividing the layers", "model"):
                recipe, model = self._recipe, self._step.model
                times = measured_times(model, batch, recipe.micro_batches) if recipe.balance == "time" else None
                layers = divided(layers_in_order(model), recipe.place, recipe.stage_count(count), times)
                self._parts = costs.part_per_worker(layers, count)

    def _report_model(self, config: TrainingConfig, batch: Any, spec: Any) -> None:
        model, step = self._step.model, self._step
        self._report.facts(
            "model",
            name=model.name,
            optimizer=type(model.optimizer).__name__,
            parameters=sum(math.prod(variable.shape) for variable in step.parameters),
            weights_bytes=costs.bytes_of(model.variables),
            slots_bytes=costs.bytes_of(step.optimizer_variables),
        )
        for table, optimizer in unused_table_optimizers(model).items():
            self._add(
                Finding(
                    code="table-optimizer-not-used",
                    level="warning",
                    place=self._place_of("model"),
                    message=f"the table {table} has {optimizer} as its optimizer, which KerasRS uses on TPUs only: the "
                    f"model's {type(model.optimizer).__name__} updates it",
                    fix="compile the model with a keras.optimizers.MultiOptimizer, which has an optimizer for each "
                    "table; see docs/how-to/recommenders.md",
                )
            )
        size = tf.nest.flatten(batch)[0].shape[0]
        epochs = None if config.epochs is None and config.max_steps else config.epochs or 1
        self._report.facts(
            "data",
            batch=mismatch.describe(spec),
            batch_size=size,
            steps_per_epoch=config.steps_per_epoch if config.steps_per_epoch < OPEN_END else None,
            epochs=epochs,
            steps=config.last_step() if config.last_step() < OPEN_END else None,
        )

    def _take_steps(self, config: TrainingConfig, batch: Any, spec: Any, base: int) -> None:
        step, traits, workers = self._step, self._environment.traits, len(self._trainers)
        by_rows = False
        worker_memory = 0
        if traits.has_ps:
            with self._stage("taking a worker's step", "model"), data_errors_explained(step.model):
                for optimizer in step.optimizers:
                    rule_of(config.rules.updates).check(config.rules.updates, optimizer, workers)
                check_updates_within(step, spec, config.rules)
                SeedCounters(step, spec, workers if config.rules.updates.synchronous else 1)
                own = costs.WorkerStep(step, spec, config.rules)
                tables = own.tables()
                costs.reset_peak()
                before = costs.memory()
                loss, sizes = own.take(batch, tables)
                worker_memory = base + costs.peak_memory() - before + sizes["pulled"]
                by_rows = bool(tables.tables)
            for finding in own.findings(tables, self._place_of("model")):
                self._add(finding)
            self._report.facts(
                "network",
                **{f"{name}_bytes": size for name, size in sizes.items()},
                tables_by_rows=len(tables.tables),
                at_most=by_rows and config.rules.updates.steps_per_round > 1,
            )
        else:
            loss = math.nan
            self._report.facts("network", reduced_bytes=self._reduced(config, batch, spec) if workers > 1 else 0)
        if not by_rows:  # an update of a whole table would take more memory here than any task has
            loss = self._engine_step(config, spec)
        self._report.facts("step", loss=loss if math.isfinite(loss) else str(loss))
        self._check_loss(loss)
        self._report_memory(base, worker_memory)

    def _reduced(self, config: TrainingConfig, batch: Any, spec: Any) -> int:
        """Returns the bytes that a mirrored worker adds to the sums of a step."""
        direct = self._cluster.communication in (None, "auto") and not tf.config.list_logical_devices("GPU")
        with self._stage("taking a worker's step", "model"), data_errors_explained(self._step.model):
            return costs.MirroredStep(self._step, spec, config.rules, len(self._trainers), direct).reduced(batch)

    def _engine_step(self, config: TrainingConfig, spec: Any) -> float:
        """Takes a whole step with its update, and evaluates a batch. Returns the loss."""
        with self._stage("taking a step", "model"), data_errors_explained(self._step.model):
            rules = replace(config.rules, wire="float32")
            engine = MirroredEngine(self._step, tf.distribute.get_strategy(), spec, Membership(), rules)
            engine.open(self._alone(config.data), share="split", step=0, batches=0)
            (execution,) = engine.run(1, first=0, size=1, adapts=False, pause=_NoPause())
        if config.validation:
            with self._stage("evaluating a batch", "dataset"), data_errors_explained(self._step.model):
                engine.evaluate(self._alone(config.validation.data), steps=1, watch=Watch(1, reports=False))
        return float(execution.losses[0])

    def _alone(self, data: DatasetFunction) -> DatasetFunction:
        """Returns data of which a process alone reads the first worker's shard."""
        count = max(1, len(self._shards))
        return lambda _shard: data(Shard(0, count))

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            self._add(
                Finding(
                    code="loss-not-finite",
                    level="error",
                    place=self._place_of("model"),
                    message=f"the loss of the first step is {loss}",
                    fix="look for NaN or infinity in the data, a logarithm of 0, or a loss that does not fit the model",
                )
            )

    def _report_memory(self, base: int, worker_memory: int) -> None:
        """Reports the bytes of variables and of memory that each task takes, about."""
        step, recipe, cluster = self._step, self._recipe, self._cluster
        whole = costs.bytes_of(step.model.variables) + costs.bytes_of(step.optimizer_variables)
        servers = [task for task in cluster.tasks if task.traits.holds_variables]
        stored = dict(zip(servers, costs.bytes_per_ps(step, recipe, len(servers)) if servers else (), strict=True))
        copies = whole if recipe.checkpoint or recipe.export else 0
        for task in cluster.tasks:
            variables, taken = 0, base
            if task in stored:
                variables = stored[task]
                taken = base + variables + costs.bytes_of(step.parameters) // len(servers)
            elif computes_gradients(cluster.strategy, task.role) or task.traits.evaluates:
                coordinated = worker_memory and not task.traits.evaluates
                variables, taken = (0, worker_memory) if coordinated else (whole, costs.peak_memory())
                if self._parts and not task.traits.evaluates:
                    variables = round(whole * self._parts[task.index])
                    taken = base + round((costs.peak_memory() - base) * self._parts[task.index])
            elif task.traits.drives:
                taken = base + copies
            self._report.facts(f"task {task}", variables_bytes=variables, memory_bytes=taken, base_bytes=base)

    def _place_of(self, function: str) -> str:
        """Returns the file and the line of a function of the recipe's module."""
        code = getattr(self._program, function, None)
        code = getattr(code, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else self._place

    def _add(self, finding: Finding) -> None:
        self._report.finding(finding)

    @contextmanager
    def _stage(self, name: str, function: str = "") -> Iterator[None]:
        """Reports what is done, and an error as a finding at the user's line, or at a function of the module."""
        self._report.stage(name)
        try:
            yield
        except TfdistError as error:
            self._add(
                Finding(error.code or "error", "error", self._place_of(function), error.message, error.hint or "")
            )
            raise _Stop from error
        except Exception as error:
            self._add(
                Finding(
                    code="recipe-failed",
                    level="error",
                    place=_users_line(error) or self._place_of(function),
                    message=f"{name} failed: {type(error).__name__}: {_short(error)}",
                    fix="correct the recipe's module: each task would fail in the same way",
                )
            )
            traceback.print_exc()
            raise _Stop from error


def _users_line(error: Exception) -> str:
    """Returns the file and the line of the user's code that an error comes from; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _short(error: Exception) -> str:
    """Returns the first paragraph of a message."""
    return str(error).strip().partition("\n\n")[0].replace("\n", " ")[:500]
