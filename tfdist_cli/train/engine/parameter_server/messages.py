"""The messages between chief, ps and workers, and how each is packed into tensors.

Whole numbers cross as one int64 vector, and what a step counted as one float64 vector. A class of this module gives the
elements of a vector their names. It wraps a NumPy array on the chief, and a tensor in a function that is being traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.quorum.policy import NO_MORE_STEPS, Assignment
from tfdist_cli.train.model.train_step import Tensors

_NO_ASSIGNMENT = -2
"""The step of a worker that gets no assignment in a block of them."""


@dataclass(frozen=True)
class StepReport:
    """What a worker counted in one step.

    Args:
        worker: its number.
        loss: the loss of its batch.
        examples: the examples in it.
        metrics: the sums of the metrics, as `MetricTotals.pack` packs them.
        state: the model's state after the step, flat.
        phases: the seconds of each phase and bytes, in the order of `COLUMNS`; empty if they are not measured.
    """

    worker: int
    loss: float
    examples: int
    metrics: np.ndarray
    state: np.ndarray
    phases: np.ndarray


@dataclass(frozen=True)
class ReportLayout:
    """How step reports are packed: loss, examples, metrics, state and phases, in this order, as float64.

    Args:
        metrics: how many numbers the metrics are.
        state: how many numbers the model's state is.
        phases: how many numbers the phases are; 0 if they are not measured.
    """

    metrics: int
    state: int
    phases: int

    @property
    def size(self) -> int:
        """How many numbers a report is."""
        return 2 + self.metrics + self.state + self.phases

    def pack(self, loss: tf.Tensor, examples: tf.Tensor, metrics: tf.Tensor, state: Tensors) -> tf.Tensor:
        """Packs a report in a function; the phases are appended when they have been measured.

        Args:
            loss: shape ().
            examples: shape ().
            metrics: as `MetricTotals.pack` packs them.
            state: of any shapes and types.
        """
        flat = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in state]
        head = tf.stack([tf.cast(loss, tf.float64), tf.cast(examples, tf.float64)])
        return tf.concat([head, metrics, *flat], axis=0)

    def without_counts(self, phases: Tensors) -> tf.Tensor:
        """Packs a report that has nothing but phases, or nothing at all."""
        if phases:
            return tf.concat([tf.zeros([self.size - self.phases], tf.float64), *phases], axis=0)
        return tf.zeros([self.size], tf.float64)

    def examples_of(self, reports: tf.Tensor) -> tf.Tensor:
        """Returns the examples in packed reports of shape (reports, numbers)."""
        return reports[:, 1]

    def mean_state(self, reports: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """Returns the weighted mean of the states in packed reports.

        Args:
            reports: shape (reports, numbers).
            weights: float64, shape (reports,).
        """
        begin = 2 + self.metrics
        states = reports[:, begin : begin + self.state] * weights[:, None]
        return tf.reduce_sum(states, axis=0) / tf.reduce_sum(weights)

    def split(self, reports: np.ndarray) -> list[np.ndarray]:
        """Returns the losses, examples, metrics and phases of packed reports on the chief.

        Args:
            reports: shape (…, numbers); numbers behind them are left out.
        """
        state, phases = 2 + self.metrics, 2 + self.metrics + self.state
        own = reports[..., 2:state], reports[..., phases : phases + self.phases]
        return [reports[..., 0], reports[..., 1], *own]

    def unpack(self, worker: int, numbers: np.ndarray) -> StepReport:
        """Unpacks a worker's report on the chief; numbers behind it are left out."""
        loss, examples = numbers[:2].tolist()
        state, phases = 2 + self.metrics, 2 + self.metrics + self.state
        own = numbers[2:state], numbers[state:phases], numbers[phases : phases + self.phases]
        return StepReport(worker, loss, int(examples), *own)


class StepKind(IntEnum):
    """The kind of a step in lockstep, in tokens and in orders for updates."""

    END = -1
    """There is no such step: the run is over."""
    IN_CHUNK = 0
    """It belongs to the chunk that began before it."""
    SINGLE = 1
    """It stands alone."""
    CHUNK = 2
    """It is the first of a chunk."""


@dataclass(frozen=True)
class Token:
    """Permits a worker to take a step: a ps has made its part of all updates before it.

    Args:
        packed: int64, shape (2,).
    """

    packed: Any
    SIZE: ClassVar[int] = 2

    @classmethod
    def pack(cls, sequence: Any, kind: Any) -> tf.Tensor:
        """Packs a token in a function."""
        return tf.stack([sequence, kind])

    @property
    def sequence(self) -> Any:
        """The step's sequence number."""
        return self.packed[0]

    @property
    def kind(self) -> Any:
        """A `StepKind`."""
        return self.packed[1]


@dataclass(frozen=True)
class Commit:
    """Tells the leader that a worker's gradient is stored on all ps.

    Args:
        packed: int64, shape (3,), or (commits, 3).
    """

    packed: Any
    SIZE: ClassVar[int] = 3

    @classmethod
    def pack(cls, sequence: Any, key: Any, microseconds: Any) -> tf.Tensor:
        """Packs a commit in a function."""
        return tf.stack([sequence, key, microseconds])

    @property
    def sequence(self) -> Any:
        """The step's sequence number."""
        return self.packed[..., 0]

    @property
    def key(self) -> Any:
        """The key that the gradient is stored under."""
        return self.packed[..., 1]

    @property
    def microseconds(self) -> Any:
        """When it was made, by the leader's clock; 0 if this is not measured."""
        return self.packed[..., 2]


@dataclass(frozen=True)
class LockstepState:
    """What a worker knows of its next step in lockstep.

    Args:
        packed: int64, shape (4,).
    """

    packed: Any

    @classmethod
    def pack(cls, sequence: Any, kind: Any, key: Any, single_steps: Any) -> tf.Tensor:
        """Packs a state in a function."""
        return tf.stack([sequence, kind, key, single_steps])

    @property
    def sequence(self) -> Any:
        """The step's sequence number."""
        return self.packed[0]

    @property
    def kind(self) -> Any:
        """The `StepKind` in the leader's token of the step."""
        return self.packed[1]

    @property
    def key(self) -> Any:
        """The key to store the step's gradient under."""
        return self.packed[2]

    @property
    def single_steps(self) -> Any:
        """How many steps the worker takes one by one, whatever their kind."""
        return self.packed[3]

    @property
    def token(self) -> Token:
        """The leader's token of the step."""
        return Token(self.packed[:2])

    def received(self, token: Token) -> tf.Tensor:
        """Packs the state as it is when the leader's token has arrived."""
        return self.pack(self.sequence, token.kind, self.key, self.single_steps)

    def next(self, workers: int) -> tf.Tensor:
        """Packs the state of the step after this one, but for its kind. Keys of `workers` workers never meet."""
        return self.packed + tf.constant([1, 0, workers, 0], tf.int64)

    def counted_down(self) -> tf.Tensor:
        """Packs the state with one single step less, if there are any left."""
        return self.packed - tf.stack([0, 0, 0, tf.minimum(self.single_steps, 1)])


class ReportKind(IntEnum):
    """The kind of a message to the chief that brings no gradient; it takes the place of the step's number."""

    FUNCTION_STARTED = -3
    FUNCTION_ENDED = -4
    UPDATE_APPLIED = -5
    STOP_LISTENING = -6


@dataclass(frozen=True)
class Report:
    """A message to the chief, of one of the following classes."""


@dataclass(frozen=True)
class GradientStored(Report):
    """A worker has stored a gradient on the ps.

    Args:
        step: the update it is for.
        key: the key that it is stored under.
        report: what the worker counted.
    """

    step: int
    key: int
    report: StepReport


@dataclass(frozen=True)
class FunctionStarted(Report):
    """A worker's function has started.

    Args:
        worker: the worker's number.
        serial: the function's serial number.
    """

    worker: int
    serial: int


@dataclass(frozen=True)
class FunctionEnded(Report):
    """A worker's function has ended.

    Args:
        serial: the function's serial number.
    """

    serial: int


@dataclass(frozen=True)
class UpdateApplied(Report):
    """All ps have applied an update; sent only if phases are measured.

    Args:
        phases: what the update took, in the order of `COLUMNS`.
    """

    phases: np.ndarray


def pack_report(kind: int, serial: Any = 0, worker: Any = 0) -> tf.Tensor:
    """Packs a message to the chief that brings no gradient.

    A message that brings one begins with the assignment of its step.
    """
    return tf.stack([tf.constant(kind, tf.int64), serial, 0, worker])


def unpack_report(head: np.ndarray, body: np.ndarray, layout: ReportLayout) -> Report | None:
    """Unpacks a message to the chief; None if no more messages are wanted.

    Args:
        head: int64, shape (4,).
        body: a packed `StepReport`.
        layout: how it is packed.
    """
    step, key, _, worker = (int(number) for number in head)
    if step == ReportKind.STOP_LISTENING:
        return None
    if step == ReportKind.FUNCTION_STARTED:
        return FunctionStarted(worker, serial=key)
    if step == ReportKind.FUNCTION_ENDED:
        return FunctionEnded(serial=key)
    report = layout.unpack(worker, body)
    return UpdateApplied(report.phases) if step == ReportKind.UPDATE_APPLIED else GradientStored(step, key, report)


@dataclass(frozen=True)
class PackedAssignment:
    """A step that the chief assigns to a worker, with the key to store its gradient under.

    Args:
        packed: int64, shape (4,): step, key, whether more follow for sure, worker.
    """

    packed: Any
    SIZE: ClassVar[int] = 4

    @property
    def step(self) -> Any:
        """The step's number."""
        return self.packed[0]

    @property
    def key(self) -> Any:
        """The key to store its gradient under."""
        return self.packed[1]

    @property
    def goes_on(self) -> Any:
        """Whether there is a step; otherwise the worker's function ends."""
        return self.packed[0] > NO_MORE_STEPS

    @property
    def several(self) -> Any:
        """Whether the steps of a chunk follow each other for sure, this the first of them."""
        return self.packed[2] > 0


def pack_assignments(assignments: Iterable[Assignment], keys: Iterable[int], workers: int) -> np.ndarray:
    """Packs a block: one row for every worker, whether or not it has an assignment; flat.

    Args:
        assignments: at most one of each worker.
        keys: fresh ones, one is taken for each assignment.
        workers: how many there are.
    """
    rows = np.full([workers, PackedAssignment.SIZE], _NO_ASSIGNMENT, np.int64)
    for (worker, step, several), key in zip(assignments, keys, strict=False):
        rows[worker] = step, key, several, worker
    return rows.reshape(-1)


def has_assignment(rows: Any, worker: int) -> Any:
    """Whether a worker has an assignment in a block of them, of shape (workers, 4)."""
    return rows[worker, 0] != _NO_ASSIGNMENT


@dataclass(frozen=True)
class UpdateOrder:
    """An update that the chief orders, with the assignments that follow it.

    Args:
        packed: int64, shape (`size(...)`,): 0 for the end, 1, or 2 if several follow; keys; assignments.
        gradients: how many gradients make an update.
    """

    packed: Any
    gradients: int

    @staticmethod
    def size(gradients: int, workers: int) -> int:
        """How many numbers an order is."""
        return 1 + gradients + workers * PackedAssignment.SIZE

    @staticmethod
    def pack(keys: Sequence[int], assignments: np.ndarray, *, several: bool) -> np.ndarray:
        """Packs an order on the chief.

        Args:
            keys: the keys of its gradients.
            assignments: see `pack_assignments`.
            several: whether the updates of a chunk follow each other for sure, this the first of them.
        """
        return np.concatenate([[1 + several], keys, assignments])

    @property
    def goes_on(self) -> Any:
        """Whether there is an update; otherwise no more are ordered."""
        return self.packed[0] > 0

    @property
    def several(self) -> Any:
        """Whether the updates of a chunk follow each other for sure, this the first of them."""
        return self.packed[0] > 1

    @property
    def keys(self) -> Any:
        """The keys of its gradients."""
        return self.packed[1 : 1 + self.gradients]

    @property
    def assignments(self) -> Any:
        """The assignments to send when the update is applied."""
        return self.packed[1 + self.gradients :]


@dataclass(frozen=True)
class AssignmentOrder:
    """Assignments that follow no new update.

    Args:
        packed: int64, shape (`size(...)`,): 0 for the end, or 1 and the number of updates; assignments.
    """

    packed: Any

    @staticmethod
    def size(workers: int) -> int:
        """How many numbers an order is."""
        return 1 + workers * PackedAssignment.SIZE

    @staticmethod
    def pack(updates: int, assignments: np.ndarray) -> np.ndarray:
        """Packs an order on the chief.

        Args:
            updates: how many more updates have to be applied before the assignments are sent.
            assignments: see `pack_assignments`.
        """
        return np.concatenate([[1 + updates], assignments])

    @property
    def goes_on(self) -> Any:
        """Whether there are assignments; otherwise no more are sent."""
        return self.packed[0] > 0

    @property
    def updates(self) -> Any:
        """How many more updates have to be applied before the assignments are sent."""
        return self.packed[0] - 1

    @property
    def assignments(self) -> Any:
        """The assignments."""
        return self.packed[1:]
