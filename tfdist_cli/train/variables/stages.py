"""Layers on workers: where their variables are stored, and where their operations run.

The model is made before it is known which worker holds which layer. So large variables are created on the worker with
the fewest bytes, and move once the stages are known: no task ever holds the whole model. An optimizer's slots follow
their variable.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.records import emit
from tfdist_cli.train.tf_compat.distribute import VariableMethods, replace_variable_methods, updating
from tfdist_cli.train.tf_compat.functions import placing
from tfdist_cli.train.tf_compat.patching import replaced
from tfdist_cli.train.tf_compat.variables import move_variable
from tfdist_cli.train.variables.initializers import current_initial_value, record_initial_values
from tfdist_cli.train.variables.micro_batch_order import MicroBatchOrder
from tfdist_cli.train.variables.placement import PlacementRules, log, readable
from tfdist_cli.train.variables.sharding import variable_bytes

CHIEF_DEVICE = "/job:chief/replica:0/task:0/device:CPU:0"
_SMALL = 2**14
"""The most bytes of a variable that is created on the chief before its layer's worker is known."""
_SCOPE = "tfdist_worker_"
"""The name scope of what a worker computes: TensorFlow names the gradient of an operation after the operation."""
_WORKER = re.compile(rf"{_SCOPE}(\d+)")


class Stages:
    """The stages of a model, each on one worker; with several replicas, one worker for each replica.

    Args:
        strategy: a strategy of one device, the chief's, without variables.
        workers: the number of workers.

    Attributes:
        rules: how many stages there are, or which layers they have.
        assigned: the layers that have been assigned, each with its stage.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int) -> None:
        self._workers = [_device(index) for index in range(workers)]
        self._bytes = [0] * workers
        self._slots: dict[int, list[tf.Variable]] = {}
        self._by_keras: dict[int, weakref.ref[tf.Variable]] = {}
        """The variables that Keras has created. A function in a layer may have captured the storage of others."""
        self._stages: dict[int, tuple[keras.Layer, int]] = {}
        self._stage_of: dict[int, int] = {}
        self._target = ""
        """The device of the variable that is created to move another one there."""
        self.rules = PlacementRules()
        self.assigned: list[tuple[keras.Layer, int]] = []
        record_initial_values()
        replace_variable_methods(strategy, VariableMethods(self._create_variable, _update))

    def set_rules(self, rules: PlacementRules) -> None:
        """Sets the number of stages, or their layers.

        Raises:
            TrainingError: the workers are no multiple of the stages.
        """
        self.rules = rules
        workers, stages = len(self._workers), self.count
        if workers % stages:
            raise TrainingError(
                f"{stages} stages do not fit {workers} workers, which have to be a multiple of them",
                code="stages-do-not-fit",
                hint="change stages, place or the number of workers",
            )

    @property
    def workers(self) -> list[str]:
        """The devices of the workers."""
        return list(self._workers)

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(set(self.rules.place.values())) if self.rules.place else self.rules.stages or len(self._workers)

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return len(self._workers) // self.count

    def assign(self, layers: Sequence[tuple[keras.Layer, int]]) -> None:
        """Assigns layers to stages, and moves their variables there. A variable of several layers moves to the first.

        The variables of a stage are divided among the workers that compute the stage for the replicas, by bytes.

        Args:
            layers: the layers, each with its stage, inner layers before those that contain them.
        """
        self.assigned = list(layers)
        self._stages = {id(layer): (layer, stage) for layer, stage in layers}
        self._stage_of.clear()
        stored, seen = [0] * len(self._workers), set()
        moves: dict[str, deque[tf.Variable]] = {device: deque() for device in self._workers}
        for layer, stage in layers:
            for variable in layer.weights:
                if id(variable) in seen:
                    continue
                seen.add(id(variable))
                self._stage_of[id(variable)] = stage
                if not self._can_move(variable.value):
                    continue
                mates = range(stage, len(self._workers), self.count)
                worker = min(mates, key=stored.__getitem__)
                stored[worker] += variable_bytes(variable.value)
                moves[self._workers[worker]].append(variable.value)
        self._move(moves)

    def stage_of(self, variable: keras.Variable) -> int:
        """Returns the stage of a variable; that of a variable of no layer is the first one."""
        return self._stage_of.get(id(variable), 0)

    def report(self, model: keras.Model, slots: Sequence[keras.Variable]) -> None:
        """Reports the bytes of the model and its optimizers on each task.

        Args:
            model: the compiled model, built.
            slots: the variables of its optimizers.
        """
        sizes = {f"worker:{number}": 0 for number in range(len(self._workers))}
        counts = dict.fromkeys(sizes, 0)
        for variable in [*model.variables, *slots]:
            device = tf.DeviceSpec.from_string(variable.value.device)
            task = f"{device.job}:{device.task}"
            if task in sizes:
                sizes[task] += variable_bytes(variable.value)
                counts[task] += 1
        log.info("%s, including optimizer slots", ", ".join(f"{task} holds {readable(sizes[task])}" for task in sizes))
        emit("placement", bytes=sizes, variables=counts)

    @contextlib.contextmanager
    def computing(self, replica: int = 0, order: MicroBatchOrder | None = None) -> Iterator[None]:
        """Within it, layers are computed on the workers of a replica, and all else where its inputs are.

        Args:
            replica: the replica.
            order: delays layers until those of earlier micro-batches are done; None for no order.
        """
        first = replica * self.count
        with contextlib.ExitStack() as within:
            for layer, stage in self._stages.values():
                within.enter_context(replaced(layer, {"call": self._on_worker(layer.call, first, stage, order)}))
            if not tf.executing_eagerly():
                within.enter_context(placing(self._choose))
            yield

    def _on_worker(self, call: Any, first: int, stage: int, order: MicroBatchOrder | None) -> Any:
        worker = first + stage

        def placed(*args: Any, **kwargs: Any) -> Any:
            with tf.device(self._workers[worker]), tf.name_scope(f"{_SCOPE}{worker}"):
                awaited = order.awaited(stage) if order else []
                with tf.control_dependencies([tf.group(*awaited)] if awaited else []):
                    outputs = call(*args, **kwargs)
            if order:
                order.called(stage, outputs)
            return outputs

        return placed

    def _choose(self, operation: tf.Operation) -> str:
        """The device of an operation: of the layer whose gradient it is, or of its first input that has one."""
        found = _WORKER.findall(operation.name)  # of the layer, after those that contain it
        if "gradient_tape/" in operation.name and found:
            return self._workers[int(found[-1])]
        if operation.device or any(each.dtype == tf.resource for each in operation.inputs):
            return str(operation.device)
        return next((each.device for each in operation.inputs if each.device), "")

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Within it, operations of a function run where their inputs are."""
        return placing(self._choose)

    def _create_variable(self, creator: Any, **kwargs: Any) -> tf.Variable:
        beside, initial = kwargs.pop("colocate_with", None), current_initial_value()
        device = self._target or CHIEF_DEVICE
        if beside is not None:
            device = beside.device
        elif initial is not None and initial.bytes > _SMALL:
            worker = int(np.argmin(self._bytes))
            self._bytes[worker] += initial.bytes
            device = self._workers[worker]
        with tf.device(device):
            variable = creator(**kwargs)
        if beside is not None:
            self._slots.setdefault(id(beside), []).append(variable)
        elif initial is not None:
            self._by_keras[id(variable)] = weakref.ref(variable)
        return variable

    def _can_move(self, variable: tf.Variable) -> bool:
        known = self._by_keras.get(id(variable))
        return known is not None and known() is variable

    def _move(self, moves: Mapping[str, deque[tf.Variable]]) -> None:
        """Moves variables with their slots. The next one goes to the worker that holds the least at the time.

        So none holds much more meanwhile than before or after.

        Args:
            moves: the variables by the device that they move to.
        """
        every = {id(variable): variable for queue in moves.values() for variable in queue}.values()
        held = dict.fromkeys(moves, 0)
        for variable in every:
            held[variable.device] = held.get(variable.device, 0) + self._size_with_slots(variable)
        while left := [device for device, queue in moves.items() if queue]:
            device = min(left, key=held.__getitem__)
            variable = moves[device].popleft()
            size = self._size_with_slots(variable)
            held[variable.device] -= size
            held[device] += size
            for each in self._with_slots(variable):
                if each.device != device:
                    self._target = device
                    move_variable(each, device)
                    self._target = ""

    def _with_slots(self, variable: tf.Variable) -> list[tf.Variable]:
        return [variable, *self._slots.get(id(variable), ())]

    def _size_with_slots(self, variable: tf.Variable) -> int:
        return sum(map(variable_bytes, self._with_slots(variable)))


def _update(variable: Any, function: Any, args: Any, kwargs: Mapping[str, Any], group: bool) -> Any:
    """`StrategyExtended.update`: calls the function on the variable's device."""
    with tf.device(variable.device), updating(variable.device):
        result = function(variable, *args, **kwargs)
    return tf.group(result) if group and not tf.executing_eagerly() else result


def _device(index: int) -> str:
    task = f"/job:worker/replica:0/task:{index}/device:"
    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    return f"{task}GPU:0" if f"{task}GPU:0" in gpus else f"{task}CPU:0"
