"""Replicas take steps together in the memory of one of them, without a chief."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import worker
from tfdist_cli.train.cluster.shared_memory.lockstep.factors import Factors
from tfdist_cli.train.cluster.shared_memory.lockstep.memory import StepLayout
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import PsSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.replicas import ReplicaSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import IS_OVER, MAY_BEGIN
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES

FLOATS = np.dtype(np.float32)
NO_REPORT = np.zeros([0])


def layout_of(replicas):
    arrays = Layout([[Array(FLOATS, 40), Array(FLOATS, 256)]], [[]], Array(np.dtype(np.float64), 0))
    return StepLayout(arrays, 1, replicas, 0, [], {(0, 1): Factors(2, 32, 8, replicas, 4)})


class Replica:
    """A replica with variables of its own."""

    def __init__(self, number, layout, identity):
        self.number = number
        self.steps = ReplicaSteps(number, layout, identity, lambda *_: False)
        self.variables = [np.full(size, value, FLOATS) for value in (1, 0) for size in (40, 256)]

    def run(self, count, steps):
        """Takes the steps of a run; returns how many updates there were before each."""
        own, counts = self.steps, []
        own.enter(count, self.variables)
        sequence, kind = own.token
        for _ in range(steps):
            assert kind >= MAY_BEGIN
            flat, matrix = own.places[:2]
            value = np.float32(self.number)
            factors = [np.full([2, 32], matrix[0] + value, FLOATS), np.full([2, 8], 0.5, FLOATS)]
            own.commit(sequence, NO_REPORT, [flat + value, *factors])
            before, (mean, first, second) = own.gradients(sequence)
            counts.append(before)
            parts = own.places[2:]
            for part, slot, gradient in ((*parts[:2], mean), (*parts[2:], (first.T @ second).reshape(-1))):
                slot[: gradient.size] += gradient
                part[: gradient.size] += np.float32(0.5) * gradient
            sequence, kind = own.finish(sequence)
        self.variables = list(own.read(self.variables))
        return counts


def expected(replicas, steps, parameter, slot=0.0):
    """What one process computes: the value of a parameter and its slot. The gradient is the value plus a mean."""
    for _ in range(steps):
        gradient = parameter + (replicas - 1) / 2
        parameter, slot = parameter + 0.5 * gradient, slot + gradient
    return parameter, slot


@pytest.fixture(params=[1, 2, 3])
def replicas(request):
    owner = PsSteps(0, layout_of(request.param))
    yield [Replica(number, layout_of(request.param), owner.identity) for number in range(request.param)]
    owner.abort()


def ran(replicas, count, steps):
    with ThreadPoolExecutor(len(replicas)) as pool:
        return [each.result() for each in [pool.submit(each.run, count, steps) for each in replicas]]


def test_all_have_what_one_process_computes(replicas):
    assert ran(replicas, 5, 3) == [[5, 6, 7]] * len(replicas)
    value, slot = expected(len(replicas), 3, 1.0)
    for each in replicas:
        for own, wanted in zip(each.variables, (value, value, slot, slot), strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-5)


def test_runs_follow_each_other_and_variables_that_were_assigned_are_trained_on(replicas):
    """Also the number of updates, and many more steps than gradients are kept."""
    ran(replicas, 0, 2)
    _, slot = expected(len(replicas), 2, 1.0)
    for each in replicas:
        each.variables[1] = np.full(256, 0.5, FLOATS)
    assert ran(replicas, 30, 6) == [list(range(30, 36))] * len(replicas)
    value, slot = expected(len(replicas), 6, 0.5, slot)
    for each in replicas:
        np.testing.assert_allclose(each.variables[1], value, rtol=1e-5)
        np.testing.assert_allclose(each.variables[3], slot, rtol=1e-5)
        assert [own.tobytes() for own in each.variables] == [own.tobytes() for own in replicas[0].variables]


def test_what_was_read_does_not_change_with_the_next_steps(replicas):
    ran(replicas, 0, 1)
    before = [[own.copy() for own in each.variables] for each in replicas]
    kept = [each.variables for each in replicas]
    ran(replicas, 1, 2)
    for own, copies in zip(kept, before, strict=True):
        for one, other in zip(own, copies, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("raises", [False, True])
def test_one_that_waits_looks_whether_the_others_are_there(raises, monkeypatch):
    monkeypatch.setattr(worker, "_CHECK_SECONDS", 0.01)
    owner, seen = PsSteps(0, layout_of(2)), []

    def look(remembered, waits):
        assert waits()
        seen.append(remembered)
        remembered[len(remembered)] = 0.0
        if raises and len(remembered) == 3:
            raise ConnectionError
        return len(remembered) == 3

    own = ReplicaSteps(0, layout_of(2), owner.identity, look)
    own.enter(0, [np.zeros(size, FLOATS) for size in (40, 256, 40, 256)])
    own.commit(1, NO_REPORT, [np.zeros(40, FLOATS), np.zeros([2, 32], FLOATS), np.zeros([2, 8], FLOATS)])
    if raises:
        with pytest.raises(ConnectionError):
            own.gradients(1)
    else:
        own.gradients(1)
        assert own.finish(1) == (1, IS_OVER)
    assert len(seen) == 3
    assert seen[0] is seen[2]
    owner.abort()


def test_memory_of_another_host_cannot_be_opened():
    with pytest.raises(OSError):  # noqa: PT011 any reason
        ReplicaSteps(0, layout_of(1), bytes(IDENTITY_BYTES), lambda *_: False)
