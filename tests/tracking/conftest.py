"""A run's directory, and a tracker that records calls."""

import pytest

from tests.support.recorded import RecordedRun


class RecordingTracker:
    """Keeps what it gets; `broken` methods raise."""

    def __init__(self):
        self.calls = []
        self.values = {}
        self.broken = set()

    def open(self, run):
        self._called("open")

    def describe(self, run):
        self._called("describe")

    def log(self, source, measurements):
        self.values.setdefault(source, []).extend(
            (each.series, each.name, each.step, each.value) for each in measurements
        )
        self._called("log")

    def close(self, exit_code):
        self.calls.append(exit_code)

    def _called(self, name):
        self.calls.append(name)
        if name in self.broken:
            raise ConnectionError("unreachable")

    def losses(self):
        return [
            (step, value)
            for series, name, step, value in self.values["metrics.jsonl"]
            if (series, name) == ("train", "loss")
        ]


class RewritableRecordingTracker(RecordingTracker):
    """Can also remove what it got."""

    def clear(self, source):
        self._called("clear")
        self.values[source] = []


@pytest.fixture
def run(tmp_path):
    """A run that has begun."""
    run = RecordedRun(tmp_path / "digits-1")
    run.launch(commit="abc", tfdist="0.1.0", python="3.11.7", host="node")
    return run


@pytest.fixture
def recording():
    return lambda *, rewritable: RewritableRecordingTracker() if rewritable else RecordingTracker()
