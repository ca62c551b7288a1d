"""Operations let workers take steps together in the memory of ps; this process is both."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import step_operations
from tfdist_cli.train.cluster.shared_memory.lockstep.chief import NoMoreSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import UPDATED, StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.step_operations import Steps
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import IS_OVER, WorkerSteps
from tfdist_cli.train.cluster.shared_memory.stored import close_unused, close_with
from tfdist_cli.train.tf_compat.control_flow import after, changes
from tfdist_cli.train.tf_compat.variables import flat_variable_at

FLOATS, DOUBLES, INTEGERS = (np.dtype(each) for each in (np.float32, np.float64, np.int64))
SHAPES = [[[3, 5], [], [0, 2]], [[40]]]
"""Of the parameters of each ps, which have one slot each."""
STATE = [[Array(FLOATS, 3), Array(INTEGERS, 1)], [Array(DOUBLES, 1)]]
FIRST, COUNT = 40, 4
RATE, MOMENTUM = 0.5, 0.5


def layout_of(servers):
    values = [[Array(FLOATS, int(np.prod(shape))) for shape in own] for own in SHAPES[:servers]]
    return StepLayout(
        Layout(values, STATE[:servers], Array(DOUBLES, 4)), slots=1, workers=2, state=1, assigned=[(0, 0)]
    )


class Run:
    """The ps, with their variables; workers are functions."""

    def __init__(self, servers=2):
        self.layout = layout_of(servers)
        self.steps = Steps(["CPU:0"] * servers, self.layout)
        self.ps = self.steps.opened()
        self.chief = self.steps.of_chief(self.ps)
        self.variables = [
            [
                *(tf.Variable(tf.ones(shape)) for shape in shapes),
                *(tf.Variable(tf.zeros(shape)) for shape in shapes),
                *(tf.Variable(tf.zeros([array.size], array.dtype)) for array in state),
            ]
            for shapes, state in zip(SHAPES[:servers], STATE, strict=False)
        ]

    def begin(self, allowed, first=FIRST, count=COUNT):
        @tf.function(autograph=False)
        def begin():
            begin, before, end = (tf.constant(each, tf.int64) for each in (first, count, allowed))
            return [self.steps.begin(self.ps[ps], begin, before, end, own) for ps, own in enumerate(self.variables)]

        assert [int(each) for each in begin()] == [first] * len(self.variables)

    def collect(self, first, count, allowed, *, ends):
        return self.chief.collect(first, count, allowed, ends=ends)

    def read(self):
        tf.function(
            lambda: [self.steps.read(self.ps[ps], own) for ps, own in enumerate(self.variables)], autograph=False
        )()

    def values(self):
        return [[each.numpy().tolist() for each in own] for own in self.variables]

    def joined(self, number):
        return self.steps.join(tf.constant(number), self.ps)

    def variables_at(self, number, places):
        """The worker's parts of the parameters of each ps, and of their slots."""
        return [
            [
                flat_variable_at(place, partial(self.steps.write, number, ps, 2 * part + index))
                for index, place in enumerate(copies)
            ]
            for ps, own in enumerate(places)
            for part, copies in enumerate(own.parts)
        ]

    def worker(self, number, first=FIRST, leave=lambda values: values):
        """A function that takes all steps of a run.

        It returns how many updates it has made again, the end, and how many updates there were before the last one.
        """
        steps = self.steps

        @tf.function(autograph=False)
        def work():
            joined = self.joined(number)
            token = steps.first_step(joined, tf.constant(first, tf.int64))
            places = steps.places(after(joined, [token]))
            parts = self.variables_at(joined, places)

            def update(count, means):
                with changes() as made, tf.control_dependencies([count]):
                    for (part, slot), mean in zip(parts, means, strict=True):
                        tf.raw_ops.ResourceApplyKerasMomentum(
                            var=part.handle, accum=slot.handle, lr=RATE, grad=mean, momentum=MOMENTUM
                        )
                return made

            def again(found, times, count, *means):
                return following(after(joined, update(count, means)), times + 1)

            def following(ready, times):
                count, found, means = steps.replay(ready)
                return [found, times, count, *means]

            start = following(after(joined, [token]), tf.constant(0))
            found, times, *_ = tf.while_loop(lambda found, *_: found, again, start, parallel_iterations=1)
            token = after(token, [found])

            def step(token, _):
                sequence = token[0]
                with changes() as made:
                    values = [after(each, [token]) for own in places for each in own.parameters]
                    state = after(places[0].state[0], [token])
                    gradients = [each + tf.cast(number, tf.float32) for each in values]
                    new = tf.cast(state, tf.float64) + tf.cast(1 + number, tf.float64)
                    report = tf.concat([tf.cast(sequence[None], tf.float64), new], axis=0)
                report = after(report, made)
                if number:
                    count, means = steps.gradients(joined, steps.commit(joined, sequence, report, gradients))
                else:
                    count, means = steps.meet(joined, sequence, report, gradients)
                return steps.finish(joined, after(sequence, update(count, means))), count

            goes_on, start = lambda token, _: token[1] != IS_OVER, [token, tf.constant(0, tf.int64)]
            token, count = tf.while_loop(goes_on, step, start, parallel_iterations=1)
            with tf.control_dependencies([token]):
                values = leave([each.read_value() for own in parts for each in own])
            return times, after(token, [steps.leave(after(joined, [token]), values)]), count

        return work.get_concrete_function()


@pytest.fixture
def process(monkeypatch):
    found = step_operations._Process()
    monkeypatch.setattr(step_operations, "_process", found)
    step_operations.register()
    yield found
    for each in found._of_ps.values():
        each.abort()


def expected(servers, steps):
    """The values of all variables after some steps: those of a ps are the same everywhere but for the shape."""
    value, slot, state = 1.0, 0.0, 0.0
    for _ in range(steps):
        slot = slot * MOMENTUM - RATE * (value + 0.5)
        value, state = value + slot, state + 1.5
    own = [
        [
            *(np.full(shape, value).tolist() for shape in shapes),
            *(np.full(shape, slot).tolist() for shape in shapes),
            *([0] * array.size for array in arrays),
        ]
        for shapes, arrays in zip(SHAPES[:servers], STATE, strict=False)
    ]
    own[0][6] = [state] * 3
    return own


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_take_the_steps_of_several_runs(process, servers):
    run = Run(servers)
    for turn, first in enumerate([FIRST, FIRST + 1000]):
        workers = [run.worker(number, first) for number in range(2)]
        run.begin(first + 1, first, COUNT + 4 * turn)
        before = run.values()
        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(each) for each in workers]
            reports = [
                run.collect(first, 1, first + 4, ends=False),
                run.collect(first + 1, 3, first + 4, ends=True),
            ]
            assert [[number.numpy().tolist() for number in each.result()] for each in working] == [
                [0, [first + 4, IS_OVER], COUNT + 4 * turn + 3]
            ] * 2
        assert [each.shape for each in reports] == [(1, 2, 4), (3, 2, 4)]
        assert np.concatenate(reports)[:, :, 0].tolist() == [[first + step] * 2 for step in range(4)]
        assert run.values() == before  # the variables have copies
        run.read()
        assert run.values() == expected(servers, 4 * (turn + 1))
    assert len(process._of_worker) == 2  # both runs


def test_a_worker_that_is_started_again_makes_its_updates_again(process, monkeypatch):
    """It was killed while it updated its part, and is the same process as the others here."""
    run = Run()
    run.begin(FIRST + 4)
    other = WorkerSteps(0, run.layout, [each.tobytes() for each in run.ps.numpy()])
    killed = WorkerSteps(1, run.layout, [each.tobytes() for each in run.ps.numpy()])
    for step in range(3):
        for number, each in enumerate((other, killed)):
            places = each.places
            parameters = [*places[:3], places[7]]
            assert each.begin(FIRST) == (FIRST + step, 4 - step)
            report = [FIRST + step, *(places[3].astype(float) + 1 + number)]
            each.commit(FIRST + step, np.array(report), [own + np.float32(number) for own in parameters])
        for each in (other, killed):
            _, means = each.gradients(FIRST + step)
            for (part, slot), mean in zip((each.places[5:7], each.places[9:11]), means, strict=True):
                own, momentum = part[:-16], slot[:-16]
                np.add(momentum * np.float32(MOMENTUM), mean * np.float32(-RATE), out=momentum)
                np.add(own, momentum, out=own)
                if each is killed and step == 2:
                    part[: len(own) // 2 + 1] = np.nan
        if step < 2:
            for each in (other, killed):
                each._own.store(UPDATED, FIRST + step)
    other._own.store(UPDATED, FIRST + 2)
    workers = [run.worker(number) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(each) for each in workers]
        run.collect(FIRST, 4, FIRST + 4, ends=True)
        assert [int(each.result()[0]) for each in working] == [0, 2]
    run.read()
    assert run.values() == expected(2, 4)


def test_a_part_that_has_left_the_memory_is_an_error(process):
    run = Run()
    run.begin(FIRST)
    works = [run.worker(0, leave=change) for change in (lambda values: values, lambda values: [*values[1:], values[0]])]
    works[0]()
    with pytest.raises(tf.errors.UnknownError):
        works[1]()


def test_an_assigned_part_is_written_to_the_memory(process):
    run = Run()
    run.begin(FIRST)

    @tf.function(autograph=False)
    def work():
        number = run.joined(1)
        parts = run.variables_at(number, run.steps.places(number))
        with tf.control_dependencies([each.assign(each.read_value() + 5) for own in parts for each in own]):
            left = [each.read_value() for own in parts for each in own]
        with tf.control_dependencies(left):
            return run.steps.leave(number, left)

    work()
    run.read()
    (kernel, scalar, empty, *slots, _, _), (other, slot, _) = run.variables
    assert [set(each.numpy().flat) for each in (kernel, scalar, empty)] == [{1}, {6}, set()]
    assert [set(each.numpy().flat) for each in slots] == [{0}, {5}, set()]
    part = run.layout.part(1, 1)
    assert other.numpy().tolist() == [6 if part.start <= index < part.stop else 1 for index in range(40)]
    assert slot.numpy().tolist() == [5 if part.start <= index < part.stop else 0 for index in range(40)]


def test_a_worker_finds_its_values_and_joins_once(process):
    run = Run()
    run.variables[0][0].assign(tf.reshape(tf.range(15.0), [3, 5]))
    run.begin(FIRST + 2)
    number = run.joined(0)
    assert int(run.joined(0)) == int(number)
    assert int(run.joined(1)) != int(number)
    assert run.steps.first_step(number, tf.constant(FIRST, tf.int64)).numpy().tolist() == [FIRST, 2]
    first, second = run.steps.places(number)
    assert [each.shape for each in (*first.parameters, *first.state)] == [(15,), (1,), (0,), (3,), (1,)]
    assert first.parameters[0].numpy().tolist() == list(range(15))
    assert second.parameters[0].numpy().tolist() == [1] * 40
    behind = 16
    for ps, own in enumerate((first, second)):
        part = run.layout.part(ps, 0)
        assert [each.shape for copies in own.parts for each in copies] == [(part.stop - part.start + behind,)] * 2
    count, found, _ = run.steps.replay(number)
    assert (int(count), bool(found)) == (0, False)


def test_workers_end_when_a_run_is_aborted(process):
    run = Run()
    workers = [run.worker(number) for number in range(2)]
    run.begin(FIRST + 2)
    run.steps.check(run.ps)
    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(each) for each in workers]
        run.collect(FIRST, 2, FIRST + 2, ends=False)
        for each in process._of_ps.values():  # by an operation, it would be a third function at once
            each.abort()
        assert [each.result()[1].numpy().tolist() for each in working] == [[FIRST + 2, IS_OVER]] * 2
    with pytest.raises(NoMoreSteps):
        run.collect(FIRST, 2, FIRST + 2, ends=True)
    for _ in range(2):
        run.steps.abort(run.ps)
    assert not process._of_ps
    for call in (
        lambda: run.steps.check(run.ps),
        lambda: run.begin(FIRST + 2),
        run.read,
    ):
        with pytest.raises(tf.errors.UnknownError):
            call()


def test_a_worker_that_waits_for_another_one_ends_when_the_run_is_aborted(process, monkeypatch):
    run = Run()
    work = run.worker(0)
    run.begin(FIRST + 2)
    waits, sleep = threading.Event(), Words.sleep
    monkeypatch.setattr(Words, "sleep", lambda *arguments: (waits.set(), sleep(*arguments))[1])
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        assert waits.wait(30)
        run.steps.abort(run.ps)
        assert working.result()[1].numpy()[1] == IS_OVER


def test_a_worker_that_comes_after_a_run_was_aborted_takes_no_step(process):
    run = Run()
    run.begin(FIRST + 2)
    run.steps.abort(run.ps)
    times, token, _ = run.worker(0)()
    assert (int(times), token.numpy().tolist()) == (0, [FIRST, IS_OVER])


def test_what_a_worker_has_of_runs_that_are_over_is_dropped(process):
    run = Run()
    number = run.joined(0)
    run.steps.abort(run.ps)
    run.steps.first_step(number, tf.constant(FIRST, tf.int64))
    before = opened()
    for _ in range(3):
        run = Run()
        last = run.joined(0)
        assert list(process._of_worker) == [int(last)]
        run.steps.abort(run.ps)
        run.steps.first_step(last, tf.constant(FIRST, tf.int64))
    with pytest.raises(tf.errors.UnknownError):  # a function of then goes on
        run.steps.places(number)
    assert not opened() - before


def test_memory_that_nobody_uses_is_closed(process):
    class User:
        pass

    user, run = User(), Run(1)
    close_with(user, partial(run.steps.abort, run.ps))
    close_unused()
    assert len(process._of_ps) == 1
    del user
    gc.collect()
    assert len(process._of_ps) == 1  # a finalizer may run in any thread
    close_unused()
    assert not process._of_ps
