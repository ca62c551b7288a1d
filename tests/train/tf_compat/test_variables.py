"""Variables: what is private is there, and the public way still does not do."""

import contextlib
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import core
from tensorflow.python.ops import stateful_random_ops

from tfdist_cli.train.optimizers import registry
from tfdist_cli.train.optimizers.apply import StoredParameter, apply_on_device, stored_parameters
from tfdist_cli.train.optimizers.terms import SummedTerms
from tfdist_cli.train.tf_compat import variables
from tfdist_cli.train.tf_compat.data import call_registered, forget_python, register_python
from tfdist_cli.train.tf_compat.variables import (
    Read,
    ShardedVariable,
    WeightTensor,
    after_assignments,
    keep_row_index,
    move_variable,
    rows_looked_up,
    stored,
    used_outside_of_functions,
)


def test_sharded_variables_have_no_public_class():
    shards = [tf.Variable(tf.ones([2, 3])), tf.Variable(tf.ones([1, 3]))]
    assert ShardedVariable(shards).shape == (3, 3)
    assert ShardedVariable is tf.__internal__.distribute.ShardedVariable
    assert not hasattr(tf.distribute, "ShardedVariable")


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_program_does_with_variables_is_seen(wrapped):
    """A strategy for parameter servers wraps variables."""
    variable, seen = tf.Variable([[1.0, 2.0], [3.0, 4.0]]), []
    given = types.SimpleNamespace(_v=variable) if wrapped else variable
    uses = {
        "r": [
            variable.numpy,
            lambda: variable + 1,
            lambda: tf.convert_to_tensor(variable),
            lambda: tf.gather(variable, [0]),
            lambda: tf.gather_nd(variable, [[0]]),
            variable.read_value,
        ],
        "a": [lambda: variable.assign([[1.0, 2], [3, 4]])],
        "ra": [
            lambda: variable.assign_add([[1.0, 2], [3, 4]]),
            lambda: variable.assign_sub([[1.0, 2], [3, 4]]),
            lambda: variable.scatter_update(tf.IndexedSlices([[1.0, 2.0]], [0])),
        ],
    }
    read = tf.function(lambda: variable + 1, autograph=False)
    with used_outside_of_functions([given], lambda: seen.append("r"), lambda: seen.append("a")):
        read()
        assert not seen
        for expected, each in uses.items():
            for use in each:
                seen.clear()
                use()
                assert "".join(seen)[: len(expected)] == expected
        seen.clear()
    for each in uses.values():
        for use in each:
            use()
    assert not seen
    assert not {"_read_variable_op", "assign"} & set(vars(variable))


def test_what_stores_a_variable_within_a_stateless_scope():
    variable = keras.Variable(1.0)
    assert stored(variable) is variable.value
    assert stored(5) == 5
    with keras.StatelessScope(state_mapping=[(variable, tf.constant(2.0))]):
        assert isinstance(stored(variable), tf.Variable)
        assert not isinstance(variable.value, tf.Variable), "the public value is the variable now"


def test_lookups_get_rows_from_a_function():
    table, other = keras.Variable(np.zeros((5, 2))), keras.Variable(np.ones((5, 2)))
    found = []

    def gather(variable, ids):
        assert variable is table
        found.append(ids.numpy().tolist())
        return tf.fill([len(ids), 2], 7.0)

    ids = np.array([[1, -1], [4, 1]])
    assert not hasattr(table, "sparse_read"), "Keras's variables can be read by rows now"
    with rows_looked_up([table], gather):
        for lookup in (keras.ops.take(table, ids, axis=0), tf.gather(table, tf.constant(ids))):
            np.testing.assert_array_equal(lookup, np.full((2, 2, 2), 7.0))
        ragged = keras.ops.take(table, tf.ragged.constant([[1], [2, 3]]), axis=0)
        assert ragged.row_lengths().numpy().tolist() == [1, 2]
        np.testing.assert_array_equal(keras.ops.take(table, ids), np.zeros((2, 2)))
        np.testing.assert_array_equal(keras.ops.take(other, ids, axis=0), np.ones((2, 2, 2)))
    assert found == [[1, -1, 4, 1], [1, -1, 4, 1], [1, 2, 3]]
    np.testing.assert_array_equal(keras.ops.take(table, ids, axis=0), np.zeros((2, 2, 2)))


def gradient_by_hand(weight):
    """The gradient of a variable that the user's own gradient function computes, with a plain tensor or not."""

    @tf.custom_gradient
    def scaled(x):
        y = x * weight

        def gradient(upstream, variables=()):
            return upstream * 3, [upstream * 5 for _ in variables]

        return y, gradient

    return scaled(tf.constant(2.0))


def test_gradient_functions_see_weights_as_variables():
    value = tf.constant(4.0)

    @tf.function
    def gradient_of(value, bare):
        with tf.GradientTape() as tape:
            tape.watch(value)
            weight = value if bare else WeightTensor(value, "weight")
            y = gradient_by_hand(weight)
        return tape.gradient(y, value, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    assert gradient_of(value, bare=False).numpy() == 5
    assert gradient_of(value, bare=True).numpy() == 0, "gradient functions see tensors now"


def test_rows_of_a_weight():
    weight = WeightTensor(tf.constant([[1.0], [2.0], [3.0]]), "weight")
    assert weight.sparse_read([2, 0]).numpy().tolist() == [[3], [1]]
    assert weight.gather_nd([[1]]).numpy().tolist() == [[2]]


def test_variables_of_one_call():
    @tf.function(autograph=False)
    def counted(start):
        variable = variables.local_variable(start)
        variable.assign_add(1.0)
        return variable.read_value()

    assert [counted(tf.constant(float(n))).numpy() for n in (1, 5)] == [2, 6]

    @tf.function(autograph=False)
    def public(start):
        return tf.Variable(start).assign_add(1.0)

    with pytest.raises(ValueError, match="singleton"):
        public(tf.constant(1.0))


def test_a_variable_that_has_been_read():
    read = Read(tf.constant([1.0, 2.0]))
    read.assign([5.0, 5.0])
    read.assign_add([1.0, 1.0])
    assert (read.dtype, tuple(read.shape), read.ndim) == ("float32", (2,), 1)
    assert keras.ops.convert_to_numpy(read * 2).tolist() == [2, 4]
    assert keras.ops.convert_to_tensor(read).numpy().tolist() == [1, 2]
    assert isinstance(keras.Variable(tf.constant(1.0)).value, tf.Variable), "Keras's variable creates no storage now"


def test_initializers_are_seen_when_storage_is_created(monkeypatch):
    monkeypatch.setattr(core.Variable, "_initialize_with_initializer", core.Variable._initialize_with_initializer)
    seen, by_scope = [], []

    @contextlib.contextmanager
    def around(initializer, shape, dtype):
        seen.append((initializer, shape, dtype))
        yield

    variables.wrap_initialization(around)
    initializer = keras.initializers.RandomNormal()

    def created(creator, **kwargs):
        by_scope.append(kwargs)
        return creator(**kwargs)

    with tf.variable_creator_scope(created):
        keras.Variable(initializer, shape=[2, 3], dtype="float64")
    assert seen == [(initializer, (2, 3), "float64")]
    assert initializer not in by_scope[0].values(), "TensorFlow is told the initializer now"


def test_what_initializers_draw_with():
    seen = []

    def uniform(**given):
        seen.append(given)
        return 7

    draw = types.SimpleNamespace(uniform=uniform)
    initializer = keras.initializers.RandomUniform(0.0, 2.0, seed=3)
    with variables.random_functions(draw):
        assert initializer([2]) == 7
    assert (seen[0]["minval"], seen[0]["maxval"]) == (0, 2)
    seed = variables.seed_tensor(seen[0]["seed"])
    plain = tf.random.stateless_uniform([2], seed, 0.0, 2.0)
    np.testing.assert_array_equal(initializer([2]), plain)


def test_the_public_global_generator_creates_one(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    assert variables.global_generator() is None
    made = tf.random.get_global_generator()
    assert variables.global_generator() is made, "the public function creates none now"


def test_a_variable_that_has_moved_is_the_same_object_with_the_same_value():
    variable = tf.Variable([1.0, 2.0])
    handle = variable.handle
    move_variable(variable, "CPU:0")
    assert variable.handle is not handle
    assert variable.assign_add([1.0, 1.0]).numpy().tolist() == [2.0, 3.0]


def test_a_layer_does_not_track_what_is_kept_with_its_table():
    layer = keras.layers.Layer()
    layer.table = layer.add_weight(shape=(2, 3))
    keep_row_index(layer.table, [keras.Variable("zeros", shape=(4,))])
    assert layer.table.row_index[0].shape == (4,)
    assert layer.variables == [layer.table]


def test_a_function_is_called_after_each_assignment_by_keras():
    variable, seen = keras.Variable([1.0, 2.0]), []
    after_assignments(variable, lambda: seen.append(variable.numpy().tolist()))
    variable.assign([3.0, 4.0])
    with keras.StatelessScope():
        variable.assign([5.0, 6.0])
    variable.assign_add([1.0, 1.0])
    assert seen == [[3.0, 4.0], [4.0, 5.0]]


class Memory:
    """Memory of this process, as a ps shares its own: arrays, each with 64 bytes behind it, and what is in it."""

    def __init__(self, values):
        sizes = [value.nbytes + -value.nbytes % 64 + 64 for value in values]
        self._bytes = np.full(sum(sizes) + 64, 255, np.uint8)  # behind the arrays, there is anything: here NaN
        begins = -self._bytes.ctypes.data % 64 + np.cumsum([0, *sizes[:-1]])
        self.padded = [
            self._bytes[begin : begin + value.nbytes + 64].view(value.dtype)
            for begin, value in zip(begins, values, strict=True)
        ]
        self.stored = [place[: value.size] for place, value in zip(self.padded, values, strict=True)]
        self.shapes = [value.shape for value in values]
        for place, value in zip(self.stored, values, strict=True):
            np.copyto(place, value.reshape(-1))
        self.found = []

    def __enter__(self):
        register_python("test_places", lambda _: self.padded)
        register_python("test_write", self._write)
        register_python("test_look", self._look)
        return self

    def __exit__(self, *_):
        for name in ("places", "write", "look"):
            forget_python(f"test_{name}")

    def _write(self, index, value):
        np.copyto(self.padded[index][: value.size], value.reshape(-1))
        return np.array(True)

    def _look(self, *values):
        self.found = [value.ctypes.data == place.ctypes.data for value, place in zip(values, self.stored, strict=True)]
        return np.array(True)

    def variables(self):
        """The variables of a function."""
        places = call_registered("test_places", [tf.constant(0)], [place.dtype for place in self.padded])
        return [
            variables.variable_at(place, shape, functools.partial(self.write, index))
            for index, (place, shape) in enumerate(zip(places, self.shapes, strict=True))
        ]

    def write(self, index, value):
        return call_registered("test_write", [tf.constant(index), value], [tf.bool])[0]

    def look(self, variables):
        """Notes in `found`, at the end of a function, which of the variables are in the memory."""
        call_registered("test_look", [each.read_value() for each in variables], [tf.bool])

    def values(self):
        return [place.reshape(shape).copy() for place, shape in zip(self.stored, self.shapes, strict=True)]


def fitted(value, variable):
    """A value with the shape of a variable that may be longer."""
    if value.shape == variable.shape:
        return value
    return tf.pad(tf.reshape(value, [-1]), [[0, variable.shape[0] - np.prod(value.shape, dtype=int)]])


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd, decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.8, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adam, clipped norm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
    "adam, clipped values": lambda: keras.optimizers.Adam(0.1, clipvalue=0.5),
    "amsgrad, decay": lambda: keras.optimizers.Adam(0.1, beta_2=0.9, amsgrad=True, weight_decay=0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "adamw, scaled loss": lambda: keras.optimizers.AdamW(0.1, loss_scale_factor=4.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "rmsprop, momentum": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "rmsprop, centered": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "rmsprop, all": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True, weight_decay=0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adagrad, large epsilon": lambda: keras.optimizers.Adagrad(0.1, epsilon=0.01, weight_decay=0.1),
    "adagrad from zero": lambda: keras.optimizers.Adagrad(0.1, 0.0),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5, weight_decay=0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1, weight_decay=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "ftrl, all terms": lambda: keras.optimizers.Ftrl(
        0.1, -0.7, l1_regularization_strength=0.1, l2_regularization_strength=0.02, beta=0.4, weight_decay=0.1
    ),
    "lion": lambda: keras.optimizers.Lion(0.1, weight_decay=0.1),
}
SHAPES = [(4, 8), (5,), (), (3, 7), (64,)]


def test_every_optimizer_with_a_kernel_has_a_case():
    assert {type(make()) for make in OPTIMIZERS.values()} == set(registry.KERNELS)


def assert_same(found, trained):
    for value, variable in zip(found, trained, strict=True):
        np.testing.assert_allclose(value, variable, rtol=1e-6, atol=1e-7)
        assert np.isfinite(value).all()


@pytest.mark.slow
@pytest.mark.rotates(5, by="kind")
@pytest.mark.parametrize("in_loop", [False, True], ids=["calls", "loop"])
@pytest.mark.parametrize("summed", [False, True], ids=["gradients", "terms"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_kernels_change_the_memory_as_they_change_variables(kind, dtype, summed, in_loop):
    steps, draw = 3, np.random.default_rng(0).normal
    optimizer, parameters = OPTIMIZERS[kind](), [keras.Variable(draw(size=shape), dtype=dtype) for shape in SHAPES]
    optimizer.build(parameters)
    stored = stored_parameters(optimizer, parameters)
    gradients = [tf.constant(draw(size=(steps, *shape)), dtype) for shape in SHAPES]
    taken = registry.fused_update_of(optimizer).kernel.terms if summed else None

    def update(own, step):
        given = [fitted(whole[step], each.shards[0]) for whole, each in zip(gradients, own, strict=True)]
        if taken is not None:
            given = [SummedTerms(each, taken.of(each / 2) + taken.of(each / 2), taken) for each in given]
        numbers = tf.constant(0.1), tf.cast(step, tf.int64)
        apply_on_device(optimizer, [[each] for each in given], own, numbers)

    def trained(own_of, end):
        @tf.function(autograph=False)
        def taken_steps(begin, end_step):
            own = own_of()
            if in_loop:
                body = lambda step: (update(own, step), step + 1)[1:]  # noqa: E731
                tf.while_loop(lambda step: step < end_step, body, [begin], parallel_iterations=1)
            else:
                update(own, begin)
            end(own)

        for step in [0] if in_loop else range(steps):
            taken_steps(tf.constant(step), tf.constant(steps))

    before = [each.numpy() for each in parameters]
    all_variables = [each for own in stored for each in (own.shards[0], *(slot for (slot,) in own.slots))]
    with Memory([each.numpy() for each in all_variables]) as memory:

        def in_memory():
            left = iter(memory.variables())
            return [StoredParameter(each.variable, [next(left)], [[next(left)] for _ in each.slots]) for each in stored]

        def look(own):
            memory.look([each for of in own for each in (of.shards[0], *(slot for (slot,) in of.slots))])

        trained(in_memory, look)
        assert memory.found == [True] * len(all_variables)
        found = memory.values()
    trained(lambda: stored, lambda _: None)
    assert_same(found, all_variables)
    assert all((value != variable.numpy()).any() for value, variable in zip(before, parameters, strict=True))


def test_an_array_itself_is_no_memory_of_a_variable():
    """The reason for `variable_at`: a kernel changes a copy of an array."""
    with Memory([np.zeros(16, np.float32)]) as memory:

        @tf.function(autograph=False)
        def change():
            (place,) = call_registered("test_places", [tf.constant(0)], [tf.float32])
            variable = variables.local_variable(tf.ensure_shape(place, [32]))
            add_one(variable)
            memory.look([variable])

        change()
        assert memory.found == [False]
        np.testing.assert_array_equal(memory.stored[0], np.zeros(16, np.float32))


def add_one(variable):
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=-1.0, delta=tf.ones(variable.shape, variable.dtype), use_locking=True
    )


@pytest.mark.parametrize("shape", [(16,), (4, 4), (), (1,), (15,), (17,), (0,), (3, 0)])
def test_values_of_any_size_are_changed_in_place(shape):
    before = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    with Memory([before, before]) as memory:

        @tf.function(autograph=False)
        def change():
            kept, changed = memory.variables()
            add_one(changed)
            memory.look([kept, changed])
            return changed.read_value()

        change()
        change()
        (kept, changed), size = memory.values(), before.size
        np.testing.assert_array_equal(kept, before)
        np.testing.assert_array_equal(changed, before + 2)
        assert memory.found == [True, True] or not size
        assert np.isnan(memory.padded[1][size + -size % 16 :]).all()  # nobody's, and nobody has written it


@pytest.mark.parametrize("shape", [(4, 4), (5,)])
def test_assignments_are_made_in_the_memory(shape):
    start = np.ones(shape, np.float32)
    with Memory([start]) as memory:

        @tf.function(autograph=False)
        def change():
            (variable,) = memory.variables()
            variable.assign_add(tf.ones(variable.shape), read_value=False)
            variable.assign_sub(variable * 0.25, read_value=False)
            done = variable.assign(fitted(variable.read_value()[: shape[0]] * 2.0, variable), read_value=False)
            with tf.control_dependencies([done]):
                memory.look([variable])

        change()
        assert memory.found == [True]
        np.testing.assert_array_equal(memory.values()[0], start * 3.0)


def apply_adam(variable, m, v):
    rates = dict.fromkeys(("beta1_power", "beta2_power", "lr", "beta1", "beta2"), tf.constant(0.5, variable.dtype))
    handles = {"var": variable.handle, "m": m.handle, "v": v.handle}
    one = tf.ones_like(variable.read_value())
    tf.raw_ops.ResourceApplyAdam(**handles, **rates, epsilon=tf.zeros([], variable.dtype), grad=one, use_locking=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 16, 48, 4096])
def test_flat_values_of_a_size_that_no_function_knows_are_changed_in_place(size, dtype):
    before = np.arange(size, dtype=dtype)
    with Memory([before, np.zeros_like(before), np.zeros_like(before), before]) as memory:

        @tf.function(autograph=False)
        def change():
            places = call_registered("test_places", [tf.constant(0)], [dtype] * 4)
            own = [
                variables.flat_variable_at(tf.ensure_shape(place, [None]), functools.partial(memory.write, index))
                for index, place in enumerate(places)
            ]
            assert [each.shape.as_list() for each in own] == [[None]] * 4
            apply_adam(*own[:3])
            with tf.control_dependencies([own[3].assign(own[3].read_value() + 3)]):
                memory.look(own)
                return tf.shape(own[0].read_value())

        assert change().numpy().tolist() == [size]
        assert memory.found == [True] * 4 or not size
        change()
        found, m, v, written = memory.values()
        np.testing.assert_array_equal(written, before + 6)
        for slot in (m, v):
            np.testing.assert_array_equal(slot, np.full(size, 0.75))
        changed = before - 0.5 * np.sqrt(0.5) / 0.5 * (0.5 / np.sqrt(0.5) + 0.75 / np.sqrt(0.75))
        np.testing.assert_allclose(found, changed, rtol=1e-6, atol=1e-6)
        assert all(np.isnan(each[size:]).all() for each in memory.padded)  # nobody's, and nobody has written it
