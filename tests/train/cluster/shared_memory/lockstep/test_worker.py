"""Workers that take steps together compute what one process would, also if some of them are started again."""

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
from tfdist_cli.train.cluster.shared_memory.lockstep import chief, memory, worker
from tfdist_cli.train.cluster.shared_memory.lockstep.chief import ChiefSteps, NoMoreSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.factors import Factors
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import COMMITTED, SAVED, UPDATED, Content, StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import PsSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import IS_OVER, MAY_BEGIN, WorkerSteps
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, IDENTITY_BYTES, NONCE_BYTES
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN

FLOATS, DOUBLES, INTEGERS = (np.dtype(each) for each in (np.float32, np.float64, np.int64))
SIZES = [[17, 256, 1, 40], [33, 96]]
"""Of the parameters of each ps."""
MATRICES = {(0, 1): (3, 32, 8), (1, 1): (2, 12, 8)}
"""Parameters whose gradients have factors: the examples of a worker, rows and columns."""
STATE = [[Array(FLOATS, 3), Array(INTEGERS, 1)], [Array(DOUBLES, 2), Array(FLOATS, 1)]]
ASSIGNED = [(1, 0), (0, 0)]
"""The state that steps assign, in the order of the reports."""
OWN = 2
"""Numbers in a report before the state."""
FIRST, COUNT = 5 * RUN + 9, 7
"""The first step of a run, and the updates before it."""
HOLDS_MEMORY = """
import sys
from tfdist_cli.train.cluster.shared_memory.memory import Region

region, identity = Region.identifying(int(sys.argv[1]))
sys.stdout.buffer.write(identity)
sys.stdout.flush()
sys.stdin.read()
"""


def layout_of(workers, servers=2, slots=1, dtype=FLOATS):
    assigned = [place for place in ASSIGNED if place[0] < servers]
    values = [[Array(dtype, size) for size in own] for own in SIZES[:servers]]
    report = OWN + sum(STATE[ps][place].size for ps, place in assigned)
    factors = {
        place: Factors(*shape, workers, dtype.itemsize) for place, shape in MATRICES.items() if place[0] < servers
    }
    return StepLayout(Layout(values, STATE[:servers], Array(DOUBLES, report)), slots, workers, OWN, assigned, factors)


def gradient_of(number, sequence, parameter):
    """What a worker computes with a parameter in a step."""
    return parameter * parameter.dtype.type(0.25) + parameter.dtype.type(number + 1 + sequence % 7)


def factors_of(number, sequence, parameter, factors):
    """The factors of what it computes with a matrix."""
    matrix = parameter.reshape([factors.rows, factors.columns])
    first = matrix[:, : factors.examples].T * parameter.dtype.type(0.25) + parameter.dtype.type(number + 1)
    return first, matrix[: factors.examples] * parameter.dtype.type(0.5) + parameter.dtype.type(sequence % 7)


def product(first, second):
    """The product of the transposed first factor and the second one; a part of it has the same bits."""
    return sum(one[:, None] * other for one, other in zip(first, second, strict=True)).reshape(-1)


def sent_of(number, sequence, layout, parameters):
    """What a worker sends of its gradients with the parameters of each ps."""
    summed, factors = [], []
    for server, own in enumerate(parameters):
        summed += [gradient_of(number, sequence, own[each]) for each in layout.summed(server)]
        for place, each in layout.factors_on(server).items():
            factors += factors_of(number, sequence, own[place], each)
    return [*summed, *factors]


def means_of(layout, received):
    """The means of gradients that a worker has received, in the order of its parts."""
    count = len(layout.arrays.values)
    factors = iter(received[count:])
    return [
        each
        for server, mean in enumerate(received[:count])
        for each in (mean, *(product(next(factors), next(factors)) for _ in layout.factors_on(server)))
    ]


def mean_of(layout, sequence, place, parameter):
    """The mean of what all workers compute with a parameter."""
    workers, share = range(layout.workers), parameter.dtype.type(1 / layout.workers)
    if place in layout.factors:
        each = [factors_of(number, sequence, parameter, layout.factors[place]) for number in workers]
        return product(
            *(np.concatenate(own) for own in ([one for one, _ in each], [other * share for _, other in each]))
        )
    terms = [gradient_of(number, sequence, parameter) for number in workers]
    return sum(terms[1:], terms[0]) * share


def report_of(number, sequence, state):
    """What it reports, with the new values of the state that it has read."""
    new = [each.astype(np.float64) / 2 + number + sequence % 5 for each in state]
    return np.concatenate([[number, sequence % 1000], *new])


def update(part, slots, mean, count):
    """An optimizer's update of some values; the result depends on the order of updates, and on how many there were."""
    for slot in slots:
        np.add(slot * slot.dtype.type(0.5), mean, out=slot)
    change = sum(slots, mean)
    part -= change * part.dtype.type(0.125 / (count + 1))


def initial(layout, server):
    """Variables of a ps: the parameters, their slots, and the state."""
    arrays = layout.arrays
    of = [*arrays.values[server], *(each for each in arrays.values[server] for _ in range(layout.slots))]
    return [np.linspace(-1, 1 + server, array.size).astype(array.dtype) for array in of] + [
        np.arange(array.size).astype(array.dtype) for array in arrays.others[server]
    ]


def computed(layout, variables, sequences, count=COUNT):
    """What one process computes, which changes the variables.

    Returns:
        The reports, shape (steps, workers, numbers).
    """
    begins = [len(own) for own in layout.arrays.values]
    state = [variables[ps][begins[ps] * (1 + layout.slots) + place] for ps, place in layout.assigned]
    reports = []
    for step, sequence in enumerate(sequences):
        report = np.stack([report_of(number, sequence, state) for number in range(layout.workers)])
        for server, (own, begin) in enumerate(zip(variables, begins, strict=True)):
            for index, parameter in enumerate(own[:begin]):
                mean = mean_of(layout, sequence, (server, index), parameter)
                slots = own[begin + index * layout.slots : begin + (index + 1) * layout.slots]
                update(parameter, slots, mean, count + step)
        place = OWN
        for each in state:
            each[:] = report[:, place : place + each.size].mean(axis=0)
            place += each.size
        reports.append(report)
    return np.stack(reports)


class Killed(Exception):
    pass


class Task:
    """A worker. It is killed at some moments, each time after it has half written what it writes then.

    Args:
        cluster: the ps.
        number: of the worker.
        kills: moments, each with a sequence number.
    """

    def __init__(self, cluster, number, kills=()):
        self.cluster, self.number, self.kills = cluster, number, list(kills)
        self.lives, self.replayed, self.committed = 0, 0, set()
        self.steps = self.started()

    def started(self):
        self.lives += 1
        return WorkerSteps(self.number, self.cluster.layout, self.cluster.identities)

    def run(self, first):
        """Takes the steps of a run; returns the sequence number at its end."""
        while True:
            try:
                return self._life(first)
            except Killed:
                self.steps = self.started()

    def _life(self, first):
        steps = self.steps
        sequence, kind = steps.begin(first)
        while kind != IS_OVER:
            count, again, received = steps.replay()
            if not again:
                break
            self._update(count, received)
            self.replayed += 1
            self._moment("replayed", sequence, lambda: self._spoil(self.parts()))
        while kind != IS_OVER:
            own = steps._ps[0].workers[self.number]
            factors = steps._own_factors[sequence % len(steps._own_factors)]
            written = [*steps._written, *(place for each in factors for place in each.arrays)]
            written.append(steps._reports[sequence % self.cluster.layout.kept])
            self._moment("before commit", sequence, lambda spoiled=written: self._spoil(spoiled))
            self._commit(sequence)
            means = steps._means[sequence % len(steps._means)]
            saves = sequence - own[SAVED] >= len(steps._means)
            spoiled = [*means, *(saved for _, saved in steps._saved if saves)]
            self._moment("committed", sequence, lambda spoiled=spoiled: self._spoil(spoiled))
            count, received = steps.gradients(sequence)
            self._update(count, received, sequence)
            self._moment("updated", sequence)
            self._moment("told", sequence, lambda told=sequence, own=own: own.store(UPDATED, told))
            taken = sequence
            sequence, kind = steps.finish(taken)
            self._moment("finished", taken)
        return sequence

    def _commit(self, sequence):
        layout, places, parameters, state = self.cluster.layout, iter(self.steps.places), [], []
        for server, (values, others) in enumerate(zip(layout.arrays.values, layout.arrays.others, strict=True)):
            parameters.append([next(places) for _ in values])
            state.append([next(places) for _ in others])
            for _ in range(self.parts_of(server)):
                next(places)
        gradients = sent_of(self.number, sequence, layout, parameters)
        report = report_of(self.number, sequence, [state[ps][place] for ps, place in layout.assigned])
        if sequence in self.committed:  # the values are not those of before this step any more
            self._spoil([report, *gradients])
        self.committed.add(sequence)
        self.steps.commit(sequence, report, gradients)

    def parts(self):
        """Its parts of the parameters and their slots, as it may change them."""
        layout, places, found = self.cluster.layout, self.steps.places, []
        for server, (values, others) in enumerate(zip(layout.arrays.values, layout.arrays.others, strict=True)):
            begin, count = len(values) + len(others), self.parts_of(server)
            padded, places = places[begin : begin + count], places[begin + count :]
            found += [each[: -ALIGNED // each.itemsize] for each in padded]
        return found

    def parts_of(self, server):
        """How many parts it has of the parameters of a ps and their slots."""
        return (1 + self.cluster.layout.slots) * (1 + len(self.cluster.layout.factors_on(server)))

    def _update(self, count, received, sequence=None):
        size, parts = 1 + self.cluster.layout.slots, self.parts()
        for turn, mean in enumerate(means_of(self.cluster.layout, received)):
            own = parts[turn * size : (turn + 1) * size]
            half = len(own[0]) // 2
            first, second = ([each[values] for each in own] for values in (slice(half), slice(half, None)))
            update(first[0], first[1:], mean[:half], count)
            if sequence is not None:
                self._moment("updating", sequence, lambda spoiled=(*first[1:], *second): self._spoil(spoiled))
            update(second[0], second[1:], mean[half:], count)

    def _moment(self, name, sequence, last=lambda: None):
        if self.kills and self.kills[0] == (name, sequence):
            self.kills.pop(0)
            last()
            raise Killed

    @staticmethod
    def _spoil(arrays):
        for each in arrays:
            each.fill(np.nan)


class Cluster:
    """All ps, whose variables have the values of the last `read`."""

    def __init__(self, layout):
        self.layout = layout
        self.servers = [PsSteps(number, layout) for number in range(len(layout.arrays.values))]
        self.identities = [each.identity for each in self.servers]
        self.chief = ChiefSteps(layout, self.identities)
        self.variables = [initial(layout, number) for number in range(len(self.servers))]

    def begin(self, first=FIRST, allowed=FIRST, count=COUNT):
        for each, own in zip(reversed(self.servers), reversed(self.variables), strict=True):
            each.begin(first, count, allowed, own)

    def run(self, tasks, chunks, first=FIRST, count=COUNT):
        """Lets workers take steps; returns the reports, and the sequence number at which each worker has ended."""
        with ThreadPoolExecutor(len(tasks)) as pool:
            working = [pool.submit(self._guarded, each, first) for each in tasks]
            try:
                reports = self._collected(chunks, first, count)
            except NoMoreSteps:
                for each in working:
                    each.result()
                raise
            ended = [each.result() for each in working]
        self.read()
        return reports, ended

    def _guarded(self, task, first):
        try:
            return task.run(first)
        except BaseException:
            self.abort()
            raise

    def _collected(self, chunks, first, count):
        done, allowed, found = first, first + sum(chunks[:1]), []
        self.begin(first, allowed, count)
        for index in range(len(chunks)):
            ends, following = index + 1 == len(chunks), allowed + sum(chunks[index + 1 : index + 2])
            found.append(self.chief.collect(done, allowed - done, following, ends=ends))
            done, allowed = allowed, following
        return np.concatenate(found)

    def read(self):
        self.variables = [list(each.read(own)) for each, own in zip(self.servers, self.variables, strict=True)]

    def abort(self):
        for each in self.servers:
            each.abort()


@pytest.fixture
def cluster_of():
    made = []

    def make(*arguments, **named):
        made.append(Cluster(layout_of(*arguments, **named)))
        return made[-1]

    yield make
    for each in made:
        each.abort()


@pytest.fixture
def few_reports(monkeypatch):
    """Of three steps the reports are kept."""
    monkeypatch.setattr(memory, "_REPORTS_BYTES", 3 * layout_of(2).arrays.report.bytes)
    assert layout_of(2).kept == 3


def copied(variables):
    return [[each.copy() for each in own] for own in variables]


def assert_equal(found, expected):
    """All variables of all ps have the same bits."""
    for own, others in zip(found, expected, strict=True):
        assert [each.tobytes() for each in own] == [each.tobytes() for each in others]


def check_run(cluster, tasks, chunks, first=FIRST, count=COUNT):
    """A run gives what one process computes."""
    steps = range(first, first + sum(chunks))
    before = copied(cluster.variables)
    expected = computed(cluster.layout, before, steps, count)
    reports, ended = cluster.run(tasks, chunks, first, count)
    np.testing.assert_array_equal(reports, expected)
    assert ended == [steps.stop] * len(tasks)
    assert_equal(cluster.variables, before)


@pytest.mark.parametrize("dtype", [FLOATS, DOUBLES])
@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_compute_what_one_process_does(cluster_of, few_reports, workers, servers, slots, dtype):
    """Also those who have no part of some ps."""
    cluster = cluster_of(workers, servers, slots, dtype)
    check_run(cluster, [Task(cluster, number) for number in range(workers)], [1, 4, 1, 7])


def test_a_run_without_steps_is_over(cluster_of):
    cluster = cluster_of(2)
    cluster.begin()
    assert [WorkerSteps(number, cluster.layout, cluster.identities).begin(FIRST) for number in range(2)] == [
        (FIRST, IS_OVER)
    ] * 2


def test_runs_follow_each_other(cluster_of):
    """A worker keeps what it has of the memory. Later runs have larger sequence numbers, and begin at any step."""
    cluster = cluster_of(2)
    tasks = [Task(cluster, number) for number in range(2)]
    check_run(cluster, tasks, [2, 3])
    cluster.variables[0][0] = np.full_like(cluster.variables[0][0], 3)  # assigned between
    check_run(cluster, tasks, [3], FIRST + RUN, COUNT + 5)
    check_run(cluster, tasks, [1, 1], FIRST + 2 * RUN + 3, COUNT + 8)
    assert [each.lives for each in tasks] == [1, 1]


MOMENTS = ["before commit", "committed", "updating", "updated", "told", "finished"]
KILLED_IN_AN_UPDATE = ["updating", "updated"]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_is_started_again_changes_nothing(cluster_of, monkeypatch, moment, step, number):
    """Wherever it is killed, and however many updates there were since its part was saved."""
    monkeypatch.setattr(chief, "_CHECK_SECONDS", 0.01)  # nobody tells of the last step of a process that was killed
    cluster = cluster_of(2)
    assert cluster.layout.kept_means == 4
    tasks = [Task(cluster, each, [(moment, FIRST + step)] if each == number else ()) for each in range(2)]
    check_run(cluster, tasks, [2, 5])
    assert tasks[number].lives == 2
    assert tasks[number].replayed == (step % 4 if moment in KILLED_IN_AN_UPDATE else 0)


@pytest.mark.parametrize("apart", [0, 4])
@pytest.mark.parametrize(
    "kills",
    [
        [(moment, 3) for moment in ("updating", "replayed", "replayed", "updating", "updated", "finished")],
        [(moment, 0) for moment in ("before commit", "committed", "updating", "told")],
        [(moment, step) for step in range(6) for moment in MOMENTS[:4]],
    ],
    ids=["again and again", "at once", "in each step"],
)
def test_workers_that_are_killed_many_times_change_nothing(cluster_of, monkeypatch, few_reports, kills, apart):
    """Each of them is, in the same steps or some steps later."""
    monkeypatch.setattr(chief, "_CHECK_SECONDS", 0.01)
    cluster = cluster_of(3)
    own = [[(moment, FIRST + step + apart * number) for moment, step in kills] for number in range(3)]
    tasks = [Task(cluster, number, each) for number, each in enumerate(own)]
    check_run(cluster, tasks, [4, 10])
    assert [each.lives for each in tasks] == [1 + len(kills)] * 3


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_was_started_again_takes_part_in_later_runs(cluster_of, monkeypatch, moment):
    """What was replayed in a run is not in the next one."""
    monkeypatch.setattr(chief, "_CHECK_SECONDS", 0.01)
    cluster = cluster_of(2)
    tasks = [Task(cluster, 0), Task(cluster, 1, [(moment, FIRST + 1)])]
    check_run(cluster, tasks, [3])
    replayed = tasks[1].replayed
    check_run(cluster, tasks, [3], FIRST + 100, COUNT + 3)
    assert (tasks[1].lives, tasks[1].replayed) == (2, replayed)


@pytest.mark.parametrize("first", [RUN, RUN + 9])
def test_a_worker_notices_a_run_that_begins_just_before_it_waits(cluster_of, monkeypatch, first):
    monkeypatch.setattr(worker, "_CHECK_SECONDS", 5)
    cluster = cluster_of(1, 1)
    own, sleep = WorkerSteps(0, cluster.layout, cluster.identities), Words.sleep

    def late(words, *arguments):
        cluster.begin(first, first + 1)
        sleep(words, *arguments)

    monkeypatch.setattr(Words, "sleep", late)
    began = time.monotonic()
    assert own.begin(first) == (first, MAY_BEGIN)
    assert time.monotonic() - began < 3


def test_a_worker_that_is_started_again_after_the_end_takes_no_step(cluster_of):
    cluster = cluster_of(2)
    tasks = [Task(cluster, number) for number in range(2)]
    check_run(cluster, tasks, [3])
    assert tasks[0].started().begin(FIRST) == (FIRST + 3, IS_OVER)
    cluster.begin(FIRST + 100, FIRST + 100)
    assert tasks[0].started().begin(FIRST) == (FIRST, IS_OVER)  # this run is over


@pytest.mark.parametrize("end", [memory.LATER, FIRST + 8, FIRST + 5])
def test_a_worker_knows_how_many_steps_may_be_taken(cluster_of, end):
    """The chief may allow one step more than there are, to wake workers at the end."""
    cluster = cluster_of(1)
    cluster.begin(allowed=FIRST + 4)
    numbers = cluster.servers[0]._content.numbers
    own = Task(cluster, 0)
    assert own.steps.begin(FIRST) == (FIRST, 4)
    numbers.store(memory.END, end)
    numbers.store(memory.ALLOWED, FIRST + 6)
    for step in range(5):
        own._commit(FIRST + step)
        own.steps.gradients(FIRST + step)
        left = min(FIRST + 6, end) - (FIRST + step + 1)
        assert own.steps.finish(FIRST + step) == (FIRST + step + 1, left or IS_OVER)


def test_a_commit_that_is_there_is_not_overwritten(cluster_of):
    cluster = cluster_of(1)
    cluster.begin(allowed=FIRST + 1)
    layout = cluster.layout
    sizes = [SIZES[server][number] for server in range(2) for number in layout.summed(server)]
    shapes = [(each.examples, size) for each in layout.factors.values() for size in (each.rows, each.columns)]
    for value in (1, 2):
        own = WorkerSteps(0, cluster.layout, cluster.identities)
        assert own.begin(FIRST) == (FIRST, MAY_BEGIN)
        report = np.full(cluster.layout.arrays.report.size, value, np.float64)
        own.commit(FIRST, report, [np.full(shape, value, np.float32) for shape in (*sizes, *shapes)])
    content = cluster.servers[0]._content
    assert set(content.reports[0][FIRST % cluster.layout.kept]) == {1}
    assert {float(each) for one in cluster.servers for own in one._content.gradient_of[0] for each in own} == {1}
    count, received = own.gradients(FIRST)
    assert count == COUNT
    assert all(set(each[each != 0]) == {1} for each in received)


def test_state_has_the_mean_of_the_reports_and_what_no_step_assigns_stays(cluster_of):
    cluster = cluster_of(3)
    before = copied(cluster.variables)
    cluster.run([Task(cluster, number) for number in range(3)], [1])
    for server, place, changed in ((0, -2, True), (0, -1, False), (1, -2, True), (1, -1, False)):
        old, new = before[server][place], cluster.variables[server][place]
        reported = [old / 2 + number + FIRST % 5 for number in range(3)]
        np.testing.assert_allclose(new, np.mean(reported, axis=0) if changed else old)


def test_places_are_views_of_the_memory_with_some_values_behind_them(cluster_of):
    cluster = cluster_of(2)
    own = [WorkerSteps(number, cluster.layout, cluster.identities) for number in range(2)]
    cluster.begin()
    places, more = [iter(each.places) for each in own], ALIGNED // FLOATS.itemsize
    for number, values in enumerate(cluster.variables):
        count, content = len(SIZES[number]), cluster.servers[number]._content
        for value in (*values[:count], *values[count * 2 :]):
            np.testing.assert_array_equal(next(places[0]), value)
            next(places[1])
        for whole in (*content.flat, *(each for matrix in content.matrices for each in matrix)):
            first, second = (next(each) for each in places)
            np.testing.assert_array_equal(np.concatenate([first[:-more], second]), whole)
            assert all(each.ctypes.data % ALIGNED == 0 for each in (first, second))
    assert [list(each) for each in places] == [[], []]
    own[1].places[len(SIZES[0]) + len(STATE[0])][0] = 55
    own[1].places[len(SIZES[0]) + len(STATE[0]) + 2][0] = 56
    content = cluster.servers[0]._content
    assert content.flat[0][cluster.layout.part(0, 1)][0] == 55
    assert content.parameters[1].reshape([32, 8])[cluster.layout.factors[0, 1].part(1)][0, 0] == 56


def test_a_value_is_written_to_a_part(cluster_of):
    cluster = cluster_of(2)
    own = WorkerSteps(1, cluster.layout, cluster.identities)
    part = cluster.layout.part(1, 1)
    own.write(1, 1, np.arange(part.stop - part.start, dtype=np.float32).reshape([2, -1]))
    parameters, slots = cluster.servers[1]._content.flat
    assert not parameters.any()
    assert slots[part].tolist() == list(range(part.stop - part.start))
    assert not slots[: part.start].any()
    assert not slots[part.stop :].any()
    rows = cluster.layout.factors[1, 1].part(1)
    own.write(1, 2, np.ones([rows.stop - rows.start, 8], np.float32))
    matrix = cluster.servers[1]._content.parameters[1].reshape([12, 8])
    assert [set(each.tolist()) for each in matrix] == [{float(row in range(12)[rows])} for row in range(12)]


def test_parts_that_are_not_in_the_memory_are_an_error(cluster_of):
    cluster = cluster_of(2)
    own = WorkerSteps(1, cluster.layout, cluster.identities)
    parts = [own.places[index] for index in (6, 7, 8, 9, 14, 15, 16, 17)]
    own.check_places(parts)
    for index in (1, 7):
        with pytest.raises(RuntimeError):
            own.check_places([*parts[:index], parts[index].copy(), *parts[index + 1 :]])
    cluster.abort()
    assert own.begin(FIRST) == (FIRST, IS_OVER)
    own.check_places([each.copy() for each in parts])


class Waits:
    """Waits of workers, which look at nothing for a minute, but if they are woken."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(worker, "_CHECK_SECONDS", 60)
        sleep, self._began = Words.sleep, threading.Event()

        def slept(words, *arguments):
            self._began.set()
            sleep(words, *arguments)

        monkeypatch.setattr(Words, "sleep", slept)

    def result(self, pool, wait, wake):
        """Returns what a wait gives that is woken."""
        waiting = pool.submit(wait)
        assert self._began.wait(30)
        self._began.clear()
        until = time.monotonic() + 30
        while not waiting.done() and time.monotonic() < until:
            wake()  # again, as the wait may begin after a call
        assert waiting.done()
        return waiting.result()


@pytest.fixture
def waits(monkeypatch):
    return Waits(monkeypatch)


def committed(cluster, number, sequence=FIRST):
    """A worker that has committed its first step."""
    own = Task(cluster, number)
    begun, several = own.steps.begin(FIRST)
    assert begun == sequence
    assert several >= MAY_BEGIN
    own._commit(sequence)
    return own.steps


def waiting_for_the_run(cluster):
    own = WorkerSteps(0, cluster.layout, cluster.identities)
    return own, lambda: own.begin(FIRST), (FIRST, IS_OVER)


def waiting_for_the_run_on_another_ps(cluster):
    cluster.servers[0].begin(FIRST, COUNT, FIRST + 2, cluster.variables[0])
    return waiting_for_the_run(cluster)


def waiting_for_a_first_step(cluster):
    cluster.begin()
    cluster.servers[0]._content.numbers.store(memory.END, memory.LATER)
    return waiting_for_the_run(cluster)


def waiting_for_gradients(cluster):
    cluster.begin(allowed=FIRST + 2)
    own = committed(cluster, 0)
    return own, lambda: own.gradients(FIRST)[0], 0


def waiting_for_an_update(cluster):
    cluster.begin(allowed=FIRST + 2)
    own, _ = (committed(cluster, number) for number in range(2))
    own.gradients(FIRST)
    return own, lambda: own.finish(FIRST), (FIRST + 1, IS_OVER)


def waiting_for_the_next_step(cluster):
    cluster.begin(allowed=FIRST + 1)
    own, other = (committed(cluster, number) for number in range(2))
    for each in (own, other):
        each.gradients(FIRST)
    other._own.store(UPDATED, FIRST)
    return own, lambda: own.finish(FIRST), (FIRST + 1, IS_OVER)


ANYWHERE = [
    waiting_for_the_run,
    waiting_for_the_run_on_another_ps,
    waiting_for_a_first_step,
    waiting_for_gradients,
    waiting_for_an_update,
    waiting_for_the_next_step,
]


@pytest.mark.parametrize("waiting", ANYWHERE, ids=lambda each: each.__name__)
def test_a_worker_that_waits_is_woken_when_the_run_is_aborted(cluster_of, waits, waiting):
    cluster = cluster_of(2)
    own, wait, expected = waiting(cluster)
    with ThreadPoolExecutor(1) as pool:
        assert waits.result(pool, wait, cluster.abort) == expected
    assert own.is_over
    assert own.begin(FIRST) == (FIRST, IS_OVER)
    assert own.finish(FIRST) == (FIRST, IS_OVER)
    own.commit(FIRST + 1, np.zeros(cluster.layout.arrays.report.size), [])  # nobody takes it
    assert own._own[COMMITTED] <= FIRST


def test_a_worker_takes_no_part_in_what_was_aborted_before(cluster_of):
    cluster = cluster_of(2)
    cluster.begin(allowed=FIRST + 2)
    before = opened()
    cluster.abort()
    own = WorkerSteps(1, cluster.layout, cluster.identities)
    assert own.is_over
    assert own.begin(FIRST) == (FIRST, IS_OVER)
    assert own.replay()[:2] == (0, False)
    assert [each.shape for each in own.places] == [
        each.shape for each in WorkerSteps(1, layout_of(2), Cluster(layout_of(2)).identities).places
    ]
    assert not opened() - before


def test_a_worker_does_not_wait_for_a_ps_that_was_killed(monkeypatch, cluster_of):
    monkeypatch.setattr(worker, "_CHECK_SECONDS", 0.01)
    cluster, waits = cluster_of(2), threading.Event()
    size = ALIGNED - NONCE_BYTES + Content.bytes(cluster.layout, 1)
    command = [sys.executable, "-c", HOLDS_MEMORY, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        cluster.identities[1] = holder.stdout.read(IDENTITY_BYTES)
        own = WorkerSteps(0, cluster.layout, cluster.identities)
        cluster.servers[0].begin(FIRST, COUNT, FIRST + 2, cluster.variables[0])
        sleep = Words.sleep
        monkeypatch.setattr(Words, "sleep", lambda *arguments: (waits.set(), sleep(*arguments)))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(own.begin, FIRST)
            assert waits.wait(30)
            assert not waiting.done()
            holder.kill()
            holder.wait()
            assert waiting.result() == (FIRST, IS_OVER)
    assert own.is_over
    again = WorkerSteps(0, cluster.layout, cluster.identities)
    assert again.is_over


def test_nothing_is_left_open():
    def run():
        cluster = Cluster(layout_of(2))
        check_run(cluster, [Task(cluster, 0), Task(cluster, 1, [("updating", FIRST + 1)])], [3])
        cluster.abort()

    run()
    before = opened()
    for _ in range(3):
        run()
    assert not opened() - before
