"""Who is measured against whom, and the rounds of it."""

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
"""The share of the machine that other processes may use during a run that counts, as far as patience goes."""
LEARNED = 0.9
"""The accuracy on the training data that every run has to end with: who does not learn is not fast."""


@dataclass(frozen=True)
class Contestant:
    """A program in a contest.

    Args:
        name: what the table calls it.
        program: its module.
        roles: tasks of each role, where they are not the contest's.
        changes: what of the workload is another for it alone.
        python: the environment variable that may name the interpreter which has its packages.
        batches: workers' batches in one of its steps, where its steps are not the other's: rates are of batches then.
        checkout: whose `tfdist_cli` it trains with.
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
        title: what the table calls it.
        roles: tasks of each role; none is one process.
        ours: tfdist.
        peer: what it is compared with.
        changes: what of the workload is another for both.
        turns: how often each side trains in a round.
    """

    title: str
    roles: Mapping[str, int]
    ours: Contestant
    peer: Contestant
    changes: Mapping[str, Any] = field(default_factory=dict)
    turns: int = TURNS


TORCH_PYTHON = "TFDIST_BENCHMARK_TORCH_PYTHON"
"""The variable that names an interpreter with PyTorch, where it is not installed beside TensorFlow."""

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
    """What the rounds of one contest gave.

    Args:
        contest: who against whom.
        ours: steps per second of tfdist, a round each.
        peer: the same of its peer.
        others: the largest share of the machine that other processes used during one of the rounds.
    """

    contest: Contest
    ours: list[float]
    peer: list[float]
    others: float


def against(contest: Contest, checkout: Path) -> Contest:
    """The same with another version of tfdist in the peer's place."""
    peer = replace(contest.ours, name=f"the same, version in {checkout.name}", checkout=checkout.resolve())
    return replace(contest, peer=peer)


def hold(
    contests: Sequence[Contest], workload: Workload, *, rounds: int, patience: int, say: Callable[[str], None]
) -> list[Outcome]:
    """Has both sides of all contests train by turns once in every round, in fresh clusters.

    Args:
        contests: who against whom.
        workload: what they train.
        rounds: how often each contest is held.
        patience: how often one is held again because other processes were busy meanwhile.
        say: told about each round.

    Raises:
        RunFailed: a program failed, or did not learn.
    """
    held: dict[str, list[tuple[list[float], float]]] = {contest.title: [] for contest in contests}
    for number in range(rounds):
        for contest in contests:
            rates, busy = _quiet_race(contest, workload, patience)
            held[contest.title].append((rates, busy))
            ours, peer = rates
            say(
                f"round {number + 1}/{rounds}  {contest.title}  {contest.ours.name}: {ours:.1f} steps/s"
                f"  {contest.peer.name}: {peer:.1f}  ratio {ours / peer:.2f}  others {busy:.0%}"
            )
    return [
        Outcome(
            contest,
            ours=[ours for (ours, _), _ in held[contest.title]],
            peer=[peer for (_, peer), _ in held[contest.title]],
            others=max(busy for _, busy in held[contest.title]),
        )
        for contest in contests
    ]


def _quiet_race(contest: Contest, workload: Workload, patience: int) -> tuple[list[float], float]:
    """Both rates and what others used of the machine, of the quietest of the races that patience allows."""
    races = []
    for _ in range(patience + 1):
        before = Usage.now()
        rates = _race(contest, workload)
        races.append((rates, before.others()))
        if races[-1][1] <= QUIET:
            break
    return min(races, key=lambda each: each[1])


def _race(contest: Contest, workload: Workload) -> list[float]:
    """Steps per second of both sides."""
    sides = [contest.ours, contest.peer]
    works = [replace(workload, **{**contest.changes, **who.changes}) for who in sides]
    with ExitStack() as stack:
        clusters = []
        for who, work in zip(sides, works, strict=True):
            roles = contest.roles if who.roles is None else who.roles
            python = os.environ.get(who.python or "", sys.executable)
            cluster = Cluster(who.program, roles, work, python=python, checkout=who.checkout)
            clusters.append(stack.enter_context(cluster))
        for cluster in clusters:
            cluster.await_laps(1)
        for cluster in clusters:  # not before: mirrored workers give one up that is stopped while the other side starts
            cluster.stop()
        timings = race(clusters, contest.turns)
    for who, timing in zip(sides, timings, strict=True):
        if timing.logs["accuracy"] < LEARNED:
            raise RunFailed(f"{who.name} has learned nothing in {contest.title}: {timing.logs}")
    return [
        timing.epochs * work.steps * who.batches / timing.seconds
        for who, work, timing in zip(sides, works, timings, strict=True)
    ]
