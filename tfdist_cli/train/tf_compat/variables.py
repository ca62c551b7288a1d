"""Variables of TensorFlow and Keras: what stores their values, tensors in their place, lookups, initializers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import core
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow.random import _cast_seed
from keras.src.initializers import random_initializers
from keras.src.random.seed_generator import draw_seed
from tensorflow.python.distribute.sharded_variable import ShardedVariable as _ShardedVariable
from tensorflow.python.eager import tape
from tensorflow.python.ops import stateful_random_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from tfdist_cli.train.tf_compat.patching import original, replaced

_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""The shared name of resources that have none."""
Gather = Callable[[keras.Variable, tf.Tensor], tf.Tensor]
"""Returns rows of a variable, shape (n, …), for flat ids, int32, shape (n,); of a `DynamicEmbedding`, int64."""
ShardedVariable = _ShardedVariable
"""A variable that is cut into rows. Seen in TensorFlow 2.21.0: `sharded_variable.ShardedVariable`. Reason: strategies
create them, and the class is exported as `tf.__internal__.distribute.ShardedVariable` only. Replace with: a public
class."""


def stored(variable: Any) -> Any:
    """Returns TensorFlow's variable that holds a Keras variable; anything else as it is.

    Seen in Keras 3.15.1: `Variable._value`. Reason: the public `value` returns something else within an autocast or a
    stateless scope. Replace with: a public attribute.
    """
    return getattr(variable, "_value", variable)


class WeightTensor(BaseResourceVariable):
    """A read-only variable whose value is a tensor. A step passes such variables to the model in place of its weights.

    A gradient function in user code (`tf.custom_gradient`, `tf.recompute_grad`, `keras.remat`, a tape within a layer)
    returns gradients for its arguments and for the *variables* that it saw being read. Any other tensor is a constant
    to it, and would silently get no gradient. So the model gets a variable whose value and handle are the tensor. This
    adds no operation to the graph.

    Seen in TensorFlow 2.21.0: `resource_variable_ops.BaseResourceVariable`, `_handle`, `_read_variable_op`,
    `tape.variable_accessed`. Reason: there is no public way to make something that tapes take for a variable. Replace
    with: a public base class of variables.

    Args:
        value: the tensor. Gradients with respect to the variable are gradients with respect to this tensor.
        name: the variable's name, for messages.
        assigned: what the step has assigned to the variable: the variable's value from then on. As with a variable that
            is assigned, no gradient flows through the assignment, and gradients are those with respect to the variable.

    Attributes:
        current: its value, which a look at does not record.
    """

    def __init__(self, value: tf.Tensor, name: str, assigned: tf.Tensor | None = None) -> None:
        super().__init__(
            trainable=True, shape=value.shape, dtype=value.dtype, handle=value, name=name, handle_name=name
        )
        self.current = value if assigned is None else assigned

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:  # noqa: ARG002 TensorFlow's parameter
        self.accessed()
        return self._handle if self.current is self._handle else _in_place_of(self._handle, self.current)

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


@contextmanager
def rows_looked_up(tables: Sequence[keras.Variable], gather: Gather) -> Iterator[None]:
    """Within the context, lookups in some variables get the rows from a function, not from the whole variable.

    A lookup is `keras.ops.take(variable, ids, axis=0)`, as in `Embedding.call`, with dense, ragged or sparse ids; or
    `tf.gather(variable, ids)`, which calls `sparse_read` of its first argument. All else reads the whole variable.

    Seen in Keras 3.15.1: `backend.tensorflow.numpy.take`. Reason: `Embedding` and the classes derived from it read the
    whole table, and look up rows in it. Replace with: nothing, once Keras reads single rows of a variable.

    Args:
        tables: the variables.
        gather: returns their rows.
    """
    by_keras = original(keras_numpy, "take")

    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        read = getattr(x, "sparse_read", None) if isinstance(x, keras.Variable) and axis == 0 else None
        return read(indices) if read else by_keras(x, indices, axis)

    def read_of(table: keras.Variable) -> Callable[..., Any]:
        return lambda indices, name=None: _rows(table, indices, gather)  # noqa: ARG005 TensorFlow passes a name

    with ExitStack() as replacements:
        replacements.enter_context(replaced(keras_numpy, {"take": take}))
        for table in tables:
            replacements.enter_context(replaced(table, {"sparse_read": read_of(table)}))
        yield


def keep_row_index(table: keras.Variable, index: Any) -> None:
    """Keeps the index of a `DynamicEmbedding` with its table.

    Seen in Keras 3.15.1: `KerasVariable` has a `__dict__`. Reason: a layer tracks the variables in its attributes, and
    steps would fetch the whole index as they fetch other weights. Replace with: an attribute of a layer that Keras
    does not track.

    Args:
        table: the table of rows.
        index: its index, which is `table.row_index` from then on.
    """
    vars(table)["row_index"] = index


def after_assignments(variable: keras.Variable, then: Callable[[], None]) -> None:
    """Calls a function after each assignment to a Keras variable, such as those of `set_weights`.

    Seen in Keras 3.15.1: `Variable._direct_assign`, which `assign` calls outside of stateless scopes. Reason: a
    callback may assign any weights, and checkpoints of changed rows have to know. Replace with: a public hook.

    Args:
        variable: the variable.
        then: the function.
    """
    by_keras = variable._direct_assign

    def assign(value: Any) -> None:
        by_keras(value)
        then()

    vars(variable)["_direct_assign"] = assign


@contextmanager
def used_outside_of_functions(
    variables: Sequence[Any], before_read: Callable[[], None], before_assignment: Callable[[], None]
) -> Iterator[None]:
    """Within the context, functions are called before variables are read, or assigned, by a program's own statements.

    Functions that are traced do not call them.

    Seen in TensorFlow 2.21.0: `BaseResourceVariable._read_variable_op`, `CachingVariable._v`. Reason: the value of a
    variable on a ps may be fetched only when it is used. Replace with: a public hook of a variable.

    Args:
        variables: TensorFlow's variables.
        before_read: called before a variable is read, also by an assignment that adds to its value.
        before_assignment: called before a variable is assigned.
    """
    calls = {
        **dict.fromkeys(("_read_variable_op", "sparse_read", "gather_nd"), (before_read,)),
        "assign": (before_assignment,),
        **dict.fromkeys(
            ("assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub"),
            (before_read, before_assignment),
        ),
    }
    with ExitStack() as hooks:
        for variable in variables:
            stored_in = getattr(variable, "_v", variable)
            own = {name: _calling(before, getattr(stored_in, name)) for name, before in calls.items()}
            hooks.enter_context(replaced(stored_in, own))
        yield


def _calling(before: Sequence[Callable[[], None]], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        for each in before if tf.executing_eagerly() else ():
            each()
        return method(*args, **named)

    return call


def _rows(table: keras.Variable, ids: Any, gather: Gather) -> Any:
    """Returns the rows for ids of any shape."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(_rows(table, ids.flat_values, gather))
    if isinstance(ids, tf.SparseTensor):  # Keras looks up row 0 where there is no id
        ids = tf.ensure_shape(tf.sparse.to_dense(ids), ids.shape)
    ids = tf.convert_to_tensor(ids)
    any_ids = "row_index" in vars(table)  # of a `DynamicEmbedding`
    rows = gather(table, tf.reshape(ids if any_ids else _as_int32(ids), [-1]))
    width = table.shape[1:].as_list()
    static = ids.shape.rank and all(ids.shape[1:])
    shape: Any = [-1, *ids.shape[1:], *width] if static else tf.concat([tf.shape(ids), width], axis=0)
    rows = tf.ensure_shape(tf.reshape(rows, shape), [*ids.shape, *width])
    return tf.cast(rows, table.dtype)  # that of the autocast scope


def _as_int32(ids: tf.Tensor) -> tf.Tensor:
    """Casts ids to int32. Ids that do not fit become ids that no table has."""
    wider = ids.dtype.is_integer and ids.dtype.max > tf.int32.max
    return tf.saturate_cast(ids, tf.int32) if wider else tf.cast(ids, tf.int32)


@tf.custom_gradient
def _in_place_of(weight: tf.Tensor, assigned: tf.Tensor) -> Any:  # noqa: ARG001 for its gradient
    """Returns what was assigned to a weight; gradients with respect to it are those with respect to the weight."""
    return tf.identity(assigned), lambda gradient: (gradient, None)


def local_variable(value: tf.Tensor) -> Any:
    """Returns a variable of the function that is being traced: it starts with a value, and ends with the function.

    Seen in TensorFlow 2.21.0: `resource_variable_ops.BaseResourceVariable`, and the shared name of anonymous resources.
    Reason: a `tf.Variable` outlives the function that creates it. Replace with: a public variable for one call.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=_ANONYMOUS)
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return BaseResourceVariable(handle=handle, dtype=value.dtype, shape=value.shape, trainable=False)


def variable_at(place: tf.Tensor, shape: Any, write: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns a variable of the function that is being traced, whose values are in an array of a Python function.

    Kernels change the array. They would change a copy if the array were the variable's value itself: TensorFlow does
    not overwrite what belongs to NumPy. A part of the array is a buffer of its own, which does not know that.

    A value that has been read is the array, too: it changes with it, unless a kernel has to copy the array because the
    value is still in use. So whatever uses the value has to run before the next change.

    Seen in TensorFlow 2.21.0: `Tensor::RefCountIsOne` is false for the buffer of an array, and true for a slice of it
    that nothing else uses; `ResourceApplyAdam` and others copy the value of a variable if it is false. Reason: tasks of
    one host update parameters in the same memory. Replace with: variables in memory that the caller provides.

    Args:
        place: the array, as the function has returned it: the values, with others behind them.
        shape: of the variable. TensorFlow copies slices whose bytes are no multiple of 64: then the variable is flat,
            and has more values.
        write: assigns a value: writes it to the array.
    """
    size, every = int(np.prod(shape)), 64 // place.dtype.size
    if size % every:
        size += -size % every
        shape = [size]
    return _VariableAt(tf.reshape(place[:size], shape), write)


def flat_variable_at(place: tf.Tensor, write: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns such a variable, see `variable_at`, of a flat array of any size.

    Args:
        place: the array: values whose bytes are a multiple of 64, and another 64 bytes behind them.
        write: see `variable_at`.
    """
    return _VariableAt(place[: tf.size(place) - 64 // place.dtype.size], write)


class _VariableAt(BaseResourceVariable):
    """See `variable_at`."""

    def __init__(self, value: tf.Tensor, write: Callable[[tf.Tensor], tf.Tensor]) -> None:
        handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=_ANONYMOUS)
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        super().__init__(handle=handle, dtype=value.dtype, shape=value.shape, trainable=False)
        self._write = write

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:  # noqa: ARG002 TensorFlow's parameters
        """Assigns a value; it has to be known which operations wait for it, so nothing is read."""
        return self._write(tf.cast(value, self.dtype))


class Read(keras.Variable):
    """A Keras variable that has been read: formulas see the value, and assignments have no effect.

    Seen in Keras 3.15.1: `Variable._autocast`, `_dtype`, `_shape`, `_ndim`. Reason: `keras.Variable` creates storage
    for its value. Replace with: a public Keras variable without storage.
    """

    def __init__(self, value: tf.Tensor) -> None:  # Keras's own would create storage
        self._read, self._autocast = value, False
        self._dtype, self._shape, self._ndim = value.dtype.name, value.shape, value.shape.rank

    @property
    def value(self) -> tf.Tensor:
        """The value that was read."""
        return self._read

    def assign(self, _value: Any) -> None:
        """Has no effect."""

    assign_add = assign_sub = assign


def wrap_initialization(around: Callable[[Any, tuple[int, ...], str], AbstractContextManager[Any]]) -> None:
    """Enters a context around the creation of the storage of each Keras variable, for the rest of the process.

    Seen in Keras 3.15.1: `core.Variable._initialize_with_initializer`, `Variable._shape`, `_dtype`. Reason: Keras
    passes TensorFlow a value only, not the initializer. Replace with: a public hook.

    Args:
        around: the initializer, the shape and the type of a variable → the context.
    """
    by_keras = core.Variable._initialize_with_initializer

    def initialize(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        with around(initializer, tuple(variable._shape), variable._dtype):
            by_keras(variable, initializer)

    core.Variable._initialize_with_initializer = initialize


@contextmanager
def random_functions(stand_in: Any) -> Iterator[None]:
    """Within it, Keras's initializers draw by the functions of another object: `uniform`, `normal`, `truncated_normal`.

    Seen in Keras 3.15.1: the name `random` in `random_initializers`. Reason: an initializer publishes neither the
    distribution nor the seed that it would draw with. Replace with: a public description of a drawing.
    """
    by_keras = random_initializers.random
    random_initializers.random = stand_in
    try:
        yield
    finally:
        random_initializers.random = by_keras


def seed_tensor(seed: Any) -> tf.Tensor:
    """Returns the seed that Keras passes to TensorFlow's stateless operations: two integers.

    Seen in Keras 3.15.1: `random.seed_generator.draw_seed`, `backend.tensorflow.random._cast_seed`. Reason: Keras casts
    seeds only on their way to its own operations. Replace with: a public function.

    Args:
        seed: as Keras's initializers take it.
    """
    return _cast_seed(draw_seed(seed))


def global_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's global random number generator; None if nothing has used it yet.

    Seen in TensorFlow 2.21.0: `stateful_random_ops.global_generator`. Reason: the public
    `tf.random.get_global_generator` creates one. Replace with: a public function that does not.
    """
    return stateful_random_ops.global_generator


def move_variable(variable: tf.Variable, device: str) -> None:
    """Moves the storage of a variable to another device; the variable stays the same object.

    Seen in TensorFlow 2.21.0: `BaseResourceVariable._handle`. Reason: a variable's device is fixed when it is created,
    and optimizers know variables as objects. Replace with: a public method of a variable.
    """
    with tf.device(device):
        moved = tf.Variable(tf.identity(variable.read_value()), trainable=variable.trainable)
    variable._handle, moved._handle = moved._handle, variable._handle
