"""resources.jsonl: what tasks use."""

import json

import pytest

from tests.support.histories import CHIEF
from tests.support.histories import W0 as WORKER
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.supervisor.events import RecordReceived, Tick
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobPolicy, Status
from tfdist_cli.launch.usage import GpuUsage, TaskUsage, UsageLog, total_usage


class Job:
    def __init__(self, folder):
        self.path = folder / "resources.jsonl"
        self.log, self.snapshot = UsageLog(folder, 3), RunSnapshot()
        self.state, _ = begin(JobPolicy("parameter_server"), (CHIEF, WORKER), 0.0)

    def at(self, now, *events):
        for event in events:
            self.state, _ = step(self.state, event, now)
            for watcher in (self.log, self.snapshot):
                watcher.on_event(event, self.state, now)

    @property
    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def usage(task, **fields):
    return RecordReceived(task, {"kind": "beat", "computed": 1.0, "usage": fields})


def test_a_line_has_the_means_of_rates_and_the_largest_memory(tmp_path):
    job = Job(tmp_path)
    job.at(0.5, usage(CHIEF, cpu=1.0, memory=100, sent=10, received=0, gpus={"0": [50, 7]}))
    job.at(1.0, usage(CHIEF, cpu=2.0, memory=90, sent=None, gpus={"0": [100, None]}), usage(WORKER, cpu=0.5))
    assert not job.lines
    job.at(2.5, Tick())
    (line,) = job.lines
    assert (line["seconds"], line["attempt"]) == (2.5, 3)
    assert line["tasks"]["chief:0"] == {"cpu": 1.5, "memory": 100, "sent": 10, "received": 0, "gpus": {"0": [75, 7]}}
    assert line["tasks"]["worker:0"]["memory"] is None
    job.at(9, RecordReceived(CHIEF, {"kind": "beat", "held": True}))
    assert len(job.lines) == 1
    assert job.snapshot.of(CHIEF).usage.gpus == {"0": GpuUsage(100, None)}


@pytest.mark.slow
def test_lines_of_a_long_run_are_about_a_longer_time(tmp_path):
    job = Job(tmp_path)
    for now in range(0, 40_000, 2):
        job.at(float(now), usage(WORKER, cpu=1.0))
    assert 1000 < len(job.lines) < 2000
    seconds = [line["seconds"] for line in job.lines]
    assert seconds[1] - seconds[0] == 2
    assert seconds[-1] - seconds[-2] == 60


def test_usage_does_not_say_that_a_task_is_up(tmp_path):
    job = Job(tmp_path)
    job.at(1, usage(WORKER, cpu=1.0), RecordReceived(WORKER, {"kind": "versions", "keras": "3"}))
    assert job.state.tasks[WORKER].status is Status.STARTING


def test_malformed_values_are_unknown():
    assert TaskUsage.read({"cpu": "x", "memory": True, "sent": [], "gpus": [1]}) == TaskUsage()
    assert TaskUsage.read({"gpus": {"0": [1], "1": ["x", 2]}}).gpus == {"1": GpuUsage(None, 2)}
    assert total_usage([]) is None
    assert total_usage([TaskUsage(1.0, 5), TaskUsage(None, 6)]) == TaskUsage(1.0, 11)


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path):
    job = Job(tmp_path / "gone")
    job.at(3, usage(WORKER, cpu=1.0))
    assert job.log.problem
    assert job.path.name in job.log.problem
