"""What a step passes to the model in place of its weights: tensors that TensorFlow takes for variables.

A gradient function of the user's (`tf.custom_gradient`, `tf.recompute_grad`, `keras.remat`, a tape within a layer)
returns gradients for its arguments and for the *variables* that it has seen read. A tensor that it uses besides is a
constant to it: it would get no gradient, without an error. So the model is not given the bare tensor, but a variable
whose value and whose handle are this tensor. It adds no operation to the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

# Not public: TensorFlow has no other way to make something that tapes take for a variable, nor to trace a function
# within another one. Seen in TensorFlow 2.21.
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import tape
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable


class Weight(BaseResourceVariable):
    """A variable whose value is a tensor, which cannot be assigned.

    Args:
        value: the tensor. Gradients with respect to the variable are gradients with respect to this tensor.
        name: the variable's name, for messages.
    """

    def __init__(self, value: tf.Tensor, name: str) -> None:
        super().__init__(
            trainable=True, shape=value.shape, dtype=value.dtype, handle=value, name=name, handle_name=name
        )

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:  # noqa: ARG002 TensorFlow's parameter
        self.accessed()
        return self._handle

    def accessed(self) -> None:
        """Tells tapes and gradient functions that the variable is read."""
        # Not `variable_accessed`: it has the function that is traced remember the variable for later calls.
        tape.variable_accessed(self)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """See `tf.Variable`."""
        return tf.gather(self._read_variable_op(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """See `tf.Variable`."""
        return tf.gather_nd(self._read_variable_op(), indices, name=name)


class _Inlining(threading.local):
    """Whether this thread traces a step."""

    active = False


_inlining = _Inlining()


@contextmanager
def functions_inlined() -> Iterator[None]:
    """Within it, a `tf.function` that is called becomes part of the function that is traced.

    TensorFlow keeps what it has traced of a function: a second step would compute with the first one's weights, which
    are other tensors. What a layer assigns within a function of its own would not leave that function.
    """
    before, _inlining.active = _inlining.active, True
    try:
        yield
    finally:
        _inlining.active = before


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    """`Function.__call__` that heeds `functions_inlined`."""

    def __call__(self: Function, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 it replaces the method
        if not _inlining.active or tf.executing_eagerly():
            return call(self, *args, **kwargs)
        python = self.python_function
        if not self._autograph:
            return python(*args, **kwargs)
        options = self._experimental_autograph_options
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
            return autograph_util.py_func_from_autograph(python, options)(*args, **kwargs)

    return __call__


# For the whole process, as replicas of one machine are traced by several threads; it acts within `functions_inlined`.
Function.__call__ = _called(Function.__call__)
