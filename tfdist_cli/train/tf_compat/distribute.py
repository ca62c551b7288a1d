"""`tf.distribute`'s strategies: how they create and update variables, and leaving their scope."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.ps_values import DistributedTable
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tfdist_cli.train.tf_compat.patching import replaced


class VariableMethods(NamedTuple):
    """Methods of a strategy that create and update variables.

    Args:
        create: `(creator, **kwargs)` → a variable.
        update: `(variable, function, args, kwargs, group)`, through which every change outside of a replica goes.
        create_on_next: as `create`, on the next ps; None for a strategy without ps.
    """

    create: Callable[..., Any]
    update: Callable[..., Any]
    create_on_next: Any = None


def replace_variable_methods(strategy: tf.distribute.Strategy, methods: VariableMethods) -> VariableMethods:
    """Replaces how a strategy creates and updates variables, for the rest of the process.

    Seen in TensorFlow 2.21.0: `StrategyExtendedV2._create_variable`, `_update`,
    `ParameterServerStrategyV2Extended._create_variable_round_robin`. Reason: `tf.variable_creator_scope` sees neither
    updates nor what creates a variable on a given ps. Replace with: a public variable policy of a strategy.

    Returns:
        The strategy's own methods.
    """
    extended = strategy.extended
    on_next = methods.create_on_next and extended._create_variable_round_robin
    own = VariableMethods(extended._create_variable, extended._update, on_next)
    extended._create_variable, extended._update = methods.create, methods.update
    if methods.create_on_next:
        extended._create_variable_round_robin = methods.create_on_next
    return own


def num_ps(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of ps of a `ParameterServerStrategy`.

    Seen in TensorFlow 2.21.0: `ParameterServerStrategyV2Extended._num_ps`. Reason: the strategy does not publish it.
    Replace with: `strategy.cluster_resolver.cluster_spec().num_tasks("ps")`, once the resolver counts live tasks.
    """
    return strategy.extended._num_ps


def ps_devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the devices of the ps of a `ParameterServerStrategy`. Seen and replaced as in `num_ps`."""
    return [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(num_ps(strategy))]


def set_next_ps(strategy: tf.distribute.Strategy, ps: int) -> None:
    """Has the strategy create its next variable on a ps.

    Seen in TensorFlow 2.21.0: `ParameterServerStrategyV2Extended._variable_count`. Reason: the strategy places
    variables in turn, and takes no device. Replace with: a public argument for a variable's device.
    """
    strategy.extended._variable_count = ps


def creator_of(strategy: tf.distribute.Strategy, creator: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Returns the function by which a `ParameterServerStrategy` creates one variable for `creator`.

    Seen in TensorFlow 2.21.0: `ParameterServerStrategyV2Extended._create_var_creator`. Reason: the strategy wraps
    creators only inside its own method. Replace with: a public variable policy of a strategy.
    """
    return strategy.extended._create_var_creator(creator, **kwargs)


def strategy_of(made: Any) -> tf.distribute.Strategy | None:
    """Returns the strategy under whose scope a Keras model or optimizer, or a TensorFlow variable, was made.

    Seen in Keras 3.15.1: `TensorFlowTrainer._distribute_strategy`, `TFOptimizer._distribution_strategy`; in TensorFlow
    2.21.0: `DistributedVariable._distribute_strategy`. Reason: Keras's public `distribute_strategy` returns the current
    strategy where there was none, and optimizers and variables have no such property. Replace with: public properties.
    """
    for name in ("_distribute_strategy", "_distribution_strategy"):
        if hasattr(made, name):
            return getattr(made, name)
    return None


def convert_variables_to_numbers() -> None:
    """Lets `float` and `int` convert variables of mirrored strategies, for the rest of the process.

    So `float(model.optimizer.learning_rate)` in a callback has the same result with every strategy.

    Seen in TensorFlow 2.21.0: `values.DistributedVariable`, which has no `__float__` and no `__int__`. Reason:
    `keras.Variable` converts TensorFlow's variable. Replace with: nothing, once TensorFlow's class converts.
    """
    DistributedVariable.__float__ = lambda variable: float(variable.numpy())
    DistributedVariable.__int__ = lambda variable: int(variable.numpy())


def use_tables_in_conditions() -> None:
    """Lets conditions use lookup tables of parameter servers, such as `StringLookup`'s, for the rest of the process.

    Each worker has its copy of a table, and the function that it runs is called with this copy. Loops pass it on, but
    conditions do not.

    Seen in TensorFlow 2.21.0: `DistributedTable.resource_handle`, whose placeholder nobody feeds if it belongs to the
    graph of a condition, a `ControlFlowFuncGraph`. Reason: `cond_v2` ignores `deferred_external_captures`, unlike
    `while_v2`. Replace with: nothing, once conditions pass them on.
    """
    own = DistributedTable.resource_handle.fget

    def resource_handle(table: DistributedTable) -> tf.Tensor:
        graph = outer = tf.compat.v1.get_default_graph()
        while isinstance(outer, ControlFlowFuncGraph):
            outer = outer.outer_graph
        if outer is graph:
            return own(table)
        with outer.as_default():
            handle = own(table)
        return graph.capture(handle)

    DistributedTable.resource_handle = property(resource_handle)


def updates_apart(strategy: tf.distribute.Strategy) -> AbstractContextManager[None]:
    """Within it, each replica updates its own copies of variables, without the other replicas' threads.

    Seen in TensorFlow 2.21.0: `StrategyExtendedV2._use_merge_call`. Reason: a `merge_call` inside of a condition fails.
    Replace with: a public option of the strategy.
    """
    return replaced(strategy.extended, {"_use_merge_call": lambda: False})


def merges_at_once() -> AbstractContextManager[None]:
    """Within it, the only replica of a task makes updates itself, in its own thread, also in a function that it calls.

    Seen in TensorFlow 2.21.0: `ReplicaContextBase._merge_call`, which does so, and its override in mirrored strategies,
    which waits for all replicas, and fails within a `tf.function`. Reason: this needs no thread where there is a single
    replica. Replace with: nothing, once mirrored strategies do the same for a single local replica.
    """
    context = tf.distribute.get_replica_context()
    return replaced(context, {"_merge_call": partial(distribute_lib.ReplicaContextBase._merge_call, context)})


@contextmanager
def without_strategy() -> Iterator[None]:
    """Within it, TensorFlow has no strategy, also inside of a strategy's scope.

    Seen in TensorFlow 2.21.0: `distribute_lib._push_per_thread_mode`, `_pop_per_thread_mode`,
    `_get_default_replica_mode`. Reason: a scope cannot be left in public. Replace with: the default strategy's `scope`,
    once it can be entered inside of another strategy's.
    """
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def updating(device: str) -> AbstractContextManager[Any]:
    """The context in which a strategy's `update` calls its function.

    Seen in TensorFlow 2.21.0: `distribute_lib.UpdateContext`. Reason: a strategy's own `update` uses the strategy's
    device, and not the variable's. Replace with: a strategy whose variables are on several devices.
    """
    return distribute_lib.UpdateContext(device)
