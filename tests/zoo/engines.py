"""Trains models of the zoo with each engine, many models per cluster, and compares the results with Keras's."""

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
"""The time limit for one model in seconds, for a busy machine; an idle one needs a few seconds."""
CLOSE = 1.0
"""The largest difference of a loss, relative above 1, of workers that race each other."""
_GRACE = 20.0
"""The time in seconds in which the other tasks exit after one has failed."""


@dataclass(frozen=True)
class Engine:
    """An engine in a cluster of some size.

    Args:
        title: its name in tables.
        roles: the number of tasks of each role in its cluster; empty for one process.
        workers: the number of batches per step.
        env: additional environment variables of its tasks.
        racing: whether several workers make updates in no fixed order, so that numbers are close to Keras's at best.
    """

    title: str
    roles: dict[str, int]
    workers: int = 1
    env: tuple[tuple[str, str], ...] = ()
    racing: bool = False

    @property
    def trainers(self) -> list[str]:
        """The tasks whose results are compared; the name is empty for a process without a cluster."""
        if not self.roles:
            return [""]
        return ["chief:0"] if "chief" in self.roles else [f"worker:{n}" for n in range(self.roles["worker"])]


ENGINES = {
    "single": Engine("one process", {}),
    "async": Engine("ps async", {"chief": 1, "ps": 2, "worker": 1}),
    "async2": Engine("ps async, 2 workers", {"chief": 1, "ps": 2, "worker": 2}, racing=True),
    "sync": Engine("ps sync", {"chief": 1, "ps": 2, "worker": 2}, workers=2),
    "mirrored1": Engine("mirrored, 1 thread", {"worker": 2}, workers=2, env=(("TF_NUM_INTRAOP_THREADS", "1"),)),
    "mirrored2": Engine("mirrored, 2 threads", {"worker": 2}, workers=2, env=(("TF_NUM_INTRAOP_THREADS", "2"),)),
    "stages": Engine("2 stages", {"chief": 1, "worker": 2}, env=(("TFDIST_STRATEGY", "model_parallel"),)),
}
FOR_MODELS = ("single", "async", "sync", "mirrored1", "mirrored2", "stages")
FOR_EXAMPLES = ("single", "async", "async2", "sync", "mirrored2", "stages")
REFERENCES = {"keras1": Engine("Keras", {}), "keras2": Engine("Keras, batches of 2 workers", {})}


@dataclass(frozen=True)
class Result:
    """The result of training a model with an engine.

    Args:
        state: `not run`, `ok`, `random` (several workers draw other random values than one process, and agree with each
            other), `close` (workers race each other: the counts of updates are equal, and the losses are close),
            `refused`, `wrong`, `failed` or `hung`.
        difference: the largest difference from Keras's own training, relative for numbers above 1; of `random` and
            `close`, that of the losses.
        detail: the message of an error, or the number that is wrong.
        code: the code of the error with which the model was refused.
    """

    state: str
    difference: float = 0.0
    detail: str = ""
    code: str = ""


def train(engine: Engine, key: str, names: Sequence[str], folder: Path, limit: float = LIMIT) -> dict[str, str]:
    """Trains models one after another in one cluster. After a failure, a new cluster trains the remaining models.

    Args:
        engine: the engine.
        key: its name in `ENGINES` or `REFERENCES`.
        names: the names of the models.
        folder: where each trainer writes its results, in a folder per trainer.
        limit: the time limit for one model in seconds.

    Returns:
        The reason for each model without a result.
    """
    left, problems, attempt = list(names), {}, len(list(folder.glob("attempt*")))
    for task in engine.trainers:
        results(folder, task).mkdir(parents=True, exist_ok=True)
    while left:
        attempt += 1
        with _running(engine, key, left, folder, attempt) as processes:
            problem = _watch(engine, processes, left, folder, limit)
        done = _done(engine, left, folder)
        # A process that has written an error exits before it has started the next model.
        if done < len(left) and (done == 0 or _started(engine, left[done], folder)):
            problems[left[done]] = problem or "the tasks exited without a result"
            done += 1
        left = left[done:]
    return problems


def results(folder: Path, task: str) -> Path:
    """Returns the folder to which a trainer writes."""
    return folder / (task.replace(":", "-") or "alone")


def _done(engine: Engine, names: Sequence[str], folder: Path) -> int:
    """Returns how many of the models, in their order, have a result from every trainer."""
    count = 0
    for name in names:
        written = [results(folder, task) / f"{name}{kind}" for task in engine.trainers for kind in (".npz", ".json")]
        if sum(path.exists() for path in written) < len(engine.trainers):
            break
        count += 1
    return count


def _started(engine: Engine, name: str, folder: Path) -> bool:
    return any((results(folder, task) / name).exists() for task in engine.trainers)


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
    """Waits until all processes have exited, one has failed, or a model exceeds the time limit.

    Returns:
        The reason why a model has no result; None if all processes exited with code 0.
    """
    since, before, failed = time.monotonic(), 0, 0.0
    while running := [process for process in processes.values() if process.poll() is None]:
        done = _done(engine, names, folder)
        if done > before:
            since, before = time.monotonic(), done
        if any(process.poll() for process in processes.values()):
            failed = failed or time.monotonic()
        if failed and time.monotonic() - failed > _GRACE:
            break
        if time.monotonic() - since > limit:
            return f"hung: no result in {limit:.0f} s"
        _pause(running[0])
    codes = {task or "the process": process.poll() for task, process in processes.items()}
    return f"exit codes {codes}" if any(codes.values()) else None


def _pause(process: Any) -> None:
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        return


def judge(case: Case, name: str, key: str, folders: dict[str, Path], problem: str | None) -> Result:
    """Compares the result of an engine with Keras's own training.

    Args:
        case: the case.
        name: the name of the model.
        key: the name of the engine.
        folders: the folder of the results of each engine.
        problem: the reason why there is no result, or None.
    """
    errors, written = _written(name, key, folders[key])
    raw = [error for error in errors if error["code"] is None]
    if raw:
        return Result("failed", detail=f"{raw[0]['type']}: {raw[0]['message']}")
    if problem:
        return Result("hung" if problem.startswith("hung") else "failed", detail=problem)
    if errors:
        return Result("refused" if not written else "failed", detail=errors[0]["message"], code=errors[0]["code"])
    if len(written) < len(ENGINES[key].trainers):
        return Result("not run")
    return _compared(case, name, ENGINES[key], folders, written)


def _written(name: str, key: str, folder: Path) -> tuple[list[Any], list[Any]]:
    """Returns the errors and the results of a model from all trainers of an engine."""
    errors, written = [], []
    for task in ENGINES[key].trainers:
        path = results(folder, task) / name
        if path.with_suffix(".json").exists():
            errors.append(json.loads(path.with_suffix(".json").read_text()))
        elif path.with_suffix(".npz").exists():
            written.append(np.load(path.with_suffix(".npz")))
    return errors, written


def engines_of(case: Case) -> tuple[str, ...]:
    """Returns the names of the engines that train a model."""
    return FOR_EXAMPLES if case.example else FOR_MODELS


def _compared(case: Case, name: str, engine: Engine, folders: dict[str, Path], written: list[Any]) -> Result:
    several = engine.workers > 1
    for other in written[1:]:
        worst, where = difference(written[0], other)
        if worst > 0:
            return Result("wrong", worst, f"the workers differ in {where}")
    reference = "keras2" if several and not case.copies else "keras1"
    path = results(folders[reference], "") / f"{name}.npz"
    if not path.exists():
        error = path.with_suffix(".json")
        why = error.read_text() if error.exists() else ""
        return Result("failed", detail=f"Keras itself cannot train it: {why}") if why else Result("not run")
    right = np.load(path)
    # The last number of a seed generator counts its draws: that of a recurrent layer without dropout stays 0.
    draws = case.pipeline is not None or any(entry.startswith("seed/") and right[entry][-1] for entry in right.files)
    if case.traced_at_random or engine.racing or (draws and several):
        return _loosely(written[0], right, "close" if engine.racing else "random")
    worst, where = difference(written[0], right, validation=not (case.copies and several))
    return Result("ok" if worst <= case.tolerance else "wrong", worst, "" if worst <= case.tolerance else where)


def _loosely(found: Any, right: Any, state: str) -> Result:
    """Compares what does not depend on the order of updates or on draws: names, counts of updates, roughly losses."""
    if not all(np.isfinite(found[entry]).all() for entry in found.files):
        return Result("wrong", detail="numbers that are not finite")
    names = {_key(entry): entry for entry in right.files}
    if names.keys() != {_key(entry) for entry in found.files}:
        return Result("wrong", detail="other names")
    pairs = [(entry, names[_key(entry)]) for entry in found.files]
    counts = [(found[one], right[other]) for one, other in pairs if one.endswith("/iteration")]
    if any(one != other for one, other in counts):
        return Result("wrong", detail=f"counts of updates: {counts}")
    losses = [(found[one], right[other]) for one, other in pairs if one.startswith("history/") and "loss" in one]
    worst = max(
        (float(np.max(np.abs(one - other) / np.maximum(1.0, np.abs(other)))) for one, other in losses), default=0.0
    )
    right_enough = state == "random" or worst <= CLOSE
    return Result(state if right_enough else "wrong", worst, "" if right_enough else f"losses: {losses}")


def difference(some: Any, others: Any, *, validation: bool = True) -> tuple[float, str]:
    """Returns the largest difference, relative for numbers above 1, and the name and values of the number.

    Args:
        some: the results of one training.
        others: the results of another one.
        validation: whether to compare validation metrics.
    """
    pairs = dict(zip(map(_key, some.files), some.files, strict=True))
    others_pairs = dict(zip(map(_key, others.files), others.files, strict=True))
    if pairs.keys() != others_pairs.keys():
        return float("inf"), f"names: {sorted(pairs.keys() ^ others_pairs.keys())}"
    worst, where = 0.0, ""
    for key, name in pairs.items():
        if name.startswith("history/val_") and not validation:
            continue
        one, other = np.float64(some[name]), np.float64(others[others_pairs[key]])
        if one.shape != other.shape:
            return float("inf"), f"{name}: shapes {one.shape} and {other.shape}"
        relative = np.abs(one - other) / np.maximum(1.0, np.abs(other))
        relative = np.where(np.isnan(one) & np.isnan(other), 0.0, relative)
        largest = float(np.max(np.nan_to_num(relative, nan=np.inf), initial=0.0))
        if largest > worst:
            worst, where = largest, f"{name}: {one.ravel()[:4]} instead of {other.ravel()[:4]}"
    return worst, where


def _key(name: str) -> str:
    """Returns the part of a name that is equal in two trainings: the index of a variable; Keras numbers its path."""
    return name if name.startswith("history/") else "/".join(name.split("/")[:2])
