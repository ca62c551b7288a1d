"""How gradients become updates: the update mode, the learning rate, and where variables live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

from tfdist_cli.spec.sections.model import Inconsistent, KeyProblem, SpecModel

Jit = bool | Literal["auto"]
WireType = Literal["float32", "bfloat16", "float16"]
StepDivision = Literal["dynamic", "equal"]
BatchDivision = Literal["equal", "proportional"]
PlacementRule = Literal["greedy", "round_robin"]
Balance = Literal["bytes", "time"]
_Count = Annotated[int, Field(ge=1)]
_RULES = "tfdist_cli.train.engine.parameter_server"


@dataclass(frozen=True)
class UpdateMode:
    """One value of `updates.mode`: a row of `UPDATE_MODES`.

    Args:
        meaning: what it does, for the documentation of `mode`.
        implementation: the class that implements it, an `UpdateRule`, as `module:class`. It is named, not imported:
            files are read without TensorFlow.
        synchronous: whether a step is one batch of every worker; otherwise it is one batch of any worker.
        keys: the keys of `updates` that belong to this mode only.
        required: those of its keys that have no default, each with an example.
        exclusive: pairs of its keys that cannot be combined.
    """

    meaning: str
    implementation: str
    synchronous: bool
    keys: tuple[str, ...] = ()
    required: tuple[tuple[str, str], ...] = ()
    exclusive: tuple[tuple[str, str], ...] = ()


UPDATE_MODES = {
    "async": UpdateMode(
        "each worker sends its gradients as soon as it has them",
        f"{_RULES}.asynchronous.updates:AsynchronousUpdates",
        synchronous=False,
        keys=("worker_steps", "local_steps", "push_every", "delay_compensation", "prefetch"),
        exclusive=(
            ("prefetch", "push_every"),
            ("push_every", "local_steps"),
            ("delay_compensation", "local_steps"),
            ("prefetch", "local_steps"),
        ),
    ),
    "sync": UpdateMode(
        "the mean of all workers' gradients makes one update",
        f"{_RULES}.synchronous:SynchronousUpdates",
        synchronous=True,
        keys=("aggregate", "batch"),
        exclusive=(("aggregate", "batch"),),
    ),
    "bounded": UpdateMode(
        "as `sync`, but a worker may be a few steps ahead of the slowest one",
        f"{_RULES}.synchronous:SynchronousUpdates",
        synchronous=True,
        keys=("staleness",),
        required=(("staleness", "the steps a worker may be ahead, such as 3"),),
    ),
}
"""The update rules of parameter servers. A new one is a row here and a module that implements it."""


class _OneOfTheModes:
    """Validates `mode` as a `Literal` of the names in `UPDATE_MODES`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(UPDATE_MODES))


class Updates(SpecModel):
    """When a worker's gradients are applied to the variables on parameter servers."""

    mode: Annotated[str, _OneOfTheModes()] = Field(
        default="async", description="; ".join(f"`{name}`: {mode.meaning}" for name, mode in UPDATE_MODES.items()) + "."
    )
    worker_steps: StepDivision = "dynamic"
    """async: how the steps are divided among the workers. `dynamic`: the worker that is free next takes the next steps.
    `equal`: each worker takes the same number; those that are done wait for the others at the end of each epoch."""
    local_steps: _Count = 1
    """async: number of steps that a worker trains on its local copy of the variables before it sends the changes to
    the ps."""
    push_every: _Count = 1
    """async: number of steps whose mean gradient makes one update. All are computed with the same parameters."""
    delay_compensation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """async: λ of the delay compensation g + λ·g²·(w − w'). The gradient g was computed with the parameters w', and w
    are the current ones. 0 turns it off."""
    prefetch: bool = False
    """async: whether a worker reads the parameters of its next step before it sends the gradients of this step. It then
    waits less, but its parameters do not contain its own last update."""
    aggregate: _Count | None = None
    """sync: number of gradients that make one update. By default one of each worker. With fewer, the slowest workers
    are backups: their gradients are dropped and counted."""
    batch: BatchDivision = "equal"
    """sync, mirrored workers too: how the examples of an update are divided. `equal`: each worker takes `batch_size`.
    `proportional`: slower workers take fewer and faster ones more, with the same sum, so that all end together."""
    staleness: Annotated[int, Field(ge=0, le=64)] | None = None
    """bounded: number of steps that a worker may be ahead of the slowest one. 0 is the same as `sync`."""

    @model_validator(mode="after")
    def _fits_the_mode(self) -> Updates:
        row = UPDATE_MODES[self.mode]
        problems = [
            KeyProblem((key,), f"{key} belongs to mode: {name}, not {self.mode}", code="other-update-mode")
            for name, mode in UPDATE_MODES.items()
            for key in mode.keys
            if key not in row.keys and self._is_given(key)
        ]
        problems += [
            KeyProblem((key,), f"{self.mode} needs {key}: {example}", code="missing-key")
            for key, example in row.required
            if not self._is_given(key)
        ]
        problems += [
            KeyProblem((key,), f"{key} and {other} cannot be combined: choose one", code="not-combinable")
            for key, other in row.exclusive
            if self._is_given(key) and self._is_given(other)
        ]
        if problems:
            raise Inconsistent(problems)
        return self

    @property
    def synchronous(self) -> bool:
        """Whether a step is one batch of every worker; otherwise it is one batch of any worker."""
        return UPDATE_MODES[self.mode].synchronous

    @property
    def steps_per_round(self) -> int:
        """Steps that a worker takes between reading parameters and sending what it changes to the ps."""
        return max(self.push_every, self.local_steps)

    def _is_given(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)


class LearningRate(SpecModel):
    """Changes of the optimizer's learning rate."""

    scale: Literal["none", "linear", "sqrt"] = "none"
    """`linear`: multiply the rate by the number of worker batches in each update. `sqrt`: by its square root. `none`:
    keep it."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of updates over which the rate rises linearly to its full value: from the unscaled rate if it is scaled,
    otherwise from 0."""


class EmbeddingRule(SpecModel):
    """How `Embedding` layers are trained."""

    min_bytes: Annotated[int, Field(ge=0)] = 2**20
    """The least size in bytes of a table of which steps read and update only the rows that a batch looks up."""


class ShardRule(SpecModel):
    """Which variables are split over several ps, along their first axis."""

    min_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """The least size in bytes of a variable that is split."""
    max_shards: _Count | None = None
    """The most ps over which a variable is split. By default all of them."""
