"""What a run does in the background."""

import asyncio

import pytest

from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.supervisor.events import EventQueue


def test_what_is_done_in_time_is_awaited_and_the_rest_given_up():
    async def run():
        works, done = BackgroundTasks(EventQueue()), []

        async def quick():
            done.append("quick")

        async def endless():
            try:
                await asyncio.Event().wait()
            finally:
                done.append("cleaned up")

        works.start(quick())
        kept = works.start(endless())
        await works.finish(0.01)
        await works.finish(0.01)  # there is nothing any more
        return done, kept.cancelled()

    assert asyncio.run(run()) == (["quick", "cleaned up"], True)


def test_an_error_in_it_ends_the_run():
    async def run():
        events = EventQueue()

        async def broken():
            raise RuntimeError("a bug")

        BackgroundTasks(events).start(broken())
        await events.get(1.0)

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(run())
