"""Clusters train in turns on the same machine: while one trains, the others are paused.

A shared machine's speed may change by half from minute to minute, and much less within seconds. With turns of a few
seconds all have the same minutes. A pause counts for none of them: only the time of a cluster's own turns does, and its
steps per execution are fixed, since a rule that adapts them would see the pause as slow steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.workload import Lap

TURNS = 4
"""The number of turns of each side."""
WARM_UP = 5
"""Turns of each side before those that count. tfdist compiles its fastest functions while it trains."""
LONGEST = 5
"""A race has up to this many times as many turns, if a side has not ended two epochs."""
TURN_SECONDS = 2.0
MOST = 3
"""Sides of a race: a pause of two turns takes less than 5 s. A mirrored worker has a heartbeat every 5 s, and is
dropped after 10 s without one."""


@dataclass(frozen=True)
class Timing:
    """The timing of a cluster.

    Args:
        epochs: the number of timed epochs.
        seconds: the training time of these.
        logs: loss and metrics of the last one.
        first: those of the first epoch of the training.
    """

    epochs: int
    seconds: float
    logs: dict[str, float]
    first: dict[str, float]


@dataclass
class Runner:
    """A cluster and its turns.

    Args:
        cluster: the cluster. Its first epoch, in which functions are traced, has ended.
        turns: the beginning and the end of each turn, by the machine's monotonic clock.
    """

    cluster: Cluster
    turns: list[tuple[float, float]] = field(default_factory=list)

    def turn(self, seconds: float) -> None:
        """Lets it train for some seconds."""
        begin = time.monotonic()
        self.cluster.go()
        time.sleep(seconds)
        self.cluster.stop()
        self.turns.append((begin, time.monotonic()))

    def has_epochs(self) -> bool:
        """Whether at least one whole epoch can be timed."""
        return sum(lap.moment >= self.turns[0][0] for lap in self.cluster.laps()) >= 2

    def timing(self) -> Timing:
        """Returns the timing of the epochs that began and ended within turns, or across them.

        Raises:
            RunFailed: there is none.
        """
        return measure(self.cluster.laps(), self.turns)


def measure(laps: Sequence[Lap], turns: Sequence[tuple[float, float]]) -> Timing:
    """Returns the epochs, and the seconds of turns within them.

    Args:
        laps: the ends of epochs.
        turns: when the cluster trained, in order.

    Raises:
        RunFailed: fewer than two epochs ended in these turns.
    """
    timed = [lap for lap in laps if lap.moment >= turns[0][0]]
    if len(timed) < 2:
        raise RunFailed(f"{len(timed)} epochs ended in {len(turns)} turns: fewer steps, or longer turns, are needed")
    first, last = timed[0].moment, timed[-1].moment
    seconds = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in turns)
    return Timing(len(timed) - 1, seconds, timed[-1].logs, laps[0].logs)


def race(clusters: Sequence[Cluster], turns: int = TURNS, first: int = 0, warm_up: int = WARM_UP) -> list[Timing]:
    """Lets paused clusters train in turns, always in the same order.

    A cluster needs a moment to run at its full rate again after a pause. So each has as many pauses as every other one:
    if two swapped places every other time, the one with the first turn would resume more often.

    Args:
        clusters: started and paused clusters.
        turns: the number of turns of each. All have more if an epoch takes so long.
        first: the number of the cluster that begins, modulo their number. If it differs from race to race, a growing
            load affects all alike.
        warm_up: the number of turns of each before those that count.

    Raises:
        RunFailed: a task exited, or no epoch ended.
    """
    runners = [Runner(cluster) for cluster in clusters]
    begin = first % len(runners)
    order = [*runners[begin:], *runners[:begin]]
    for runner in order * warm_up:
        runner.turn(TURN_SECONDS)
    for runner in runners:
        runner.turns.clear()
    for number in range(LONGEST * turns):
        if number >= turns and all(runner.has_epochs() for runner in runners):
            break
        for runner in order:
            runner.turn(TURN_SECONDS)
    return [runner.timing() for runner in runners]
