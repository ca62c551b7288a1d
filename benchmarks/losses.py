"""`python -m benchmarks --losses`: the loss after equal steps on the same data, with several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.contests import Data, generated_data
from benchmarks.grid import Contest, Side


def compare_losses(contests: Sequence[Contest], *, seeds: int, epochs: int, log: Callable[[str], None]) -> str:
    """Trains each side of each contest alone, as often as there are seeds.

    Both sides take the same number of steps. The loss is the mean of the last epoch's batches, each before its update,
    as all programs report it.

    Args:
        contests: the contests; a side of several of them trains once.
        seeds: the number of trainings, at least 2.
        epochs: epochs of a training.
        log: called with a line about each training.

    Returns:
        A Markdown table.

    Raises:
        RunFailed: a program failed.
        ValueError: there are too few seeds for a spread.
    """
    if seeds < 2:
        raise ValueError("a spread needs at least 2 seeds")
    sides: list[Side] = []
    for contest in contests:
        sides += [side for side in (contest.ours, contest.peer) if side not in sides]
    losses: list[list[float]] = [[] for _ in sides]
    with generated_data() as data:
        for seed in range(seeds):
            for side, found in zip(sides, losses, strict=True):
                found.append(_final_loss(side, data, seed, epochs))
                log(f"seed {seed + 1}/{seeds}  {side.work.model}, {side.name} [{side.settings}]: {found[-1]:.4f}")
    return _table(contests, lambda side: losses[sides.index(side)], epochs)


def _final_loss(side: Side, data: Data, seed: int, epochs: int) -> float:
    with data.start(side, seed=seed + 1) as cluster:
        cluster.await_laps(epochs)
        return cluster.laps()[epochs - 1].logs["loss"]


def _table(contests: Sequence[Contest], losses: Callable[[Side], Sequence[float]], epochs: int) -> str:
    rows = ["| contest | steps | tfdist, final loss | peer, final loss |", "|---|---|---|---|"]
    for contest in contests:
        cells = [f"{side.name} [{side.settings}]: {shown(losses(side))}" for side in (contest.ours, contest.peer)]
        rows.append(f"| `{contest.name}` | {epochs * contest.ours.work.steps} | {' | '.join(cells)} |")
    count = len(losses(contests[0].ours)) if contests else 0
    note = f"Mean ± standard deviation of {count} seeds: the loss of the last of {epochs} epochs on the training data."
    return "\n".join([*rows, "", note]) + "\n"


def shown(losses: Sequence[float]) -> str:
    """Returns mean and standard deviation, and each."""
    each = ", ".join(f"{loss:.4f}" for loss in losses)
    return f"**{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}** ({each})"
