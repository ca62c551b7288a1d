"""Who is measured against whom, and the rounds of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.cluster import RunFailed, Timing, run
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
    """

    name: str
    program: str
    roles: Mapping[str, int] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    batches: int = 1


@dataclass(frozen=True)
class Contest:
    """tfdist and a peer on the same kind of cluster.

    Args:
        title: what the table calls it.
        roles: tasks of each role; none is one process.
        ours: tfdist.
        peer: what it is compared with.
        changes: what of the workload is another for both.
    """

    title: str
    roles: Mapping[str, int]
    ours: Contestant
    peer: Contestant
    changes: Mapping[str, Any] = field(default_factory=dict)


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
_SETTING = "`wire: bfloat16`, 20 steps an execution"
_BEST = {"wire": "bfloat16", "steps_per_execution": 20}
_SYNC = {"updates": {"mode": "sync"}, "steps": 150}
_EMBEDDING = {"model": "embedding", "batch_size": 256}

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
        {"model": "cnn"},
    ),
    "best": Contest(
        f"{_PS}, best setting", _CLUSTER, replace(TFDIST, name=f"`tfdist.fit`, {_SETTING}", changes=_BEST), TF_KERAS
    ),
    "best_alone": Contest(
        f"{_PS}, best setting, against one process",
        _CLUSTER,
        replace(TFDIST, name=f"`tfdist.fit`, {_SETTING}", changes=_BEST),
        ALONE,
    ),
    "sync": Contest(
        f"{_PS}, `updates: {{mode: sync}}` against `async`",
        _CLUSTER,
        replace(
            TFDIST, name="`tfdist.fit`, sync 2 of 2", changes={"updates": {"mode": "sync"}, "steps": 150}, batches=2
        ),
        replace(TFDIST, name="`tfdist.fit`, async"),
    ),
    "embedding": Contest(f"1M × 32 table, {_PS}", _CLUSTER, TFDIST, TF_KERAS, _EMBEDDING),
    "embedding_rows": Contest(
        f"10M rows against 100k rows, {_PS}",
        _CLUSTER,
        replace(TFDIST, name="10M rows", changes={"rows": 10_000_000}),
        replace(TFDIST, name="100k rows", changes={"rows": 100_000}),
        _EMBEDDING,
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
        others: the largest share of the machine that other processes used during one of the runs.
    """

    contest: Contest
    ours: list[float]
    peer: list[float]
    others: float


def hold(
    contests: Sequence[Contest], workload: Workload, *, rounds: int, patience: int, say: Callable[[str], None]
) -> list[Outcome]:
    """Runs all contestants once in every round, in turns, each in a fresh cluster.

    Args:
        contests: who against whom.
        workload: what they train.
        rounds: runs of each contestant.
        patience: how often a run is made again because other processes were busy meanwhile.
        say: told about each run.

    Raises:
        RunFailed: a program failed, or did not learn.
    """
    entries = [(contest, who) for contest in contests for who in (contest.ours, contest.peer)]
    rates: dict[tuple[str, str], list[float]] = {(contest.title, who.name): [] for contest, who in entries}
    others = dict.fromkeys((contest.title for contest in contests), 0.0)
    for number in range(rounds):
        # Every other round goes backwards, so that a load that grows or fades favours nobody.
        for contest, who in entries if number % 2 == 0 else reversed(entries):
            timing, busy = _quiet_run(contest, who, workload, patience)
            rate = timing.steps_per_second * who.batches
            rates[contest.title, who.name].append(rate)
            others[contest.title] = max(others[contest.title], busy)
            say(
                f"round {number + 1}/{rounds}  {contest.title}  {who.name}: {rate:.1f} steps/s"
                f"  loss {timing.logs['loss']:.4f}  others {busy:.0%}"
            )
    return [
        Outcome(each, rates[each.title, each.ours.name], rates[each.title, each.peer.name], others[each.title])
        for each in contests
    ]


def _quiet_run(contest: Contest, who: Contestant, workload: Workload, patience: int) -> tuple[Timing, float]:
    """A run, and the share of the machine that others used meanwhile; the quietest of those that patience allows."""
    runs = []
    for _ in range(patience + 1):
        before = Usage.now()
        roles = contest.roles if who.roles is None else who.roles
        own = replace(workload, **{**contest.changes, **who.changes})
        timing = run(who.program, roles, own, python=os.environ.get(who.python or "", sys.executable))
        if timing.logs["accuracy"] < LEARNED:
            raise RunFailed(f"{who.name} has learned nothing in {contest.title}: {timing.logs}")
        runs.append((timing, before.others()))
        if runs[-1][1] <= QUIET:
            break
    return min(runs, key=lambda each: each[1])
