"""Values and gradients arrive unchanged, whatever they are packed with."""

import contextlib
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.cluster.shared_memory import tensors
from tfdist_cli.train.engine.parameter_server import transport as transport_module
from tfdist_cli.train.engine.parameter_server.transport import Piggyback, Pulled, Transport
from tfdist_cli.train.model.embeddings import LookedUpRows, Lookup
from tfdist_cli.train.optimizers.terms import SIZES, SQUARES, SummedTerms, tensors_of, whole_table
from tfdist_cli.train.variables.sharding import parts

pytestmark = pytest.mark.slow

SHAPES = [(2, 3), (), (4,), (1, 0, 2), (3, 1)]
DTYPES = ("float32", "float32", "bfloat16", "float32", "bfloat16")


def looked_up(numbers):
    return Lookup([LookedUpRows.on_worker(each) for each in numbers], [])


def variable(value, dtype="float32"):
    """A variable created as layers create theirs: sharded if its size asks for it."""
    made = keras.Variable("zeros", shape=np.shape(value), dtype=dtype)
    made.assign(value)
    return made


def parameters(dtypes=DTYPES):
    return [
        variable(np.arange(int(np.prod(shape))).reshape(shape), dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def same(given, variables):
    for tensor, variable in zip(given, variables, strict=True):
        assert tensor.dtype == variable.dtype
        np.testing.assert_array_equal(tf.cast(tensor, tf.float32), tf.cast(variable.value, tf.float32))


def whole(gradient, variable):
    """The gradient that arrived for a variable, as one array."""
    shards = []
    for part, of in zip(gradient, parts(variable), strict=True):
        assert part.dtype == of.dtype
        shards.append(tf.convert_to_tensor(part).numpy())
    return np.concatenate(shards) if len(shards) > 1 else shards[0]


def sent(transport, lookups, gradients):
    """Runs a compiled function: returns what workers pulled, and the mean of the gradients that arrived."""

    @tf.function(autograph=False)
    def send():
        pulled = [transport.pull(lookup) for lookup in lookups]
        pushed = [transport.push(given, own) for given, own in zip(gradients, pulled, strict=True)]
        return [own.values for own in pulled], transport.gradients(pushed)

    return send()


def operations(function):
    """The operations of a compiled function, functions within it included."""
    graph = function.get_concrete_function().graph
    return [op for each in (graph, *graph._functions.values()) for op in getattr(each, "graph", each).get_operations()]


def test_all_values_arrive():
    variables = parameters()
    same(tf.function(lambda: Transport(variables).pull().values)(), variables)


def test_gradients_arrive_in_the_type_of_their_variable_and_none_as_zeros():
    variables = parameters()
    gradients = [tf.convert_to_tensor(variable.value) for variable in variables]
    gradients[1] = None
    _, ((*arrived,)) = sent(Transport(variables), [looked_up([])], [gradients])
    variables[1].assign(0.0)
    same([part for (part,) in arrived], variables)


def test_a_dense_gradient_of_rows_arrives_whole():
    variables = [variable(np.ones((4, 2)))]
    rows = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 2, 0]), tf.constant([4, 2]))
    _, (gradient,) = sent(Transport(variables), [looked_up([])], [[rows]])
    np.testing.assert_array_equal(whole(gradient, variables[0]), [[2, 2], [0, 0], [1, 1], [0, 0]])


@pytest.mark.parametrize("count", [1, 3])
def test_each_type_crosses_in_one_piece(count):
    variables = [variable(np.ones((2, 2), np.float32)) for _ in range(count)]
    pulled = tf.function(lambda: Transport(variables).pull().values)
    assert [op.type for op in operations(pulled)].count("ConcatV2") == (count > 1)


def test_only_variables_below_the_limit_are_packed(monkeypatch):
    monkeypatch.setattr(transport_module, "LARGE_BYTES", 16)
    variables = parameters(["float32"] * len(SHAPES))
    buckets = Transport(variables, tables=(4,)).buckets
    # 6 values are large, and so are 4; the last one is a table, whose rows are packed whatever its size
    assert [[shard.parameter for shard in each.dense + each.tables] for each in buckets] == [[0], [1, 3, 4], [2]]
    same(tf.function(lambda: Transport(variables).pull().values)(), variables)


@pytest.fixture(params=["in buffers", "in messages"])
def shared(request, monkeypatch):
    """Every variable that has a value crosses in shared memory, or would if tasks could open each other's."""
    monkeypatch.setattr(tensors, "_process", tensors._Process())
    monkeypatch.setattr(transport_module, "LARGE_SHARED_BYTES", 1)
    tensors.register()
    assert request.param == "in messages" or tensors.meeting(0, ["CPU:0"])()


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("shared")
def test_what_crosses_in_shared_memory_arrives_the_same(servers, wire, count):
    with servers(count, shard=ShardRule(min_bytes=8)).scope():
        variables = [*parameters(), variable(np.linspace(0, 1, 12).reshape(6, 2))]
    terms = {0: SQUARES, 5: SIZES}
    gradients = [[tf.fill(each.shape, tf.cast(worker / 3, each.dtype)) for each in variables] for worker in (1, 2)]

    @tf.function(autograph=False)
    def crossed(is_shared):
        transport = Transport(variables, (), wire, terms=terms, shared=is_shared)
        assert transport.shares == is_shared
        pulled = [transport.pull() for _ in gradients]
        pushed = [transport.push(given, own) for given, own in zip(gradients, pulled, strict=True)]
        return [own.values for own in pulled], [tensors_of(shards) for shards in transport.gradients(pushed)]

    tf.nest.map_structure(np.testing.assert_array_equal, crossed(is_shared=False), crossed(is_shared=True))


@pytest.mark.usefixtures("shared")
def test_in_shared_memory_small_variables_are_packed(monkeypatch):
    monkeypatch.setattr(transport_module, "LARGE_SHARED_BYTES", 16)
    variables = parameters(["float32"] * len(SHAPES))
    buckets = Transport(variables, tables=(4,), shared=True).buckets
    assert [[shard.parameter for shard in each.dense + each.tables] for each in buckets] == [[0], [1, 3, 4], [2]]
    assert [each.is_large for each in buckets] == [True, False, True]


def test_no_parameters():
    assert Transport([]).pull().values == []
    pulled = Transport([]).pull()
    assert Transport([]).gradients([Transport([]).push([], pulled)]) == []


ROWS = 10


@pytest.fixture(
    params=[(1, 3, None), (1, 4, None), (3, 3, None), (3, 4, None), (1, 3, 100), (3, 4, 16)],
    ids=["whole", "whole-same-width", "sharded", "sharded-same-width", "whole-large", "sharded-same-width-large"],
)
def model(request, servers, monkeypatch):
    """A table among dense parameters, another one of the same width or not, and one of type bfloat16.

    Dense parameters are packed, or large enough to cross alone.
    """
    random = np.random.default_rng(1)
    count, width, large = request.param
    if large:
        monkeypatch.setattr(transport_module, "LARGE_BYTES", large)
    with servers(count, shard=ShardRule(min_bytes=100)).scope():
        variables = [
            variable(random.normal(size=(7, 5))),
            variable(random.normal(size=(ROWS, 4))),
            variable(random.normal(size=3)),
            variable(random.normal(size=(ROWS + 2, width))),
            variable(random.normal(size=(ROWS, 8)), "bfloat16"),
        ]
    assert [len(parts(each)) for each in variables] == [count, count, 1, count, count]
    return variables


TABLES = (1, 3, 4)
NUMBERS = [[[3, 0, 4, 9], [11], [2]], [[4, 5], [], [0, 9, 7]], [[], [1, 0], [2, 3]]]
"""For each of three workers the rows of each table, shard by shard. With 3 shards, of 4, 3 and 3 rows, some shards get
no request."""


def lookup(worker, variables):
    rows = []
    for index, numbers in zip(TABLES, NUMBERS[worker], strict=True):
        begin = 0
        for part in parts(variables[index]):
            own = [number - begin for number in numbers if 0 <= number - begin < part.shape[0]]
            rows.append(tf.constant(own, tf.int32))
            begin += part.shape[0]
    return looked_up(rows)


def gradients_of(worker, variables, dtype=np.float32):
    """Gradients of a worker's step: for tables, one for each of the looked-up rows."""
    random = np.random.default_rng(100 + worker)
    shapes = [each.shape for each in variables]
    for index, rows in zip(TABLES, NUMBERS[worker], strict=True):
        shapes[index] = (len(rows), *shapes[index][1:])
    return [tf.cast(random.normal(size=shape), each.dtype) for shape, each in zip(shapes, variables, strict=True)]


def in_the_whole(worker, variables, gradients):
    """The same gradients, with respect to whole variables."""
    full = [tf.cast(gradient, tf.float64).numpy() for gradient in gradients]
    for index, rows in zip(TABLES, NUMBERS[worker], strict=True):
        values, full[index] = full[index], np.zeros(variables[index].shape)
        full[index][rows] = values
    return full


@pytest.mark.rotates(5)
def test_of_tables_the_rows_arrive_in_the_order_of_their_numbers(model):
    transport = Transport(model, TABLES)
    for worker in range(3):
        (values,), _ = sent(transport, [lookup(worker, model)], [gradients_of(worker, model)])
        same([values[0], values[2]], [model[0], model[2]])
        for index, rows in zip(TABLES, NUMBERS[worker], strict=True):
            assert values[index].dtype == model[index].dtype
            np.testing.assert_array_equal(values[index], np.asarray(model[index].numpy())[rows])


def test_numbers_that_are_sent_ahead_bring_the_same_rows(model, monkeypatch):
    transport, received = Transport(model, TABLES), []
    lookups = [lookup(worker, model) for worker in range(3)]
    row_numbers = Transport._row_numbers

    def counted(*args):
        received.append(args)
        return row_numbers(*args)

    monkeypatch.setattr(Transport, "_row_numbers", counted)
    sent_ahead = transport.sent_ahead(lookups)
    assert len(received) == sum(bool(bucket.tables) for bucket in transport.buckets)
    for given, alone in zip(sent_ahead, lookups, strict=True):
        some, others = transport.pull(given), transport.pull(alone)
        for group, others_group in zip((some.values, some.rows), (others.values, others.rows), strict=True):
            for one, other in zip(tf.nest.flatten(group), tf.nest.flatten(others_group), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("workers", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_the_mean_of_gradients_arrives_where_each_row_is(model, workers):
    transport = Transport(model, TABLES)
    given = {worker: gradients_of(worker, model) for worker in workers}
    _, arrived = sent(transport, [lookup(worker, model) for worker in workers], list(given.values()))
    wanted = np.mean([np.array(in_the_whole(n, model, own), object) for n, own in given.items()], axis=0)
    for index, (gradient, mean) in enumerate(zip(arrived, wanted, strict=True)):
        if index in TABLES:
            for part in gradient:
                assert isinstance(part, tf.IndexedSlices)
                assert len(set(part.indices.numpy())) == len(part.indices), "each row once"
        rounding = 2.0**-6 if model[index].dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(np.float64(whole(gradient, model[index])), mean, atol=rounding)


@pytest.mark.rotates(5)
def test_no_ps_sends_a_whole_table(model):
    transport = Transport(model, TABLES)
    pulled = tf.function(lambda: transport.pull(lookup(0, model)).values).get_concrete_function()
    read = {
        capture.name for op in pulled.graph.get_operations() if op.type == "ReadVariableOp" for capture in op.inputs
    }
    handles = {id(outer): inner.name for outer, inner in pulled.graph.captures}
    for index, each in enumerate(model):
        for part in parts(each):
            assert (handles[id(part.handle)] in read) == (index not in TABLES)


@pytest.mark.rotates(5)
def test_held_values_are_not_read_again(model):
    transport = Transport(model, TABLES)
    held = transport.pull(looked_up([tf.zeros([0], tf.int32) for index in TABLES for _ in parts(model[index])])).values
    again = tf.function(lambda: transport.pull(lookup(1, model), held).values)
    assert "ReadVariableOp" not in {op.type for op in operations(again)}
    values = again()
    same([values[0], values[2]], [model[0], model[2]])
    np.testing.assert_array_equal(values[1], np.asarray(model[1].numpy())[NUMBERS[1][0]])


@pytest.mark.rotates(5)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_wire_rounds_once_each_way_and_keeps_types(model, dtype):
    transport = Transport(model, TABLES, dtype)
    given = gradients_of(0, model)
    (values,), arrived = sent(transport, [lookup(0, model)], [given])
    for index, (value, gradient) in enumerate(zip(values, arrived, strict=True)):
        kept = model[index].dtype
        assert value.dtype == kept
        whole_value = tf.convert_to_tensor(model[index].numpy())
        wanted = tf.gather(whole_value, NUMBERS[0][TABLES.index(index)]) if index in TABLES else whole_value
        narrow = kept == "bfloat16"  # as wide as the wire: it is not rounded
        np.testing.assert_array_equal(value, wanted if narrow else tf.cast(tf.cast(wanted, dtype), kept))
        sent_up = in_the_whole(0, model, [each if narrow else tf.cast(each, dtype) for each in given])[index]
        np.testing.assert_array_equal(np.float64(whole(gradient, model[index])), sent_up)


def casts(function, dtype):
    """How many times a function casts to a type, and from it."""
    found = [(op.inputs[0].dtype, op.outputs[0].dtype) for op in operations(function) if op.type == "Cast"]
    return sum(to == dtype for _, to in found), sum(of == dtype for of, _ in found)


def test_a_narrow_wire_casts_once_for_each_ps_and_way():
    variables = [variable(np.ones((2, 2))) for _ in range(5)]
    transport = Transport(variables, dtype="float16")
    assert casts(tf.function(lambda: transport.pull().values), tf.float16) == (1, 1)
    pulled = transport.pull()
    gradients = [tf.ones((2, 2))] * 5
    assert casts(tf.function(lambda: transport.gradients([transport.push(gradients, pulled)])), tf.float16) == (1, 1)
    plain = Transport(variables)
    assert casts(tf.function(lambda: plain.pull().values), tf.float16) == (0, 0)


@pytest.mark.rotates(5)
def test_compensation_is_the_papers_formula(model):
    transport = Transport(model, TABLES)
    given, factor = gradients_of(0, model), 0.3
    pulled = transport.pull(lookup(0, model))
    before = [np.float64(each.numpy()) for each in model]
    for each in model:
        each.assign(tf.cast(each, "float32") * 1.5 - 0.25)
    changed = transport.gradients([transport.compensated(transport.push(given, pulled), pulled, factor)])
    for index, gradient in enumerate(in_the_whole(0, model, given)):
        moved = np.float64(model[index].numpy()) - before[index]
        wanted = gradient + factor * gradient**2 * moved
        tolerance = 0.1 if model[index].dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(np.float64(whole(changed[index], model[index])), wanted, atol=tolerance)


@pytest.mark.rotates(5)
def test_unchanged_parameters_need_no_compensation_whatever_the_wire(model):
    transport = Transport(model, TABLES, "bfloat16")
    given = gradients_of(0, model)
    pulled = transport.pull(lookup(0, model))
    pushed = transport.push(given, pulled)
    plain, changed = (transport.gradients([each]) for each in (pushed, transport.compensated(pushed, pulled, 0.5)))
    for index, each in enumerate(model):
        np.testing.assert_array_equal(whole(changed[index], each), whole(plain[index], each))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("dtypes", [["float32"] * 5, ["bfloat16"] * 5, ["float64"] * 5])
@pytest.mark.parametrize("tables", [(), (0,), (0, 4)])
@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_numbers_cross_with_gradients_to_the_bit(dtypes, tables, wire):
    transport = Transport(parameters(dtypes), tables, wire)
    bucket = transport.piggyback_bucket(transport.buckets[0].device)
    numbers = [[np.pi, np.nan, 1e-310, -0.0], [2.0**62, -np.inf, 3.0, 1 / 3]]
    gradients = [tf.cast(tf.fill(shape, 1.5), dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    lookup = looked_up([tf.range(SHAPES[index][0]) for index in tables])

    @tf.function(autograph=False)
    def send():
        pulled = transport.pull(lookup)
        piggybacks = [Piggyback(bucket, tf.constant(own, tf.float64)) for own in numbers]
        pushed = [transport.push(gradients, pulled, piggyback) for piggyback in piggybacks]
        found = [gradient for [gradient] in transport.gradients(pushed, bucket)]
        return [each.piggyback for each in pushed], list(map(tf.convert_to_tensor, found))

    arrived, found = send()
    assert [own.numpy().tobytes() for own in arrived] == [np.array(own).tobytes() for own in numbers]
    for gradient, own in zip(gradients, found, strict=True):
        np.testing.assert_array_equal(own.numpy(), gradient.numpy())


TERMS = {0: SQUARES, 1: SQUARES, 3: SIZES}
"""Of a variable that crosses whole, and of two tables."""


def terms_of(worker, variables):
    """Gradients whose rows repeat, and others."""
    random, given = np.random.default_rng(worker), gradients_of(worker, variables)
    for index in TERMS:
        count = len(NUMBERS[worker][TABLES.index(index)]) if index in TABLES else variables[index].shape[0]
        rows = random.integers(0, count, 9 if count else 0)
        values = tf.constant(random.normal(size=(len(rows), variables[index].shape[1])), tf.float32)
        given[index] = tf.IndexedSlices(values, tf.constant(rows))
    return given


def sums_of(gradient):
    return gradient.values, gradient.terms


def repeated(worker, index, variables, given):
    """The terms of a parameter as rows of the whole variable."""
    rows = given[index].indices.numpy()
    if index in TABLES:
        rows = np.array(NUMBERS[worker][TABLES.index(index)], int)[rows]
    return rows, given[index].values.numpy().astype(np.float64)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("wire", ["float32", "float16"])
@pytest.mark.parametrize("workers", [(0,), (0, 1, 2)])
def test_the_sums_of_terms_arrive_with_the_mean(model, workers, wire):
    transport = Transport(model, TABLES, wire, terms=TERMS)
    given = [terms_of(worker, model) for worker in workers]
    lookups = [lookup(worker, model) for worker in workers]

    @tf.function(autograph=False)
    def send():
        pulled = [transport.pull(each) for each in lookups]
        arrived = transport.gradients([transport.push(*pair) for pair in zip(given, pulled, strict=True)])
        assert {n for n, found in enumerate(arrived) if isinstance(found[0], SummedTerms)} == {*TERMS}
        found = {n: [whole_table(part) for part in arrived[n]] for n in TERMS}
        return {n: [tf.concat(each, 0) for each in zip(*map(sums_of, own), strict=True)] for n, own in found.items()}

    arrived = send()
    rounding = 2.0**-9 if wire == "float16" else 1e-6
    for index, kind in TERMS.items():
        total, terms = np.zeros(model[index].shape), np.zeros(model[index].shape)
        for worker, own in zip(workers, given, strict=True):
            rows, values = repeated(worker, index, model, own)
            np.add.at(total, rows, values / len(workers))
            np.add.at(terms, rows, kind.of(values / len(workers)).numpy())
        for found, wanted in zip(arrived[index], (total, terms), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=4 * rounding, atol=rounding)


def test_the_sums_of_terms_cross_before_other_numbers():
    variables = [variable(np.ones((4, 2))), variable(np.ones(3))]
    transport = Transport(variables, terms={0: SQUARES})
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([2, 2]))
    pushed = transport.push([rows, tf.ones(3)], transport.pull(), Piggyback(0, tf.constant([np.pi], tf.float64)))
    [[table], [other]] = transport.gradients([pushed], 0)
    assert pushed.piggyback.numpy() == [np.pi]
    np.testing.assert_array_equal(table.total[2], [4, 6])
    np.testing.assert_array_equal(table.terms[2], [10, 20])
    np.testing.assert_array_equal(other, [1, 1, 1])
    plain = Transport(variables)
    more = transport.sizes(looked_up([]))["pushed"] - plain.sizes(looked_up([]))["pushed"]
    assert int(more) == 4 * 2 * 4
    assert int(transport.sizes(looked_up([]))["pulled"]) == int(plain.sizes(looked_up([]))["pulled"])


def test_numbers_cross_only_with_packed_gradients():
    single, packed = (Transport(parameters()[:count]) for count in (1, 2))
    device = single.buckets[0].device
    assert single.piggyback_bucket(device) is None
    assert packed.piggyback_bucket(device) == 0
    assert packed.piggyback_bucket("/job:ps/task:7") is None


@pytest.mark.rotates(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tables", [(), (0,), (0, 4)])
def test_the_reported_bytes_are_those_that_cross(monkeypatch, dtype, tables):
    transport = Transport(parameters(["float32"] * len(SHAPES)), tables, dtype)
    lookup = looked_up([tf.constant([1, 0][: index // 4 + 1]) for index in tables])
    crossed, numbers = [], []

    def keeping(kept, index, method):
        def call(*args):
            result = method(*args)
            kept.append(args[index] if index else result)
            return result

        return call

    monkeypatch.setattr(Transport, "_rounded", keeping(crossed, 0, Transport._rounded))
    monkeypatch.setattr(Transport, "_row_numbers", keeping(numbers, 1, Transport._row_numbers))
    transport.push([None] * len(SHAPES), transport.pull(lookup))

    def size(values):
        return sum(tf.size(value).numpy() * value.dtype.size for value in tf.nest.flatten(values))

    reported = {name: int(value) for name, value in transport.sizes(lookup).items()}
    pulled, pushed = crossed
    assert reported == {"pulled": size(pulled), "pushed": size(pushed) + size(numbers)}
    numbers.clear()
    transport.sent_ahead([lookup] * 3)
    ahead = {name: int(value) for name, value in transport.sizes(lookup, ahead=True).items()}
    assert 3 * (ahead["pushed"] - size(pushed)) == size(numbers)


def test_rows_of_an_unknown_shape_are_unpacked():
    """As those that a ps has stored."""
    variables = [variable(np.ones((4, 2))), variable(np.ones((3, 2)))]
    transport = Transport(variables, (0, 1), terms={0: SQUARES, 1: SQUARES})
    rows = [tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([0, 0])) for _ in variables]

    @tf.function(autograph=False)
    def send():
        pushed = transport.push(rows, transport.pull(looked_up([tf.constant([2]), tf.constant([1])])))
        stored = [tf.compat.v1.placeholder_with_default(each, None) for each in pushed.packed]
        arrived = transport.gradients([replace(pushed, packed=stored)])
        return [tensors_of([whole_table(each)]) for [each] in arrived]

    for found, row in zip(send(), (2, 1), strict=True):
        assert [each[row].numpy().tolist() for each in found] == [[4, 6], [10, 20]]


def test_gradients_of_whole_variables_are_those_of_the_worker():
    """Nothing is rounded, packed or sent where the parameters are updated in place."""
    variables = [variable(np.zeros(shape)) for shape in ((2, 3), (3, 2), (2, 2), ())]
    transport = Transport(variables, dtype="bfloat16", terms={1: SQUARES, 2: SIZES, 3: SQUARES})
    sparse = tf.IndexedSlices(tf.constant([[1.0, 2], [3, 4], [-1, 1]]), tf.constant([2, 0, 2]), tf.constant([3, 2]))
    exact = tf.constant([[1 + 2**-20, -2.0], [3.0, 4.0]])
    values = [tf.zeros(each.shape) for each in variables]
    none, of_rows, of_sizes, scalar = transport.whole_gradients(
        [None, sparse, exact, tf.constant(3.0)], Pulled.whole(values)
    )
    assert none is None
    ((rows,), (sizes,), (number,)) = of_rows or [], of_sizes or [], scalar or []
    assert [each.kind for each in (rows, sizes, number)] == [SQUARES, SIZES, SQUARES]
    np.testing.assert_array_equal(rows.total, [[3, 4], [0, 0], [0, 3]])
    np.testing.assert_array_equal(rows.terms, [[9, 16], [0, 0], [2, 5]])
    np.testing.assert_array_equal(sizes.total, exact)
    np.testing.assert_array_equal(sizes.terms, np.abs(exact))
    assert (float(number.total), float(number.terms)) == (3, 9)


def test_gradients_of_rows_are_summed_where_workers_compute():
    scopes = []

    @contextlib.contextmanager
    def scope():
        scopes.append("entered")
        yield

    transport = Transport([variable(np.zeros((2, 2)))], device_scope=scope)
    sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([2, 2]))
    (found,) = transport.whole_gradients([sparse], Pulled.whole([tf.zeros([2, 2])]))
    (total,) = found or []
    np.testing.assert_array_equal(total, [[0, 0], [1, 1]])
    assert scopes
