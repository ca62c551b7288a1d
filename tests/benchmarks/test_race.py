"""The time of epochs is the time of the turns in which a cluster trains."""

from typing import Any

import pytest

from benchmarks.cluster import RunFailed
from benchmarks.contests import CONTESTS, against
from benchmarks.race import measure, race
from benchmarks.workload import Lap


def laps(*moments):
    return [Lap(moment, {"loss": 1.0 / moment}) for moment in moments]


def test_time_between_turns_does_not_count():
    timing = measure(laps(5.0, 11.0, 12.5, 21.0), [(10.0, 13.0), (20.0, 22.0)])
    assert (timing.epochs, timing.seconds) == (2, pytest.approx(1.5 + 0.5 + 1.0))
    assert timing.logs == {"loss": 1.0 / 21.0}


def test_an_epoch_that_ended_before_the_first_turn_is_not_timed():
    with pytest.raises(RunFailed, match="1 epochs"):
        measure(laps(1.0, 2.0, 11.0), [(10.0, 13.0)])


class Recorded:
    """A cluster that records its calls, and ends an epoch each time it is stopped."""

    def __init__(self, name, calls):
        self.name, self.calls, self.ended = name, calls, []

    def go(self):
        self.calls.append(f"{self.name} resumes")

    def stop(self):
        self.calls.append(f"{self.name} stops")
        self.ended += laps(len(self.calls) + 1000.0)

    def laps(self):
        return self.ended


def test_clusters_train_by_turns_and_never_at_the_same_time(monkeypatch):
    moments, calls = iter(range(1000, 2000)), []
    monkeypatch.setattr("benchmarks.race.time.sleep", lambda seconds: None)
    monkeypatch.setattr("benchmarks.race.time.monotonic", lambda: float(next(moments)))
    clusters: Any = [Recorded("ours", calls), Recorded("peer", calls)]
    race(clusters, turns=3)
    turns = [each.split()[0] for each in calls[::2]]
    assert turns == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert calls == [f"{name} {call}" for name in turns for call in ("resumes", "stops")]


def test_another_checkout_takes_the_peers_place(tmp_path):
    contest = against(CONTESTS["sync"], tmp_path)
    assert contest.peer.checkout == tmp_path
    assert contest.peer.changes == contest.ours.changes
    assert contest.ours.name != contest.peer.name
