"""Following a task's output files while it writes to them."""

import asyncio
import json
import queue
from types import SimpleNamespace

import pytest

from tfdist_cli.launch.slurm.files import TaskFiles
from tfdist_cli.launch.supervisor.events import Exited
from tfdist_cli.protocol.masking import Mask
from tfdist_cli.protocol.records import RECORD_SEPARATOR
from tfdist_cli.spec.task_id import TaskId

TASK = TaskId("worker", 2)
EXITED = f"{RECORD_SEPARATOR}{json.dumps({'kind': 'exited', 'code': 0})}\n"


class Events(queue.SimpleQueue):
    async def put_output(self, event):
        self.put(event)


@pytest.fixture
def context(tmp_path):
    logs = SimpleNamespace(write=lambda *_: None)
    return SimpleNamespace(events=Events(), logs=logs, mask=Mask(()), folder=tmp_path)


def test_a_task_that_writes_all_the_time_does_not_keep_the_launcher(context, tmp_path):
    file = tmp_path / "stdout.raw"
    file.write_text("line\n")
    written = []

    def write_more(_task, _stream, data):
        written.append(data)
        with file.open("a") as more:
            more.write("line\n")

    context.logs.write = write_more
    files = TaskFiles(TASK, tmp_path, context)
    asyncio.run(asyncio.wait_for(files.read(), 30))
    assert 1 < len(written) < 1000
    assert files.exit_code is None


def test_an_exit_is_reported_after_all_output(context, tmp_path):
    text = ("x" * 999 + "\n") * 6000
    (tmp_path / "stdout.raw").write_text(text)
    (tmp_path / "stderr.raw").write_text(EXITED)
    read = []
    context.logs.write = lambda _task, _stream, data: read.append(len(data))
    files = TaskFiles(TASK, tmp_path, context)
    asyncio.run(files.read())
    files.report_exit()
    assert sum(read) == len(text)
    while not isinstance(event := context.events.get(timeout=0), Exited):
        pass
    assert (event.code, files.exit_reported) == (0, True)
