"""The order in which the exits of containers are reported."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest

from tfdist_cli.launch.supervisor import exit_ordering
from tfdist_cli.launch.supervisor.events import EventQueue, Exited
from tfdist_cli.launch.supervisor.exit_ordering import ExitOrdering
from tfdist_cli.spec.task_id import TaskId

CHIEF, WORKER, PS = TaskId("chief"), TaskId("worker"), TaskId("ps")
LONG = 100.0
"""Seconds that never pass in a test."""


def reported(*exits, first_exit_timeout=LONG, cause_timeout=LONG):
    """The order in which these exits are reported, if they are noticed one after the other."""

    async def run():
        events = EventQueue()
        ordering = ExitOrdering(events, CHIEF, first_exit_timeout, cause_timeout)
        ordering.task_started(CHIEF)
        await asyncio.wait_for(asyncio.gather(*(ordering.report(Exited(task, code)) for task, code in exits)), 10)
        return [(each.task, each.code) for each in [await events.get(0) for _ in exits]]

    return asyncio.run(run())


@pytest.mark.parametrize("exits", [[(CHIEF, 0), (WORKER, 0), (PS, 143)], [(WORKER, 1), (PS, 137), (CHIEF, 0)]])
def test_who_follows_a_first_task_that_is_done_is_reported_after_it(exits):
    assert reported(*exits)[0] == (CHIEF, 0)


@pytest.mark.parametrize("exits", [[(CHIEF, 1), (PS, 137)], [(PS, 137), (CHIEF, 1)]])
def test_a_death_is_reported_before_the_failure_that_was_caused_by_it(exits):
    assert reported(*exits) == [(PS, 137), (CHIEF, 1)]


def test_a_death_of_the_first_task_is_reported_before_the_failures_that_was_caused_by_it():
    assert reported((WORKER, 1), (CHIEF, 137)) == [(CHIEF, 137), (WORKER, 1)]


def test_of_two_failures_the_one_that_was_noticed_first_is_reported_first():
    assert reported((WORKER, 7), (CHIEF, 1), cause_timeout=0.01) == [(WORKER, 7), (CHIEF, 1)]


def test_a_failure_that_was_caused_by_nothing_is_reported_in_time():
    assert reported((CHIEF, 1), (WORKER, 0), cause_timeout=0.01) == [(CHIEF, 1), (WORKER, 0)]


def test_a_first_task_that_continues_holds_no_process_up():
    assert reported((WORKER, 7), first_exit_timeout=0.01) == [(WORKER, 7)]


def test_it_is_reported_how_long_ago_an_end_was():
    async def run():
        events = EventQueue()
        await ExitOrdering(events, CHIEF, 0.1, 0.0).report(Exited(WORKER, 7, ago=1.0))
        return await events.get(0)

    assert asyncio.run(run()).ago >= 1.1


def test_exits_that_are_reported_together_have_one_time(monkeypatch):
    """The supervisor orders exits by time: the later one would seem to have exited earlier, on a busy machine."""
    ticks = count()
    monkeypatch.setattr(exit_ordering, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))

    async def run():
        events = EventQueue()
        ordering = ExitOrdering(events, CHIEF, LONG, LONG)
        ordering.task_started(CHIEF)
        await asyncio.gather(ordering.report(Exited(PS, 137)), ordering.report(Exited(CHIEF, 1)))
        return [await events.get(0) for _ in range(2)]

    assert [(each.task, each.ago) for each in asyncio.run(run())] == [(PS, 0.0), (CHIEF, 0.0)]


def test_a_first_task_that_was_started_again_is_waited_for_again():
    async def run():
        events = EventQueue()
        ordering = ExitOrdering(events, CHIEF, LONG, 0.01)
        await ordering.report(Exited(CHIEF, 137))
        ordering.task_started(CHIEF)
        await asyncio.gather(ordering.report(Exited(WORKER, 0)), ordering.report(Exited(CHIEF, 0)))
        return [(await events.get(0)).task for _ in range(3)]

    assert asyncio.run(run()) == [CHIEF, CHIEF, WORKER]
