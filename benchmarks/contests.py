"""Runs contests in rounds. All peers of one training of tfdist race against it together."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cluster import Cluster, RunFailed
from benchmarks.data import write
from benchmarks.grid import Contest, Side
from benchmarks.race import MOST, Timing, race
from benchmarks.record import Measured, Record, today
from benchmarks.sizes import SIZES
from tfdist_cli.bench.machine import Usage

QUIET = 0.1
"""The fraction of the machine that other processes may use during a run. Others are repeated, `patience` times."""


@dataclass(frozen=True)
class Outcome:
    """The results of one contest.

    Args:
        contest: the contest.
        ours: steps per second of tfdist in each round.
        peer: the same of its peer.
        others: the largest fraction of the machine that other processes used during one of the rounds.
        days: when the rounds were measured.
    """

    contest: Contest
    ours: list[float]
    peer: list[float]
    others: float
    days: tuple[str, ...] = ()

    @classmethod
    def of(cls, contest: Contest, rounds: Sequence[Measured]) -> Outcome:
        """Returns the results of some rounds."""
        ours, peer = [each.ours for each in rounds], [each.peer for each in rounds]
        others = max((each.others for each in rounds), default=0.0)
        return cls(contest, ours, peer, others, tuple(each.day for each in rounds))


class Data:
    """The data of all models that have been asked for, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, model: str) -> Path:
        """Returns the folder with a model's data; it is generated once."""
        folder = self._folder / model
        if not folder.exists():
            folder.mkdir()
            write(folder, SIZES[model])
        return folder

    def start(self, side: Side, *, seed: int = 0) -> Cluster:
        """Starts a side's tasks."""
        work = replace(side.work, data=str(self.of(side.work.model)), seed=seed)
        python = os.environ.get(side.python or "", sys.executable)
        return Cluster(side.program, side.roles, work, bound=side.bound, python=python, checkout=side.checkout)


@contextmanager
def generated_data() -> Iterator[Data]:
    """The data of this process, deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-data-") as folder:
        yield Data(Path(folder))


def races(contests: Sequence[Contest]) -> list[list[Contest]]:
    """Returns the contests that race together: those of the same training of tfdist, as many as a race takes."""
    groups: list[list[Contest]] = []
    for contest in contests:
        fitting = (group for group in groups if group[0].ours == contest.ours and len(group) < MOST - 1)
        group = next(fitting, None)
        if group is None:
            groups.append([contest])
        else:
            group.append(contest)
    return groups


def run_contests(
    contests: Sequence[Contest],
    *,
    rounds: int,
    turns: int,
    patience: int,
    log: Callable[[str], None],
    record: Record | None = None,
) -> list[Outcome]:
    """Runs every contest once per round.

    Args:
        contests: the contests.
        rounds: the number of rounds.
        turns: how often each side trains in a round.
        patience: how often a run is repeated if other processes were busy.
        log: called with a line about each result.
        record: the rounds measured before, which count, and the new ones.

    Raises:
        RunFailed: a program failed, or did not learn.
    """
    record = record or Record(None)
    with generated_data() as data:
        for number in range(rounds):
            missing = [contest for contest in contests if len(record.of(contest.name)) <= number]
            for group in races(missing):
                (ours, *peers), busy = _quiet_race(group, data, turns, patience, number)
                for contest, peer in zip(group, peers, strict=True):
                    record.add(Measured(contest.name, ours, peer, busy, today().isoformat()))
                    log(
                        f"round {number + 1}/{rounds}  {contest.name}  {ours:.1f} steps/s, {contest.peer.name}: "
                        f"{peer:.1f}  ratio {ours / peer:.2f}  others {busy:.0%}"
                    )
    return [Outcome.of(contest, record.of(contest.name)) for contest in contests]


def _quiet_race(
    group: Sequence[Contest], data: Data, turns: int, patience: int, first: int
) -> tuple[list[float], float]:
    """Returns the rates of tfdist and its peers, and the load by other processes, of the run with the lowest load."""
    runs = []
    for _ in range(patience + 1):
        before = Usage.now()
        rates = _race([group[0].ours, *(contest.peer for contest in group)], data, turns, first)
        runs.append((rates, before.others()))
        if runs[-1][1] <= QUIET:
            break
    return min(runs, key=lambda each: each[1])


def _race(sides: Sequence[Side], data: Data, turns: int, first: int) -> list[float]:
    """Returns the steps per second of each side."""
    with ExitStack() as stack:
        clusters = _ready(sides, stack, data)
        timings = race(clusters, turns, first)
    for side, timing in zip(sides, timings, strict=True):
        check_learned(side, timing)
    return [
        timing.epochs * side.work.steps * side.batches / timing.seconds
        for side, timing in zip(sides, timings, strict=True)
    ]


def _ready(sides: Sequence[Side], stack: ExitStack, data: Data) -> list[Cluster]:
    """Returns a paused cluster for each side, which has ended its first epoch.

    Mirrored workers drop a worker that is paused for as long as other sides start. They start when the others, which
    may be paused for any time, are ready, so that only they train while another one starts.
    """
    clusters: dict[int, Cluster] = {}
    lasting = [n for n, side in enumerate(sides) if not side.mirrored]
    for together in (lasting, [n for n, side in enumerate(sides) if side.mirrored]):
        started = {n: stack.enter_context(data.start(sides[n])) for n in together}
        for n, cluster in started.items():
            cluster.await_laps(1)
            if n in lasting:
                cluster.stop()
        clusters |= started
    for n, cluster in clusters.items():
        if n not in lasting:
            cluster.stop()
    return [clusters[n] for n in range(len(sides))]


def check_learned(side: Side, timing: Timing) -> None:
    """Refuses a program whose loss has not fallen: one that does not learn is not fast.

    Raises:
        RunFailed: it has not.
    """
    before, after = timing.first["loss"], timing.logs["loss"]
    if not (math.isfinite(after) and after < before):
        raise RunFailed(f"{side.name} did not learn {side.work.model}: its loss was {before}, and then {after}")
