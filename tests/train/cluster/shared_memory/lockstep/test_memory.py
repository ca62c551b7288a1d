"""What the memory of a ps has is where all tasks look for it."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import memory
from tfdist_cli.train.cluster.shared_memory.lockstep.factors import Factors
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import Content, StepLayout
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, aligned
from tfdist_cli.train.cluster.shared_memory.stored import aligned_bytes

FLOATS, DOUBLES, HALVES, INTEGERS = (
    np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float32", "float64", "bfloat16", "int64")
)


def layout_of(dtype=FLOATS, sizes=((17, 1, 0, 40), (33,)), slots=2, workers=3, report=5, matrices=()):
    """A layout; the matrices follow the parameters of each ps: examples, rows and columns."""
    factors = {
        (ps, len(own) + index): Factors(examples, rows, columns, workers, dtype.itemsize)
        for ps, own in enumerate(sizes)
        for index, (examples, rows, columns) in enumerate(matrices)
    }
    sizes = [[*own, *(rows * columns for _, rows, columns in matrices)] for own in sizes]
    values = [[Array(dtype, size) for size in own] for own in sizes]
    state = [[Array(FLOATS, 3), Array(INTEGERS, 1), Array(HALVES, 5)], *[[]] * (len(sizes) - 1)]
    return StepLayout(Layout(values, state, Array(DOUBLES, report)), slots, workers, 2, [(0, 2), (0, 0)], factors)


MATRICES = [(2, 16, 8), (1, 24, 2)]


@pytest.mark.parametrize(
    "layout",
    [
        layout_of(),
        layout_of(DOUBLES, [(3,)], slots=0, workers=1, report=0),
        layout_of(workers=5),
        layout_of(matrices=MATRICES),
        layout_of(DOUBLES, [(), ()], matrices=MATRICES),
    ],
)
def test_a_layout_crosses_as_numbers(layout):
    found = StepLayout.unpacked(layout.packed)
    assert layout.packed.dtype == np.int64
    assert [list(own) for own in found.arrays.values] == [list(own) for own in layout.arrays.values]
    assert [list(own) for own in found.arrays.others] == [list(own) for own in layout.arrays.others]
    assert found.arrays.report == layout.arrays.report
    assert (found.slots, found.workers, found.state) == (layout.slots, layout.workers, layout.state)
    assert list(found.assigned) == list(layout.assigned)
    assert list(found.factors.items()) == list(layout.factors.items())


def test_a_layout_without_assigned_state_crosses_as_numbers():
    layout = StepLayout(layout_of().arrays, 1, 2, 2, [])
    found = StepLayout.unpacked(layout.packed)
    assert list(found.assigned) == []
    assert found.packed.tolist() == layout.packed.tolist()


@pytest.mark.parametrize("dtype", [FLOATS, DOUBLES])
@pytest.mark.parametrize("workers", range(1, 6))
def test_parts_have_all_values_once_and_are_whole_lines(workers, dtype):
    layout = layout_of(dtype, sizes=[(17, 1, 0, 40), (1000, 3), (1,)], workers=workers)
    for ps in range(3):
        parts = [layout.part(ps, worker) for worker in range(workers)]
        values = layout.offsets(ps)[-1] // dtype.itemsize
        assert [number for part in parts for number in range(values)[part]] == list(range(values))
        assert all(part.start * dtype.itemsize % ALIGNED == 0 for part in parts)
        lines = [(part.stop - part.start) * dtype.itemsize / ALIGNED for part in parts]
        assert max(lines) - min(lines) <= 1


def test_parameters_begin_at_lines():
    assert layout_of(FLOATS).offsets(0) == [0, 128, 192, 192, 384]
    assert layout_of(DOUBLES).offsets(0) == [0, 192, 256, 256, 576]


@pytest.mark.parametrize(
    ("numbers", "kept"), [(0, 64), (1, 64), (1 << 11, 64), (1 << 12, 32), ((1 << 16) - 1, 2), (1 << 20, 2)]
)
def test_reports_of_some_steps_are_kept(numbers, kept):
    assert layout_of(report=numbers).kept == kept


@pytest.mark.parametrize(
    ("values", "kept"), [(1, 4), (1 << 20, 4), ((1 << 20) + 1, 3), (1 << 21, 2), (1 << 22, 1), (1 << 24, 1)]
)
def test_means_of_some_updates_are_kept(values, kept):
    """All values of all ps count, of four bytes each."""
    assert layout_of(sizes=[(values,)]).kept_means == kept
    if values > 1 << 20:
        assert layout_of(sizes=[(values - 16,), (16,)]).kept_means == kept


def test_factors_of_some_updates_are_kept():
    """In place of the means of the gradients; so those of a large matrix are as well."""
    assert layout_of(sizes=[()], workers=2, matrices=[(64, 2048, 4096)]).kept_means == 4
    assert layout_of(sizes=[()], workers=2, matrices=[(342, 2048, 4096)]).kept_means == 1


def arrays_of(content):
    """All arrays that are no views of others."""
    words = [np.frombuffer(each._numbers, np.int64) for each in (content.numbers, *content.workers)]
    rest = [content.reports, *content.flat, *(each for own in content.matrices for each in own)]
    rest += [*content.state, *content.gradients, *content.saved]
    rest += [*(each for own in content.saved_matrices for each in own), *content.means]
    factors = [each for kept in content.factors for places in kept for each in (*places.firsts, places.second)]
    return [*words, *rest, *factors]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        layout_of(),
        layout_of(DOUBLES, slots=0, workers=1),
        layout_of(report=0),
        layout_of(report=3, workers=5),
        layout_of(matrices=MATRICES),
        layout_of(DOUBLES, [(), ()], slots=1, matrices=MATRICES),
    ],
)
@pytest.mark.parametrize("ps", [0, 1])
def test_no_array_is_where_another_one_is(monkeypatch, layout, ps, few):
    if few:
        monkeypatch.setattr(memory, "_REPORTS_BYTES", 1)
        monkeypatch.setattr(memory, "_MEANS_BYTES", 1)
    size = Content.bytes(layout, ps)
    whole = aligned_bytes(size + 100)
    whole[:] = 255
    content = Content(whole[:size], layout, ps)
    arrays = arrays_of(content)
    for value, each in enumerate(arrays):
        each[...] = value
    assert [set(each.reshape(-1).tolist()) - {value} for value, each in enumerate(arrays)] == [set()] * len(arrays)
    assert all(each.ctypes.data % ALIGNED == 0 for each in arrays if each.size)
    assert set(whole[size:]) == {255}
    values = layout.offsets(ps)[-1]
    assert {each.nbytes for each in (*content.gradients, *content.saved, *content.means)} == {values}
    assert {each.nbytes for each in content.flat} == {values + ALIGNED}
    begins = [each.ctypes.data - whole.ctypes.data for each in arrays if each.size]
    assert begins[0] == 0
    assert aligned(max(begins) + next(each for each in reversed(arrays) if each.size).nbytes) == size


def test_views_have_the_values_of_each_parameter():
    layout = layout_of()
    content = Content(aligned_bytes(Content.bytes(layout, 0)), layout, 0)
    for each in (*content.flat, *content.gradients):
        each.fill(0)
    sizes = [17, 1, 0, 40]
    views = [content.parameters, *zip(*content.slots, strict=True), *content.gradient_of]
    flat = [*content.flat, *content.gradients]
    for number, own in enumerate(views):
        for index, (view, size) in enumerate(zip(own, sizes, strict=True)):
            assert view.shape == (size,)
            view[...] = 10 * number + index + 1
    for number, whole in enumerate(flat):
        for index, (begin, size) in enumerate(zip(layout.offsets(0), sizes, strict=False)):
            assert set(whole[begin // 4 : begin // 4 + size]) == ({10 * number + index + 1} if size else set())
        assert np.count_nonzero(whole) == sum(sizes)
    slots = [slot for own in content.slots for slot in own]
    for found, expected in zip(content.variables, [*content.parameters, *slots, *content.state], strict=True):
        assert found is expected


def test_views_have_the_values_of_each_matrix():
    layout = layout_of(sizes=[(17,), ()], matrices=MATRICES)
    content = Content(aligned_bytes(Content.bytes(layout, 0)), layout, 0)
    for number, own in enumerate(content.matrices):
        for copy, each in enumerate(own):
            each[...] = 10 * number + copy
    for place, found in enumerate([content.parameters, *zip(*content.slots, strict=True)]):
        assert [each.size for each in found] == [17, 16 * 8, 24 * 2]
        assert [set(each.tolist()) for each in found[1:]] == [{place}, {10 + place}]
    assert layout.summed(0) == [0]
    assert (layout.summed(1), layout.offsets(1), layout.part(1, 2)) == ([], [0], slice(0, 0))


def test_each_flat_array_has_values_behind_it():
    """A worker's part with 64 bytes more is within the memory, also that of the last worker."""
    layout = layout_of()
    content = Content(aligned_bytes(Content.bytes(layout, 0)), layout, 0)
    assert [each.nbytes for each in content.flat] == [layout.offsets(0)[-1] + ALIGNED] * 3
