"""Updates within a step of a model that makes several, such as a GAN: all workers make each of them together.

Such a step has several parts, and each of them a sequence number of its own. In a part, a worker sends the gradients of
one update, and waits until the ps have applied the mean over all workers. Then it reads what the update has changed,
and the rest of its step goes on with it. The last part ends the step, so that it also reports the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.gradient_store import OnEachPs, Staging
from tfdist_cli.train.engine.parameter_server.transport import Pulled, Transport
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.assignments import Assigned, Optimizer
from tfdist_cli.train.model.train_step import PlannedUpdate, Tensors
from tfdist_cli.train.optimizers.apply import apply
from tfdist_cli.train.optimizers.registry import kernels_disabled
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.variables.sharding import parts

Operations = dict[str, list[Any]]
"""Operations on each ps, by its device."""
Together = Callable[[Operations], tuple[OnEachPs, OnEachPs]]
"""Commits what these operations have stored, and waits until it is applied. Returns the tokens and the keys of the next
part."""


class StepPart:
    """One update of a step, as workers send it and ps apply it.

    Args:
        context: the model on its cluster.
        planned: the update.
        name: distinguishes it on the ps.
    """

    def __init__(self, context: ParameterServerContext, planned: PlannedUpdate, name: str) -> None:
        rules, scope = context.rules, context.transport.device_scope
        self._planned, self._scope = planned, scope
        terms = context.terms(planned.optimizer, planned.variables) if planned.optimizer is not None else {}
        packed, shared = rules.optimized, context.transport.shared
        self._gradients = Transport(planned.variables, (), rules.wire, scope, packed=packed, terms=terms, shared=shared)
        self._values = Transport(planned.assigned, (), "float32", scope, packed=packed, shared=shared)
        self._staging = Staging(self._gradients, f"{name}-gradients"), Staging(self._values, f"{name}-values")

    def is_of(
        self, optimizer: Optimizer | None, variables: list[keras.Variable], assigned: list[keras.Variable]
    ) -> bool:
        """Whether this is the update of some variables by an optimizer, after others are assigned."""
        planned = self._planned
        pairs = zip([*planned.variables, *planned.assigned], [*variables, *assigned], strict=False)
        counts = len(planned.variables), len(planned.assigned)
        same = counts == (len(variables), len(assigned)) and all(own is other for own, other in pairs)
        return same and planned.optimizer is optimizer

    def send(self, gradients: list[Any], assigned: Tensors, keys: OnEachPs, before: Tensors) -> Operations:
        """Stores a worker's gradients and assigned values on the ps.

        Args:
            gradients: one for each of the update's variables.
            assigned: one for each parameter that is assigned before.
            keys: the keys to store them under.
            before: awaited before.
        """
        stored: Operations = {}
        transports, sent = (self._gradients, self._values), (gradients, assigned)
        updated = self._planned.variables, self._planned.assigned
        for transport, staging, own, variables in zip(transports, self._staging, sent, updated, strict=True):
            with self._scope():
                whole = [
                    tf.nest.map_structure(lambda tensor: after(tensor, before), each, expand_composites=True)
                    for each in (own if transport.terms else map(tf.convert_to_tensor, own))
                ]
                like = [
                    each if isinstance(each, tf.Tensor) else tf.zeros(variable.shape, variable.dtype)
                    for each, variable in zip(whole, variables, strict=True)
                ]
            pushed = transport.push(whole, Pulled(like, [[] for _ in transport.buckets], {}, []))
            for device, operations in staging.put(pushed, keys).items():
                stored.setdefault(device, []).extend(operations)
        return stored

    def read(self, ready: OnEachPs) -> Tensors:
        """Reads the update's variables on a worker, after a tensor on each ps."""
        return self._gradients.pull(after=ready).values

    def apply(self, context: ParameterServerContext, keys: list[OnEachPs]) -> None:
        """Makes the update of all workers.

        Args:
            context: the model on its cluster, for the number of workers now.
            keys: of each worker.
        """
        gradients, values = ([staging.take(each) for each in keys] for staging in self._staging)
        for variable, own in zip(self._planned.assigned, self._values.gradients(values), strict=True):
            for shard, value in zip(parts(variable), own, strict=True):
                shard.assign(value, read_value=False)
        if self._planned.optimizer is not None:
            with nullcontext() if context.rules.optimized else kernels_disabled():
                given: list[Any] = self._gradients.gradients(gradients)
                apply(self._planned.optimizer, given, self._planned.variables, context.rate)

    def clear(self) -> None:
        """Drops what is stored."""
        for staging in self._staging:
            staging.clear()


class WorkerParts:
    """The parts of one step of a worker, in the order in which the step is traced.

    Args:
        step_parts: the parts.
        keys: the keys of the first one.
        together: ends each part but the last.
        timer: measures the phases.

    Attributes:
        stored: what the last part has stored.
    """

    def __init__(self, step_parts: list[StepPart], keys: OnEachPs, together: Together, timer: StepTimer) -> None:
        self._parts, self._keys, self._together, self._timer = step_parts, keys, together, timer
        self._done, self._ended = 0, False
        self._read: Tensors = []
        self.stored: Operations = {device: [] for device in keys}

    def begin(self, read: Tensors) -> None:
        """Begins the step with values that were read from the ps."""
        self._read = list(read)

    def update(
        self,
        optimizer: Optimizer | None,
        gradients: list[Any],
        variables: list[keras.Variable],
        assigned: Assigned,
    ) -> Tensors:
        """Makes the next update, see `assignments.Update`.

        Raises:
            TrainingError: it is not the planned one.
        """
        part = self._parts[self._done]
        if self._ended or not part.is_of(optimizer, variables, [variable for variable, _ in assigned]):
            raise _differs()
        values = [value for _, value in assigned]
        self._timer.end("compute", gradients, values)
        with tf.device(None):  # not on the worker's GPU
            # An update may not begin before this worker has read what it changes.
            operations = part.send(gradients, values, self._keys, self._read)
            self._timer.end("push", operations)
            if self._done + 1 == len(self._parts):
                self.stored, self._ended = self.stored | operations, True
                return [tf.zeros(each.shape, each.dtype) for each in variables]  # the step reads none of them
            tokens = self._next(operations)
            read = part.read(tokens)
        self._timer.end("pull", read)
        self._read += read
        return read

    def end(self) -> None:
        """Ends the step, whose last part may only report it.

        Raises:
            TrainingError: it has not made all planned updates.
        """
        if not self._ended and not (self._done + 1 == len(self._parts) and self._parts[-1].is_of(None, [], [])):
            raise _differs()

    def _next(self, operations: Operations) -> OnEachPs:
        tokens, self._keys = self._together(operations)
        self._timer.end("wait", tokens)
        self._done += 1
        return tokens


def _differs() -> TrainingError:
    return TrainingError(
        "the train_step makes other updates than when it was traced before",
        code="updates-differ",
        hint="let train_step make the same updates whenever Python calls it: it must not depend on a counter of calls",
    )
