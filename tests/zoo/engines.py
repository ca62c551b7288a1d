"""Training models of the zoo by each engine, in clusters that many models share, and comparing what came of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import fork_server
from tests.support.tasks import Tasks, plain_environment
from tests.zoo.case import Case

PROGRAM = Path(__file__).with_name("train.py")
LIMIT = 240.0
"""Seconds that one model may take, on a machine that is busy with other things; on an idle one it takes a few."""
_GRACE = 20.0
"""Seconds in which the tasks end when one of them has failed."""


@dataclass(frozen=True)
class Engine:
    """A way to train.

    Args:
        title: what it is called in tables.
        roles: how many tasks of each role its cluster has; none where it is one process.
        workers: how many batches are one step.
        env: what its tasks have in their environment.
    """

    title: str
    roles: dict[str, int]
    workers: int = 1
    env: tuple[tuple[str, str], ...] = ()

    @property
    def trainers(self) -> list[str]:
        """The tasks whose results are compared; an empty name is the process that is in no cluster."""
        if not self.roles:
            return [""]
        return ["chief:0"] if "chief" in self.roles else [f"worker:{n}" for n in range(self.roles["worker"])]


ENGINES = {
    "single": Engine("one process", {}),
    "async": Engine("ps async", {"chief": 1, "ps": 2, "worker": 1}),
    "sync": Engine("ps sync", {"chief": 1, "ps": 2, "worker": 2}, workers=2),
    "mirrored1": Engine("mirrored, 1 thread", {"worker": 2}, workers=2, env=(("TF_NUM_INTRAOP_THREADS", "1"),)),
    "mirrored2": Engine("mirrored, 2 threads", {"worker": 2}, workers=2, env=(("TF_NUM_INTRAOP_THREADS", "2"),)),
}
REFERENCES = {"keras1": Engine("Keras", {}), "keras2": Engine("Keras, batches of 2 workers", {})}


@dataclass(frozen=True)
class Result:
    """What a model came to with an engine.

    Args:
        state: `not run`, `ok`, `random` (several workers draw what no other process draws: they agree with each other),
            `refused`, `wrong`, `failed` or `hung`.
        difference: the largest difference from Keras's own training, relative to numbers larger than 1.
        said: the sentence of a refusal, or what went wrong.
    """

    state: str
    difference: float = 0.0
    said: str = ""


def train(engine: Engine, key: str, names: Sequence[str], folder: Path, limit: float = LIMIT) -> dict[str, str]:
    """Trains models one after the other, with as few clusters as the failures among them allow.

    Args:
        engine: the way.
        key: its name for the program.
        names: the models'.
        folder: where each trainer writes what came of each model, in a folder of its own.
        limit: the seconds that one model may take.

    Returns:
        For the models that came to no end: what was the matter.
    """
    left, problems, attempt = list(names), {}, len(list(folder.glob("attempt*")))
    for task in engine.trainers:
        results(folder, task).mkdir(parents=True, exist_ok=True)
    while left:
        attempt += 1
        with _running(engine, key, left, folder, attempt) as processes:
            problem = _watch(engine, processes, left, folder, limit)
        done = _done(engine, left, folder)
        if done < len(left):
            problems[left[done]] = problem or "the tasks ended without a result"
            done += 1
        left = left[done:]
    return problems


def results(folder: Path, task: str) -> Path:
    """Where a trainer writes."""
    return folder / (task.replace(":", "-") or "alone")


def _done(engine: Engine, names: Sequence[str], folder: Path) -> int:
    """How many of the models have come to an end on every trainer, in their order."""
    ended = 0
    for name in names:
        written = [results(folder, task) / f"{name}{kind}" for task in engine.trainers for kind in (".npz", ".json")]
        if sum(path.exists() for path in written) < len(engine.trainers):
            break
        ended += 1
    return ended


@contextmanager
def _running(engine: Engine, key: str, names: Sequence[str], folder: Path, attempt: int) -> Iterator[dict[str, Any]]:
    argv = {task: (sys.executable, str(PROGRAM), key, str(results(folder, task)), *names) for task in engine.trainers}
    env = dict(engine.env)
    logs = folder / f"attempt{attempt}"
    if not engine.roles:
        logs.mkdir(parents=True)
        with (logs / "alone.out").open("w") as out, (logs / "alone.err").open("w") as err:
            process = fork_server.fork(argv[""], logs, {**plain_environment(), **env}, out, err)
        try:
            yield {"": process}
        finally:
            process.kill()
            process.wait(10)
        return
    tasks = Tasks(logs, **engine.roles)
    try:
        for task in tasks.tasks:
            tasks.start(argv.get(task, argv[engine.trainers[0]]), task, env=env)
        yield {task: tasks.processes[task] for task in engine.trainers}
    finally:
        tasks.close()


def _watch(engine: Engine, processes: dict[str, Any], names: Sequence[str], folder: Path, limit: float) -> str | None:
    """Waits until all have ended, one has failed, or a model takes too long.

    Returns:
        What was the matter.
    """
    since, before, failed = time.monotonic(), 0, 0.0
    while any(process.poll() is None for process in processes.values()):
        done = _done(engine, names, folder)
        if done > before:
            since, before = time.monotonic(), done
        if any(process.poll() for process in processes.values()):
            failed = failed or time.monotonic()
        if failed and time.monotonic() - failed > _GRACE:
            break
        if time.monotonic() - since > limit:
            return f"hung: no result in {limit:.0f} s"
        _pause(next(process for process in processes.values() if process.poll() is None))
    codes = {task or "the process": process.poll() for task, process in processes.items()}
    return f"exit codes {codes}" if any(codes.values()) else None


def _pause(process: Any) -> None:
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        return


def judge(case: Case, name: str, key: str, folders: dict[str, Path], problem: str | None) -> Result:
    """Compares what an engine has come to with Keras's own training.

    Args:
        case: the model.
        name: its name.
        key: the engine's.
        folders: by engine, where its trainers have written.
        problem: why there is no result, if there is none.
    """
    errors, written = _written(name, key, folders[key])
    raw = [error for error in errors if error["said"] is None]
    if raw:
        return Result("failed", said=f"{raw[0]['type']}: {raw[0]['message']}")
    if problem:
        return Result("hung" if problem.startswith("hung") else "failed", said=problem)
    if errors:
        return Result("refused" if not written else "failed", said=errors[0]["said"])
    if len(written) < len(ENGINES[key].trainers):
        return Result("not run")
    return _compared(case, name, ENGINES[key].workers > 1, folders, written)


def _written(name: str, key: str, folder: Path) -> tuple[list[Any], list[Any]]:
    """The errors and the results of a model that an engine's trainers have written."""
    errors, written = [], []
    for task in ENGINES[key].trainers:
        path = results(folder, task) / name
        if path.with_suffix(".json").exists():
            errors.append(json.loads(path.with_suffix(".json").read_text()))
        elif path.with_suffix(".npz").exists():
            written.append(np.load(path.with_suffix(".npz")))
    return errors, written


def _compared(case: Case, name: str, several: bool, folders: dict[str, Path], written: list[Any]) -> Result:
    for other in written[1:]:
        worst, where = difference(written[0], other)
        if worst > 0:
            return Result("wrong", worst, f"the workers differ in {where}")
    reference = "keras2" if several and not case.copies else "keras1"
    path = results(folders[reference], "") / f"{name}.npz"
    if not path.exists():
        error = path.with_suffix(".json")
        why = error.read_text() if error.exists() else ""
        return Result("failed", said=f"Keras itself cannot train it: {why}") if why else Result("not run")
    right = np.load(path)
    draws = any(entry.startswith("seed/") for entry in right.files) or case.pipeline is not None
    if case.traced_at_random or (draws and several):
        finite = all(np.isfinite(written[0][entry]).all() for entry in written[0].files)
        return Result("random" if finite else "wrong", said="" if finite else "numbers that are not finite")
    worst, where = difference(written[0], right, validation=not (case.copies and several))
    return Result("ok" if worst <= case.tolerance else "wrong", worst, "" if worst <= case.tolerance else where)


def difference(some: Any, others: Any, *, validation: bool = True) -> tuple[float, str]:
    """The largest difference, relative to numbers that are larger than 1, and what has it.

    Args:
        some: what one training has come to.
        others: what another one has.
        validation: whether scores of validation are compared.
    """
    pairs = dict(zip(map(_place, some.files), some.files, strict=True))
    others_pairs = dict(zip(map(_place, others.files), others.files, strict=True))
    if pairs.keys() != others_pairs.keys():
        return float("inf"), f"names: {sorted(pairs.keys() ^ others_pairs.keys())}"
    worst, where = 0.0, ""
    for place, name in pairs.items():
        if name.startswith("history/val_") and not validation:
            continue
        one, other = np.float64(some[name]), np.float64(others[others_pairs[place]])
        if one.shape != other.shape:
            return float("inf"), f"{name}: shapes {one.shape} and {other.shape}"
        relative = np.abs(one - other) / np.maximum(1.0, np.abs(other))
        relative = np.where(np.isnan(one) & np.isnan(other), 0.0, relative)
        largest = float(np.max(np.nan_to_num(relative, nan=np.inf), initial=0.0))
        if largest > worst:
            worst, where = largest, f"{name}: {one.ravel()[:4]} instead of {other.ravel()[:4]}"
    return worst, where


def _place(name: str) -> str:
    """What is the same in two trainings: a variable's number and not its path, which Keras may number."""
    return name if name.startswith("history/") else "/".join(name.split("/")[:2])
