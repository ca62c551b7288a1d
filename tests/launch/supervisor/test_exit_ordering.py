"""The order in which the ends of containers are told."""

import asyncio

import pytest

from tfdist_cli.launch.supervisor.events import EventQueue, Exited
from tfdist_cli.launch.supervisor.exit_ordering import ExitOrdering
from tfdist_cli.spec.task_id import TaskId

CHIEF, WORKER, PS = TaskId("chief"), TaskId("worker"), TaskId("ps")
LONG = 100.0
"""Seconds that are never over here."""


def told(*ends, head_start=LONG, afterthought=LONG):
    """What is told, in order, when these ends are heard of one after the other."""

    async def whole():
        events = EventQueue()
        order = ExitOrdering(events, CHIEF, head_start, afterthought)
        order.task_started(CHIEF)
        await asyncio.wait_for(asyncio.gather(*(order.report(Exited(task, code)) for task, code in ends)), 10)
        return [(each.task, each.code) for each in [await events.get(0) for _ in ends]]

    return asyncio.run(whole())


@pytest.mark.parametrize("ends", [[(CHIEF, 0), (WORKER, 0), (PS, 143)], [(WORKER, 1), (PS, 137), (CHIEF, 0)]])
def test_who_follows_a_first_task_that_is_done_is_told_after_it(ends):
    assert told(*ends)[0] == (CHIEF, 0)


@pytest.mark.parametrize("ends", [[(CHIEF, 1), (PS, 137)], [(PS, 137), (CHIEF, 1)]])
def test_a_death_is_told_before_the_failure_that_came_of_it(ends):
    assert told(*ends) == [(PS, 137), (CHIEF, 1)]


def test_a_death_of_the_first_task_is_told_before_the_failures_that_came_of_it():
    assert told((WORKER, 1), (CHIEF, 137)) == [(CHIEF, 137), (WORKER, 1)]


def test_of_two_failures_the_one_that_was_heard_of_first_is_told_first():
    assert told((WORKER, 7), (CHIEF, 1), afterthought=0.01) == [(WORKER, 7), (CHIEF, 1)]


def test_a_failure_that_came_of_nothing_is_told_in_time():
    assert told((CHIEF, 1), (WORKER, 0), afterthought=0.01) == [(CHIEF, 1), (WORKER, 0)]


def test_a_first_task_that_goes_on_holds_nobody_up():
    assert told((WORKER, 7), head_start=0.01) == [(WORKER, 7)]


def test_it_is_told_how_long_ago_an_end_was():
    async def whole():
        events = EventQueue()
        await ExitOrdering(events, CHIEF, 0.1, 0.0).report(Exited(WORKER, 7, ago=1.0))
        return await events.get(0)

    assert asyncio.run(whole()).ago >= 1.1


def test_a_first_task_that_was_started_again_is_waited_for_again():
    async def whole():
        events = EventQueue()
        order = ExitOrdering(events, CHIEF, LONG, 0.01)
        await order.report(Exited(CHIEF, 137))
        order.task_started(CHIEF)
        await asyncio.gather(order.report(Exited(WORKER, 0)), order.report(Exited(CHIEF, 0)))
        return [(await events.get(0)).task for _ in range(3)]

    assert asyncio.run(whole()) == [CHIEF, CHIEF, WORKER]
