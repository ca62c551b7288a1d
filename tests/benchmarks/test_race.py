"""The time of epochs is the time of the turns in which a cluster trains."""

from typing import Any

import pytest

from benchmarks.cluster import RunFailed
from benchmarks.contests import check_learned, races
from benchmarks.grid import CONTESTS, against, chosen
from benchmarks.race import MOST, TURN_SECONDS, Timing, measure, race
from benchmarks.workload import Lap


def laps(*moments):
    return [Lap(moment, {"loss": 1.0 / moment}) for moment in moments]


def test_time_between_turns_does_not_count():
    timing = measure(laps(5.0, 11.0, 12.5, 21.0), [(10.0, 13.0), (20.0, 22.0)])
    assert (timing.epochs, timing.seconds) == (2, pytest.approx(1.5 + 0.5 + 1.0))
    assert timing.logs == {"loss": 1.0 / 21.0}
    assert timing.first == {"loss": 1.0 / 5.0}


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


@pytest.fixture
def clock(monkeypatch):
    """A second passes from one look at the clock to the next."""
    moments = iter(range(1000, 2000))
    monkeypatch.setattr("benchmarks.race.time.sleep", lambda seconds: None)
    monkeypatch.setattr("benchmarks.race.time.monotonic", lambda: float(next(moments)))


def racing(*names, **options):
    """The calls of recorded clusters that race, and their timings."""
    calls: list[str] = []
    clusters: Any = [Recorded(name, calls) for name in names]
    return calls, race(clusters, **options)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("first", "order"), [(0, ["ours", "peer"]), (3, ["peer", "ours"])])
def test_clusters_train_by_turns_and_never_at_the_same_time(first, order):
    calls, _ = racing("ours", "peer", turns=3, first=first, warm_up=0)
    turns = [each.split()[0] for each in calls[::2]]
    assert turns == order * 3, "each resumes as often as the other"
    assert calls == [f"{name} {call}" for name in turns for call in ("resumes", "stops")]


@pytest.mark.usefixtures("clock")
def test_no_side_is_paused_for_longer_than_a_mirrored_worker_survives():
    calls, _ = racing(*("ours", "peer", "other")[:MOST], turns=4)
    turns = [each.split()[0] for each in calls[::2]]
    longest = max(turns[first + 1 :].index(name) for first, name in enumerate(turns) if name in turns[first + 1 :])
    assert longest * TURN_SECONDS < 5


@pytest.mark.usefixtures("clock")
def test_a_race_goes_on_until_every_side_has_ended_two_epochs():
    calls, _ = racing("ours", "peer", turns=1, warm_up=0)
    assert calls.count("ours resumes") == calls.count("peer resumes") == 2


@pytest.mark.usefixtures("clock")
def test_turns_before_those_that_count_are_not_timed():
    calls, timings = racing("ours", "peer", turns=4, warm_up=3)
    assert calls.count("ours resumes") == calls.count("peer resumes") == 3 + 4
    assert [timing.epochs for timing in timings] == [3, 3]  # each turn ends one


def test_peers_of_the_same_training_race_together_as_many_as_fit():
    contests = chosen(["mlp:mirrored:*", "mlp:single:keras"])
    groups = [[contest.name for contest in group] for group in races(contests)]
    assert groups == [
        ["mlp:mirrored:tf_keras", "mlp:mirrored:torch"],
        ["mlp:mirrored:torch_fp16"],
        ["mlp:mirrored:keras"],
        ["mlp:single:keras"],
    ]


def test_another_checkout_takes_the_peers_place(tmp_path):
    (contest,) = against([CONTESTS["mlp:ps_sync:keras"], CONTESTS["mlp:ps_sync:torch"]], tmp_path)
    assert contest.peer.checkout == tmp_path
    assert contest.peer.work == contest.ours.work
    assert contest.ours.name != contest.peer.name


@pytest.mark.parametrize("loss", [2.0, 3.0, float("nan")])
def test_a_program_whose_loss_does_not_fall_is_refused(loss):
    ours = CONTESTS["mlp:ps_sync:keras"].ours
    with pytest.raises(RunFailed):
        check_learned(ours, Timing(3, 1.0, {"loss": loss}, {"loss": 2.0}))
    check_learned(ours, Timing(3, 1.0, {"loss": 1.9}, {"loss": 2.0}))
