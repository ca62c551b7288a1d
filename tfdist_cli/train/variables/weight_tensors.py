"""Tensors that TensorFlow treats as variables. A step passes them to the model in place of its weights.

A gradient function in user code (`tf.custom_gradient`, `tf.recompute_grad`, `keras.remat`, a tape within a layer)
returns gradients for its arguments and for the *variables* that it saw being read. Any other tensor is a constant to
it, and would silently get no gradient. So the model gets a variable whose value and handle are the tensor. This adds no
operation to the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

# Private names: TensorFlow has no public way to create a variable from a tensor, nor to inline a function into
# another one. Seen in TensorFlow 2.21.
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import tape
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable


class WeightTensor(BaseResourceVariable):
    """A read-only variable whose value is a tensor.

    Args:
        value: the tensor. Gradients with respect to the variable are gradients with respect to this tensor.
        name: the name of the variable, for messages.
    """

    def __init__(self, value: tf.Tensor, name: str) -> None:
        super().__init__(
            trainable=True, shape=value.shape, dtype=value.dtype, handle=value, name=name, handle_name=name
        )

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:  # noqa: ARG002 TensorFlow's parameter
        self.accessed()
        return self._handle

    def accessed(self) -> None:
        """Records the read with tapes and gradient functions."""
        # Not `variable_accessed`: with it, the traced function would keep the variable for later calls.
        tape.variable_accessed(self)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """See `tf.Variable`."""
        return tf.gather(self._read_variable_op(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """See `tf.Variable`."""
        return tf.gather_nd(self._read_variable_op(), indices, name=name)


class _Inlining(threading.local):
    """Whether this thread inlines functions."""

    active = False


_inlining = _Inlining()


@contextmanager
def functions_inlined() -> Iterator[None]:
    """Within the context, each `tf.function` that is called is inlined into the function being traced.

    TensorFlow caches the trace of a function. A second step would therefore compute with the weight tensors of the
    first one. Also, the values that a layer assigns within a `tf.function` would be tensors of that function's graph.
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
