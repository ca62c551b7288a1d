"""A ps keeps the values of its variables in memory while workers take steps."""

import gc

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import memory
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import ALLOWED, StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import Aborted, PsSteps
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, OthersMemory

FLOATS, DOUBLES, INTEGERS = (np.dtype(each) for each in (np.float32, np.float64, np.int64))
LAYOUT = StepLayout(
    Layout([[Array(FLOATS, 17), Array(FLOATS, 3)]], [[Array(INTEGERS, 2)]], Array(DOUBLES, 2)),
    slots=1,
    workers=2,
    state=2,
    assigned=[],
)
FIRST, COUNT = 1000, 7


@pytest.fixture
def own():
    found = PsSteps(0, LAYOUT)
    yield found
    found.abort()


@pytest.fixture
def few_reports(monkeypatch):
    """Of three steps the reports are kept."""
    monkeypatch.setattr(memory, "_REPORTS_BYTES", 3 * LAYOUT.arrays.report.bytes)
    assert LAYOUT.kept == 3


def variables_of(value):
    """The parameters, their slots, and the state."""
    sizes = [17, 3, 17, 3]
    return [*(np.full(size, value + index, FLOATS) for index, size in enumerate(sizes)), np.full(2, value, INTEGERS)]


def stored(own):
    return [each.tolist() for each in own._content.variables]


def add_one(own):
    """Changes all variables in the memory, as workers do."""
    for place in own._content.variables:
        np.add(place, 1, out=place)


@pytest.mark.parametrize(("steps", "allowed"), [(0, 0), (1, 1), (3, 3), (4, 3), (50, 3)])
def test_workers_may_be_as_many_steps_ahead_as_reports_are_kept(few_reports, own, steps, allowed):
    own.begin(FIRST, COUNT, FIRST + steps, variables_of(1))
    assert own._content.numbers[ALLOWED] == FIRST + allowed


def test_variables_that_were_assigned_are_taken_and_the_others_are_not_copied_again(own):
    variables = variables_of(10)
    own.begin(FIRST, COUNT, FIRST, variables)
    assert stored(own) == [each.tolist() for each in variables]
    add_one(own)
    own.begin(FIRST + 100, COUNT, FIRST + 100, variables)
    assert stored(own) == [(each + 1).tolist() for each in variables]
    assigned = [np.full(3, 5, FLOATS) if index == 1 else each for index, each in enumerate(variables)]
    own.begin(FIRST + 200, COUNT, FIRST + 200, assigned)
    assert stored(own) == [[5] * 3 if index == 1 else (each + 1).tolist() for index, each in enumerate(variables)]


def test_what_is_read_are_copies_and_what_was_assigned_meanwhile_stays(own):
    variables = variables_of(10)
    own.begin(FIRST, COUNT, FIRST, variables)
    add_one(own)
    variables[0] = np.zeros(17, FLOATS)
    copies = own.read(variables)
    expected = [np.zeros(17, FLOATS), *(each + 1 for each in variables[1:])]
    assert [each.tolist() for each in copies] == [each.tolist() for each in expected]
    for place in own._content.variables:
        place.fill(77)
    assert [each.tolist() for each in copies] == [each.tolist() for each in expected]
    own.begin(FIRST + 100, COUNT, FIRST + 100, copies)  # they are the variables now
    assert all(set(each) == {77} for each in stored(own))


def test_a_run_that_was_aborted_goes_not_on(own):
    own.begin(FIRST, COUNT, FIRST + 1, variables_of(1))
    own.check()
    own.abort()
    with pytest.raises(Aborted):
        own.check()
    with pytest.raises(Aborted):
        own.begin(FIRST + 100, COUNT, FIRST + 101, variables_of(1))


def test_memory_of_an_aborted_run_is_not_opened_and_nothing_is_left_open():
    before = opened()
    own = PsSteps(0, LAYOUT)
    other = OthersMemory.of(own.identity)
    assert len(other.first(ALIGNED)) == ALIGNED
    own.abort()
    own.abort()
    with pytest.raises(FileNotFoundError):
        OthersMemory.of(own.identity)
    del own, other
    gc.collect()
    assert not opened() - before


def test_a_task_that_shares_no_memory_has_none(monkeypatch):
    monkeypatch.setenv("TFDIST_SHARE_MEMORY", "0")
    with pytest.raises(OSError):  # noqa: PT011 the switch, and any other reason
        PsSteps(0, LAYOUT)
