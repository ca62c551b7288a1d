"""A launcher as small as one can be: each task is a subprocess. Written as a guide to the `Launcher` protocol."""

import asyncio
import os
import shlex
from contextlib import asynccontextmanager, suppress

from tfdist_cli.launch.addresses import RemoteAddresses
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.process import SIGNALS
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.supervisor.events import Exited, Start, Started, Stop
from tfdist_cli.spec.address import LOOPBACK, Address


class ToyLauncher(RemoteAddresses):
    """Starts subprocesses."""

    def check(self, cluster, command):
        """Nothing is needed."""

    def preview_addresses(self, cluster):
        return {task: Address(LOOPBACK, 40_000 + index) for index, task in enumerate(cluster.tasks)}

    def render(self, plan):
        return "\n".join(f"toy {planned.task}: {shlex.join(planned.argv)}" for planned in plan.tasks)

    @asynccontextmanager
    async def start(self, plan, context):
        run = ToyRun(plan, context)
        try:
            yield run
        finally:
            await run.close()


class ToyRun:
    """The subprocesses of one run."""

    def __init__(self, plan, context):
        self.plan = plan
        self.context = context
        self.processes = {}
        self.background = BackgroundTasks(context.events)

    def act(self, action):
        if isinstance(action, Start):
            env = {**os.environ, **self.plan[action.task].env, **self.context.prepare(action)}
            self.background.start(self.run_task(action.task, env))
        elif isinstance(action, Stop) and action.task in self.processes:
            with suppress(ProcessLookupError):  # it has exited, and that is reported
                self.processes[action.task].send_signal(SIGNALS[action.signal])

    def follow(self, plan):
        self.plan = plan

    async def run_task(self, task, env):
        reading, writing = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *self.plan[task].argv, env=env, stdout=writing, stderr=writing, start_new_session=True
        )
        os.close(writing)
        self.processes[task] = process
        self.context.events.put(Started(task, process.pid))
        output = TaskStream(task, "stderr", os.fdopen(reading, "rb", 0), self.context)
        code = await process.wait()
        await output.drain()
        self.context.events.put(Exited(task, code))

    async def close(self):
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
        await self.background.finish(5.0)
