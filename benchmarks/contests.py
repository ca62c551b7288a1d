"""The contests: tfdist and a peer, measured in rounds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT, Cluster, RunFailed
from benchmarks.race import TURNS, race
from benchmarks.workload import Workload
from tfdist_cli.bench.machine import Usage

QUIET = 0.1
"""The fraction of the machine that other processes may use during a run. Others are repeated, `patience` times."""
LEARNED = 0.9
"""The accuracy on the training data that every run has to reach: a program that does not learn is not fast."""


@dataclass(frozen=True)
class Contestant:
    """A program in a contest.

    Args:
        name: its name in the table.
        program: its module.
        roles: tasks of each role, if they differ from the contest's.
        changes: differences from the workload, for it alone.
        python: the environment variable with the interpreter that has its packages.
        batches: workers' batches in one of its steps. If the sides differ in it, rates are of batches.
        checkout: the checkout whose `tfdist_cli` it uses.
    """

    name: str
    program: str
    roles: Mapping[str, int] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    batches: int = 1
    checkout: Path = ROOT


@dataclass(frozen=True)
class Contest:
    """tfdist and a peer on the same kind of cluster.

    Args:
        title: its name in the table.
        roles: tasks of each role; none is one process.
        ours: tfdist.
        peer: the program that it is compared with.
        changes: differences from the workload, for both.
        turns: how often each side trains in a round.
    """

    title: str
    roles: Mapping[str, int]
    ours: Contestant
    peer: Contestant
    changes: Mapping[str, Any] = field(default_factory=dict)
    turns: int = TURNS


TORCH_PYTHON = "TFDIST_BENCHMARK_TORCH_PYTHON"
"""The variable with the interpreter that has PyTorch, if it is not installed beside TensorFlow."""

TFDIST = Contestant("`tfdist.fit` (Keras 3)", "benchmarks.programs.tfdist_fit")
TF_KERAS = Contestant("tf_keras `Model.fit`", "benchmarks.programs.tf_keras_fit")
KERAS = Contestant("Keras 3 `Model.fit`", "benchmarks.programs.keras_fit")
TORCH = Contestant("PyTorch DDP, gloo", "benchmarks.programs.torch_ddp", python=TORCH_PYTHON)
ROUNDED = replace(TFDIST, name="`tfdist.fit`, `wire: float16`", changes={"wire": "float16"})
ALONE = replace(TFDIST, name="`tfdist.fit`, one process, both cores", roles={})

_PS = "`ParameterServerStrategy`, 1 chief, 2 ps, 2 workers"
_CLUSTER = {"chief": 1, "worker": 2, "ps": 2}
_BFLOAT16 = replace(
    TFDIST,
    name="`tfdist.fit`, `wire: bfloat16`, 20 steps an execution",
    changes={"wire": "bfloat16", "steps_per_execution": 20},
)
_BEST = replace(
    TFDIST,
    name="`tfdist.fit`, `updates: {local_steps: 20}`, 20 steps an execution",
    changes={"updates": {"local_steps": 20}, "steps_per_execution": 20},
)
_SYNC = {"updates": {"mode": "sync"}}
_EMBEDDING = {"model": "embedding", "batch_size": 256}
_TRANSFORMER = {"model": "transformer", "batch_size": 32, "steps": 4, "steps_per_execution": 4}

CONTESTS = {
    "ps": Contest(_PS, _CLUSTER, TFDIST, TF_KERAS),
    "mirrored": Contest("`MultiWorkerMirroredStrategy`, 2 workers", {"worker": 2}, TFDIST, TF_KERAS),
    "mirrored_float16": Contest(
        "`MultiWorkerMirroredStrategy`, 2 workers, gradients in float16", {"worker": 2}, ROUNDED, TORCH
    ),
    "cnn": Contest(
        "CNN, `MultiWorkerMirroredStrategy`, 2 workers",
        {"worker": 2},
        TFDIST,
        replace(ALONE, changes={"batch_size": 128}),
        {"model": "cnn"},
    ),
    "cnn_ps": Contest(
        "CNN, `ParameterServerStrategy`, 1 chief, 1 ps, 2 workers",
        {"chief": 1, "worker": 2, "ps": 1},
        TFDIST,
        ALONE,
        {"model": "cnn", "steps_per_execution": 20},
    ),
    "transformer": Contest(
        "transformer, `MultiWorkerMirroredStrategy`, 2 workers", {"worker": 2}, TFDIST, TORCH, _TRANSFORMER, turns=18
    ),
    "transformer_ps": Contest(
        "transformer, `ParameterServerStrategy`, 1 chief, 1 ps, 2 workers; batches per second",
        {"chief": 1, "worker": 2, "ps": 1},
        TFDIST,
        replace(TORCH, roles={"worker": 2}, batches=2),
        _TRANSFORMER,
        turns=18,
    ),
    "bfloat16": Contest(f"{_PS}, bfloat16", _CLUSTER, _BFLOAT16, TF_KERAS),
    "bfloat16_alone": Contest(f"{_PS}, bfloat16, against one process", _CLUSTER, _BFLOAT16, ALONE),
    "best": Contest(f"{_PS}, best setting", _CLUSTER, _BEST, TF_KERAS),
    "best_alone": Contest(f"{_PS}, best setting, against one process", _CLUSTER, _BEST, ALONE),
    "sync": Contest(
        f"{_PS}, `updates: {{mode: sync}}` against `async`",
        _CLUSTER,
        replace(TFDIST, name="`tfdist.fit`, sync 2 of 2", changes=_SYNC, batches=2),
        replace(TFDIST, name="`tfdist.fit`, async"),
        {"steps_per_execution": 20},
    ),
    "embedding": Contest(f"1M × 32 table, {_PS}", _CLUSTER, TFDIST, TF_KERAS, _EMBEDDING),
    "embedding_rows": Contest(
        f"10M rows against 100k rows, {_PS}",
        _CLUSTER,
        replace(TFDIST, name="10M rows", changes={"rows": 10_000_000}),
        replace(TFDIST, name="100k rows", changes={"rows": 100_000}),
        _EMBEDDING,
    ),
    "embedding_rows_spread": Contest(
        f"10M rows against 100k rows, both spread over the ps, {_PS}",
        _CLUSTER,
        replace(TFDIST, name="10M rows", changes={"rows": 10_000_000}),
        replace(TFDIST, name="100k rows", changes={"rows": 100_000}),
        {**_EMBEDDING, "spread": 2**20},
    ),
    "embedding_tables": Contest(
        f"8 tables against one, {_PS}",
        _CLUSTER,
        replace(TFDIST, name="8 tables", changes={"tables": 8}),
        replace(TFDIST, name="1 table"),
        _EMBEDDING,
    ),
    "single": Contest("one process, both cores", {}, TFDIST, KERAS),
}


@dataclass(frozen=True)
class Outcome:
    """The results of one contest.

    Args:
        contest: the contest.
        ours: steps per second of tfdist in each round.
        peer: the same of its peer.
        others: the largest fraction of the machine that other processes used during one of the rounds.
    """

    contest: Contest
    ours: list[float]
    peer: list[float]
    others: float


def against(contest: Contest, checkout: Path) -> Contest:
    """Returns the contest with another version of tfdist as the peer."""
    peer = replace(contest.ours, name=f"the same, version in {checkout.name}", checkout=checkout.resolve())
    return replace(contest, peer=peer)


def run_contests(
    contests: Sequence[Contest], workload: Workload, *, rounds: int, patience: int, log: Callable[[str], None]
) -> list[Outcome]:
    """Runs all contests once in every round, in fresh clusters; both sides of a contest train in turns.

    Args:
        contests: the contests.
        workload: what they train.
        rounds: the number of rounds.
        patience: how often a run is repeated if other processes were busy.
        log: called with a line about each round.

    Raises:
        RunFailed: a program failed, or did not learn.
    """
    results: dict[str, list[tuple[list[float], float]]] = {contest.title: [] for contest in contests}
    for number in range(rounds):
        for contest in contests:
            rates, busy = _quiet_race(contest, workload, patience)
            results[contest.title].append((rates, busy))
            ours, peer = rates
            log(
                f"round {number + 1}/{rounds}  {contest.title}  {contest.ours.name}: {ours:.1f} steps/s"
                f"  {contest.peer.name}: {peer:.1f}  ratio {ours / peer:.2f}  others {busy:.0%}"
            )
    return [
        Outcome(
            contest,
            ours=[ours for (ours, _), _ in results[contest.title]],
            peer=[peer for (_, peer), _ in results[contest.title]],
            others=max(busy for _, busy in results[contest.title]),
        )
        for contest in contests
    ]


def _quiet_race(contest: Contest, workload: Workload, patience: int) -> tuple[list[float], float]:
    """Returns both rates and the load by other processes, of the run with the lowest load."""
    races = []
    for _ in range(patience + 1):
        before = Usage.now()
        rates = _race(contest, workload)
        races.append((rates, before.others()))
        if races[-1][1] <= QUIET:
            break
    return min(races, key=lambda each: each[1])


def _race(contest: Contest, workload: Workload) -> list[float]:
    """Returns the steps per second of both sides."""
    sides = [contest.ours, contest.peer]
    works = [replace(workload, **{**contest.changes, **side.changes}) for side in sides]
    with ExitStack() as stack:
        clusters = []
        for side, work in zip(sides, works, strict=True):
            roles = contest.roles if side.roles is None else side.roles
            python = os.environ.get(side.python or "", sys.executable)
            cluster = Cluster(side.program, roles, work, python=python, checkout=side.checkout)
            clusters.append(stack.enter_context(cluster))
        for cluster in clusters:
            cluster.await_laps(1)
        for (
            cluster
        ) in clusters:  # not earlier: mirrored workers drop a worker that is paused while the other side starts
            cluster.stop()
        timings = race(clusters, contest.turns)
    for side, timing in zip(sides, timings, strict=True):
        if timing.logs["accuracy"] < LEARNED:
            raise RunFailed(f"{side.name} did not learn in {contest.title}: {timing.logs}")
    return [
        timing.epochs * work.steps * side.batches / timing.seconds
        for side, work, timing in zip(sides, works, timings, strict=True)
    ]
