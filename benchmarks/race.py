"""Two clusters that train by turns on the same machine: while one does, the other is stopped.

A shared machine's speed may change by a half from minute to minute, and much less within seconds. Turns of a few
seconds have both sides meet the same minutes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.workload import Lap

TURNS = 6
"""How often each of both trains."""
TURN_SECONDS = 2.0
"""Two of them end before 5 s are over: a mirrored worker is heard of every 5 s, and given up after 10 s without."""


@dataclass(frozen=True)
class Timing:
    """What a cluster did.

    Args:
        epochs: how many epochs were timed.
        seconds: how long it trained for them.
        logs: the last one's loss and metrics.
    """

    epochs: int
    seconds: float
    logs: dict[str, float]


@dataclass
class Runner:
    """A cluster, and when it was allowed to train.

    Args:
        cluster: it trains, and has ended its first epoch, in which functions are traced.
        turns: the beginning and the end of each time that it was let go on, by the machine's monotonic clock.
    """

    cluster: Cluster
    turns: list[tuple[float, float]] = field(default_factory=list)

    def turn(self, seconds: float) -> None:
        """Lets it train so long."""
        begin = time.monotonic()
        self.cluster.go()
        time.sleep(seconds)
        self.cluster.stop()
        self.turns.append((begin, time.monotonic()))

    def timing(self) -> Timing:
        """Of the epochs that have begun and ended within turns, or across them.

        Raises:
            RunFailed: not one has.
        """
        return measure(self.cluster.laps(), self.turns)


def measure(laps: Sequence[Lap], turns: Sequence[tuple[float, float]]) -> Timing:
    """Epochs, and the seconds of turns within them.

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
    return Timing(len(timed) - 1, seconds, timed[-1].logs)


def race(clusters: Sequence[Cluster], turns: int = TURNS) -> list[Timing]:
    """Has clusters that have been started and stopped train by turns.

    Args:
        clusters: they.
        turns: how often each of them trains.

    Raises:
        RunFailed: a task of one has ended, or no epoch did.
    """
    runners = [Runner(cluster) for cluster in clusters]
    for number in range(turns):
        # Every other time backwards, so that a load that grows or fades favours nobody.
        for runner in runners if number % 2 == 0 else reversed(runners):
            runner.turn(TURN_SECONDS)
    return [runner.timing() for runner in runners]
