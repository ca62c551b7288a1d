"""A ps lets workers take steps ahead, and reads their reports."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import memory, ps
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import ALLOWED, END, REPORTED, UPDATED, WANTED, StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import Aborted, PsSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
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
WORKERS = range(LAYOUT.workers)


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


def take(own, number, sequence, tells=True):
    """Does for a worker what the ps sees of a step."""
    content = own._content
    content.reports[number, sequence % LAYOUT.kept] = sequence, number
    content.workers[number].store(UPDATED, sequence)
    if tells and sequence >= content.numbers[WANTED]:
        content.workers[number].store(REPORTED, sequence)


def work(own, number, first=FIRST):
    """Takes steps as they are allowed; returns the sequence number at the end."""
    numbers, sequence = own._content.numbers, first
    while True:
        seen = numbers[ALLOWED]
        if sequence >= numbers[END]:
            return sequence
        if seen > sequence:
            take(own, number, sequence)
            sequence += 1
        else:
            numbers.sleep(ALLOWED, seen, 60)


def reports_of(begin, end):
    return [[[sequence, number] for number in WORKERS] for sequence in range(begin, end)]


@pytest.mark.parametrize("chunks", [[1], [2, 3], [1, 1, 1], [20], [7, 1, 12]])
def test_the_reports_of_all_steps_arrive_in_order(few_reports, own, chunks):
    """A ps that keeps those of three steps collects those of many."""
    own.begin(FIRST, COUNT, FIRST + chunks[0], variables_of(1))
    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, own, number) for number in WORKERS]
        done, allowed = FIRST, FIRST + chunks[0]
        for index in range(len(chunks)):
            following = allowed + sum(chunks[index + 1 : index + 2])
            reports = own.collect(done, allowed - done, following, ends=index + 1 == len(chunks))
            assert reports.tolist() == reports_of(done, allowed)
            done, allowed = allowed, following
        assert [each.result() for each in working] == [done] * 2


@pytest.mark.parametrize(("steps", "allowed"), [(0, 0), (1, 1), (3, 3), (4, 3), (50, 3)])
def test_workers_may_be_as_many_steps_ahead_as_reports_are_kept(few_reports, own, steps, allowed):
    own.begin(FIRST, COUNT, FIRST + steps, variables_of(1))
    assert own._content.numbers[ALLOWED] == FIRST + allowed


def test_more_steps_are_allowed_before_those_are_done(own):
    own.begin(FIRST, COUNT, FIRST + 1, variables_of(1))
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(own.collect, FIRST, 1, FIRST + 5, ends=False)
        numbers = own._content.numbers
        while (seen := numbers[ALLOWED]) < FIRST + 5:
            numbers.sleep(ALLOWED, seen, 60)
        for number in WORKERS:
            take(own, number, FIRST)
        assert collected.result().tolist() == reports_of(FIRST, FIRST + 1)
    assert numbers[END] > FIRST + 1000


def test_a_step_of_which_nobody_has_told_is_found(own, monkeypatch):
    """The worker was killed when it had updated its part, and its next process waits for the next step."""
    monkeypatch.setattr(ps, "_CHECK_SECONDS", 0.01)
    own.begin(FIRST, COUNT, FIRST + 1, variables_of(1))
    waits, sleep = threading.Event(), Words.sleep
    monkeypatch.setattr(Words, "sleep", lambda *arguments: (waits.set(), sleep(*arguments)))
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(own.collect, FIRST, 1, FIRST + 1, ends=True)
        assert waits.wait(30)
        for number in WORKERS:
            take(own, number, FIRST, tells=False)
        assert collected.result().tolist() == reports_of(FIRST, FIRST + 1)


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


def test_a_ps_that_waits_ends_when_the_run_is_aborted(own, monkeypatch):
    monkeypatch.setattr(ps, "_CHECK_SECONDS", 60)
    own.begin(FIRST, COUNT, FIRST + 1, variables_of(1))
    waits, sleep = threading.Event(), Words.sleep
    monkeypatch.setattr(Words, "sleep", lambda *arguments: (waits.set(), sleep(*arguments)))
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(own.collect, FIRST, 1, FIRST + 1, ends=True)
        assert waits.wait(30)
        until = time.monotonic() + 30
        while not collected.done() and time.monotonic() < until:
            own.abort()  # again, as the wait may begin after a call
        assert collected.done()
        with pytest.raises(Aborted):
            collected.result()
    with pytest.raises(Aborted):
        own.collect(FIRST, 1, FIRST + 1, ends=True)
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
