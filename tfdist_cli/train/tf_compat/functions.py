"""`tf.function`: which executor runs one, and calling one inside of another as part of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from tfdist_cli.train.tf_compat.op_errors import summary

SINGLE_THREADED = "SINGLE_THREADED_EXECUTOR"
"""The executor that runs operations one after another. The usual one passes operations that could run at the same time
to a pool of threads. Where a task has a single thread for an operation, since others share the cores, that wakes
threads and makes nothing faster. Seen in TensorFlow 2.21.0. Reason: `tf.experimental.function_executor_type` takes a
name, and no list of names is public. Replace with: a public constant."""


def has_one_thread() -> bool:
    """Whether this task has a single thread for an operation, and no GPU."""
    return os.environ.get("TF_NUM_INTRAOP_THREADS") == "1" and not tf.config.list_logical_devices("GPU")


def may_run_in_order(function: Any, *args: Any) -> bool:
    """Whether the single-threaded executor may be tried for a function.

    Args:
        function: a `tf.function` whose operations need not run at the same time.
        args: what it is called with; it is traced for that here.
    """
    return has_one_thread() and not _has_jumps(function.get_concrete_function(*args).graph)


def rehearse(function: Any, nothing: tf.data.Dataset, *args: Any) -> None:
    """Runs a function without data on the single-threaded executor: it ends when it reads, before it has any effect.

    TensorFlow optimizes a graph at its first run, and may add operations that this executor does not have, such as
    variables. The rehearsal finds that out.

    Args:
        function: a `tf.function` that takes an iterator, and reads from it first.
        nothing: a dataset without elements, of the iterator's types.
        args: the function's further arguments.

    Raises:
        tf.errors.OpError: the executor cannot run the function.
    """
    with tf.experimental.function_executor_type(SINGLE_THREADED), contextlib.suppress(tf.errors.OutOfRangeError):
        function(iter(nothing), *args)


def why_not_in_order(traced: Any) -> str:
    """Returns why the single-threaded executor cannot run a function that reads a batch first; "" if it can.

    The function is called without data on this task, while another one is being traced: see `rehearse`.

    Args:
        traced: its `ConcreteFunction`, which may use tensors of the function that is being traced.
    """
    if _has_jumps(traced.graph):
        return "the step has loops or conditions"
    operations = _Operations(traced)
    resources = [_resource_in_place_of(tensor) for tensor in traced.graph.inputs]

    def call(*values: tf.Tensor) -> list[tf.Tensor]:
        left = iter(values)
        return operations.add([make() if make else next(left) for make in resources])

    others = [tensor for tensor, make in zip(traced.graph.inputs, resources, strict=True) if not make]
    with tf.init_scope(), tf.device(None), tf.experimental.function_executor_type(SINGLE_THREADED):
        zeros = [tf.zeros([size or 1 for size in tensor.shape], tensor.dtype) for tensor in others]
        try:
            tf.function(call, autograph=False).get_concrete_function(*zeros)(*zeros)
        except tf.errors.FailedPreconditionError:
            return ""  # there is no batch
        except (tf.errors.OpError, ValueError) as error:  # it does not run, or its operations cannot be copied
            return summary(error)
    return "the step reads no batch"


def _resource_in_place_of(tensor: tf.Tensor) -> Callable[[], tf.Tensor] | None:
    """Returns what makes a resource that has nothing, in place of one that a function uses; None for other tensors.

    Seen in TensorFlow 2.21.0: `resource_variable_ops.get_eager_safe_handle_data`. Reason: the handle of a variable does
    not publish the type of its values. Replace with: a public property.
    """
    if tensor.dtype != tf.resource:
        return None
    known = get_eager_safe_handle_data(tensor).shape_and_type
    if not known:
        return partial(tf.raw_ops.AnonymousIteratorV3, output_types=[tf.int64], output_shapes=[[]])
    return partial(tf.raw_ops.VarHandleOp, dtype=tf.as_dtype(known[0].dtype), shape=tf.TensorShape(None))


def function_kept_whole(python_function: Callable[..., Any]) -> Any:
    """Returns a `tf.function` that stays one operation where it is called, so that its device runs it by itself.

    Seen in TensorFlow 2.21.0: the function attribute `_noinline`. Reason: an inlined function is split among the
    devices of its caller, whose tasks exchange each of its tensors. Replace with: a public option.

    Args:
        python_function: what it computes.
    """
    return tf.function(
        python_function, autograph=False, reduce_retracing=True, experimental_attributes={"_noinline": True}
    )


_COPIED = "tfdist-copied"
"""The collection of a graph with what its operations are copies of."""


def copied(python_function: Callable[..., Any], *args: Any) -> Callable[..., Any] | None:
    """Traces a function, and returns another one that adds copies of its operations to the graph that is being traced.

    To copy operations takes TensorFlow a small part of the time that Python needs to trace them. They become operations
    of the graph as if they had been traced there, but without the control dependencies of that place.

    Args:
        python_function: tensors → tensors, without None among them.
        args: what it is called with: copies take tensors of the same types and shapes.

    Returns:
        The other function; None if the operations draw random numbers from seeds: all copies would draw the same.
    """
    traced = tf.function(python_function, autograph=False).get_concrete_function(*args)
    if _draws_by_seed(traced.graph):
        return None
    # With its graph, TensorFlow would forget the functions that the copies call, such as the branches of a condition.
    tf.compat.v1.get_default_graph().add_to_collection(_COPIED, traced)
    operations = _Operations(traced)

    def copy(*args: Any) -> Any:
        graph: Any = tf.compat.v1.get_default_graph()
        given = [value for value in tf.nest.flatten(args, expand_composites=True) if tf.is_tensor(value)]
        results = operations.add([*given, *map(graph.capture, traced.captured_inputs)])
        return tf.nest.pack_sequence_as(traced.structured_outputs, results, expand_composites=True)

    return copy


class _Operations:
    """The operations of a function.

    Args:
        traced: its `ConcreteFunction`.
    """

    def __init__(self, traced: Any) -> None:
        self._definition = traced.graph.as_graph_def()
        self._inputs, self._outputs = (
            [tensor.name for tensor in tensors] for tensors in (traced.graph.inputs, traced.graph.outputs)
        )
        own = {node.name for node in self._definition.node} - {tensor.op.name for tensor in traced.graph.inputs}
        for node in (node for node in self._definition.node if "_class" in node.attr):
            beside = {place.decode().removeprefix("loc:@") for place in node.attr["_class"].list.s}
            if not beside <= own:  # the iterator that it reads from is not among them
                del node.attr["_class"]

    def add(self, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds the operations to the graph that is being traced.

        Args:
            given: in place of the function's inputs, those included that it has captured.

        Returns:
            Its outputs.
        """
        to_given = dict(zip(self._inputs, given, strict=True))
        with tf.control_dependencies(None):  # import_graph_def fails with control dependencies
            found = tf.graph_util.import_graph_def(self._definition, to_given, self._outputs, name="copy")
        return list(found)


def _draws_by_seed(graph: Any) -> bool:
    """Whether operations of a graph draw random numbers that continue from one call to the next, from a seed."""
    return any("seed" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i) for node in _nodes(graph))


def _has_jumps(graph: Any) -> bool:
    """Whether a graph has loops or conditions that become jumps between operations.

    Seen in TensorFlow 2.21.0: the node attribute `_lower_using_switch_merge`. Reason: the single-threaded executor
    refuses jumps only when it runs. Replace with: nothing, once it runs them.
    """
    return any(node.attr["_lower_using_switch_merge"].b for node in _nodes(graph))


def _nodes(graph: Any) -> list[Any]:
    """Returns the operations of a graph, and of the functions that it calls."""
    written = graph.as_graph_def()
    return [*written.node, *(node for function in written.library.function for node in function.node_def)]


class _Inlining(threading.local):
    """Whether this thread inlines functions."""

    active = False


_inlining = _Inlining()


@contextlib.contextmanager
def functions_inlined() -> Iterator[None]:
    """Within the context, each `tf.function` that is called is inlined into the function being traced.

    TensorFlow caches the trace of a function. A second step would therefore compute with the weight tensors of the
    first one. Also, the values that a layer assigns within a `tf.function` would be tensors of that function's graph.

    Seen in TensorFlow 2.21.0: `polymorphic_function.Function.__call__`, `_autograph`,
    `_experimental_autograph_options`, `ag_ctx.ControlStatusCtx`, `autograph_util.py_func_from_autograph`. Reason:
    `tf.config.run_functions_eagerly` acts on all threads, and drops AutoGraph. Replace with: a public context.
    """
    before, _inlining.active = _inlining.active, True
    try:
        yield
    finally:
        _inlining.active = before


def _inlining_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Function.__call__` so that it inlines the function within `functions_inlined`."""

    def __call__(self: Function, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 replaces the method of this name
        if not _inlining.active or tf.executing_eagerly():
            return call(self, *args, **kwargs)
        python = self.python_function
        if not self._autograph:
            return python(*args, **kwargs)
        options = self._experimental_autograph_options
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
            return autograph_util.py_func_from_autograph(python, options)(*args, **kwargs)

    return __call__


# Patched for the whole process, since several threads trace the replicas of a machine. The patch is active only within
# `functions_inlined`.
Function.__call__ = _inlining_call(Function.__call__)


class _Announcing(threading.local):
    """What this thread calls before functions."""

    before: Callable[[], None] | None = None


_announcing = _Announcing()


@contextlib.contextmanager
def announced_calls(before: Callable[[], None]) -> Iterator[None]:
    """Within the context, a function is called before each `tf.function` that this thread calls, not traces.

    Seen in TensorFlow 2.21.0: `polymorphic_function.Function.__call__`, `concrete_function.ConcreteFunction.__call__`.
    Reason: a program's function may read variables whose values are fetched only when they are used. Replace with: a
    public hook of functions.
    """
    outer, _announcing.before = _announcing.before, before
    try:
        yield
    finally:
        _announcing.before = outer


def _announcing_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__call__` of functions so that it calls what `announced_calls` was given."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 replaces the method of this name
        if _announcing.before is not None and tf.executing_eagerly():
            _announcing.before()
        return call(self, *args, **kwargs)

    return __call__


# As above, active only within `announced_calls`.
for _kind in (Function, ConcreteFunction):
    _kind.__call__ = _announcing_call(_kind.__call__)


def placing(choose: Callable[[tf.Operation], str]) -> contextlib.AbstractContextManager[None]:
    """Within it, a function chooses the device of each operation that is added to the current graph.

    Seen in TensorFlow 2.21.0: `Graph.device` with a function. Reason: `tf.device` takes none, and the gradients of
    operations are not placed with them. Replace with: gradients on the devices of their operations.
    """
    return tf.compat.v1.get_default_graph().device(choose)
