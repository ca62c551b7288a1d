"""The chief lets workers take steps ahead, and reads their reports."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import chief, memory
from tfdist_cli.train.cluster.shared_memory.lockstep.chief import ChiefSteps, NoMoreSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import ALLOWED, END, REPORTED, UPDATED, WANTED, StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import PsSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES

FLOATS, DOUBLES = np.dtype(np.float32), np.dtype(np.float64)
LAYOUT = StepLayout(Layout([[Array(FLOATS, 17)]], [[]], Array(DOUBLES, 2)), slots=0, workers=2, state=2, assigned=[])
FIRST, COUNT = 1000, 7
WORKERS = range(LAYOUT.workers)


@pytest.fixture
def own():
    found = PsSteps(0, LAYOUT)
    yield found
    found.abort()


@pytest.fixture
def of_chief(own):
    return ChiefSteps(LAYOUT, [own.identity])


@pytest.fixture
def few_reports(monkeypatch):
    """Of three steps the reports are kept."""
    monkeypatch.setattr(memory, "_REPORTS_BYTES", 3 * LAYOUT.arrays.report.bytes)
    assert LAYOUT.kept == 3


def begin(own, steps):
    own.begin(FIRST, COUNT, FIRST + steps, [np.ones(17, FLOATS)])


def take(own, number, sequence, tells=True):
    """Does for a worker what the chief sees of a step."""
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
def test_the_reports_of_all_steps_arrive_in_order(few_reports, own, of_chief, chunks):
    """Also if those of three steps are kept, and many are collected."""
    begin(own, chunks[0])
    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, own, number) for number in WORKERS]
        done, allowed = FIRST, FIRST + chunks[0]
        for index in range(len(chunks)):
            following = allowed + sum(chunks[index + 1 : index + 2])
            reports = of_chief.collect(done, allowed - done, following, ends=index + 1 == len(chunks))
            assert reports.tolist() == reports_of(done, allowed)
            done, allowed = allowed, following
        assert [each.result() for each in working] == [done] * 2


def test_more_steps_are_allowed_before_those_are_done(own, of_chief):
    begin(own, 1)
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(of_chief.collect, FIRST, 1, FIRST + 5, ends=False)
        numbers = own._content.numbers
        while (seen := numbers[ALLOWED]) < FIRST + 5:
            numbers.sleep(ALLOWED, seen, 60)
        for number in WORKERS:
            take(own, number, FIRST)
        assert collected.result().tolist() == reports_of(FIRST, FIRST + 1)
    assert numbers[END] > FIRST + 1000


def test_a_step_of_which_nobody_has_told_is_found(own, of_chief, monkeypatch):
    """The worker was killed when it had updated its part, and its next process waits for the next step."""
    monkeypatch.setattr(chief, "_CHECK_SECONDS", 0.01)
    begin(own, 1)
    with ThreadPoolExecutor(1) as pool:
        collected = Waits(monkeypatch, pool, of_chief).result
        for number in WORKERS:
            take(own, number, FIRST, tells=False)
        assert collected.result().tolist() == reports_of(FIRST, FIRST + 1)


class Waits:
    """A call of the chief that waits for steps, for a minute at most, but if it is woken."""

    def __init__(self, monkeypatch, pool, of_chief):
        began, sleep = threading.Event(), Words.sleep
        monkeypatch.setattr(Words, "sleep", lambda *arguments: (began.set(), sleep(*arguments)))
        self.result = pool.submit(of_chief.collect, FIRST, 1, FIRST + 1, ends=True)
        assert began.wait(30)


def test_it_ends_when_the_run_is_aborted(own, of_chief, monkeypatch):
    monkeypatch.setattr(chief, "_CHECK_SECONDS", 60)
    begin(own, 1)
    with ThreadPoolExecutor(1) as pool:
        collected = Waits(monkeypatch, pool, of_chief).result
        until = time.monotonic() + 30
        while not collected.done() and time.monotonic() < until:
            own.abort()  # again, as the wait may begin after a call
        assert collected.done()
        with pytest.raises(NoMoreSteps):
            collected.result()
    with pytest.raises(NoMoreSteps):
        of_chief.collect(FIRST, 1, FIRST + 1, ends=True)


HOLDS_MEMORY = """
import sys
from tfdist_cli.train.cluster.shared_memory.memory import Region

region, identity = Region.identifying(100)
sys.stdout.buffer.write(identity)
sys.stdout.flush()
sys.stdin.read()
"""


def test_it_does_not_wait_for_a_ps_that_was_killed(own, monkeypatch):
    """Nobody tells of it; and the leader goes on."""
    monkeypatch.setattr(chief, "_CHECK_SECONDS", 0.01)
    begin(own, 1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        of_chief = ChiefSteps(LAYOUT, [own.identity, holder.stdout.read(IDENTITY_BYTES)])
        with ThreadPoolExecutor(1) as pool:
            collected = Waits(monkeypatch, pool, of_chief).result
            assert not collected.done()
            holder.kill()
            holder.wait()
            with pytest.raises(NoMoreSteps):
                collected.result()


def test_memory_that_was_closed_cannot_be_opened(own):
    own.abort()
    before = opened()
    with pytest.raises(FileNotFoundError):
        ChiefSteps(LAYOUT, [own.identity])
    assert not opened() - before
