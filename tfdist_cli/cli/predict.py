"""`tfdist predict`: predicts a file of any size with the model of a run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.trained_run import opened_with_recipe
from tfdist_cli.errors import ExitCode, TaskLost, UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.storage.tree import exists, upload_result
from tfdist_cli.task.prediction.job import PredictionJob, Shard, model_of

EXAMPLES = (
    "tfdist predict runs/latest --data test --output predictions.csv",
    "tfdist predict runs/latest --data users.parquet --output scores.parquet --workers 4",
    "tfdist predict runs/latest --data features.csv --columns height,weight --output scores.csv",
    "tfdist predict s3://bucket/runs/digits --data s3://bucket/users.parquet --output s3://bucket/scores.parquet",
    "srun sh -c 'tfdist predict RUN --data x.npy --output y.npy --shard $SLURM_PROCID/$SLURM_NTASKS'",
)
_ATTEMPTS = 3
"""How often a process is started that is killed without having done a part."""
_SECONDS = 1.0
"""Seconds between two lines of progress at least."""


def predict(  # noqa: PLR0913 a parameter is an option
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run directory, or its address: s3://bucket/runs/digits.", show_default=False
        ),
    ],
    *,
    data: Annotated[
        str,
        typer.Option(
            help="A .npy, .npz, .csv or .parquet file of inputs, also in a bucket: s3://bucket/users.parquet; or a "
            "split of the recipe's dataset, such as test.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            metavar="PATH|URL",
            help="The file to write: .parquet, .csv or .npy, also in a bucket: s3://bucket/scores.parquet. It must not "
            "exist.",
            show_default=False,
        ),
    ],
    columns: Annotated[
        str | None,
        typer.Option(help="The columns or arrays of the file that are inputs: a,b,c. Default: all of them."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="INDEX/COUNT",
            help="Predict only every COUNT-th part, from part INDEX on: for processes on several machines with a "
            "common folder. Call it once more without --shard to join the parts.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Predict with the checkpoint of this step.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples that the model predicts at once.")] = 256,
    part_size: Annotated[int, typer.Option(min=1, help="Examples in a part.")] = 65536,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be predicted, and what is done; predict nothing.")
    ] = False,
) -> None:
    """Predict a file, or a split of the recipe's data, with the model of a run.

    The model is the run's export, or its newest checkpoint if that is newer. The data may be larger than memory: it is
    read, predicted and written in parts, in OUTPUT.parts. A part is complete or not there. Call the command again after
    it was killed: it continues with the parts that are missing. At the end the parts are joined to one file, in the
    order of the data, and removed.

    A model with one input takes all columns of a file in order. Several inputs take the columns of their names: `age`,
    or `age_0`, `age_1` and so on. The outputs have the model's names, or `prediction`.
    """
    run_dir, recipe = opened_with_recipe(run)
    checkpoints = recipe.checkpoint.dir if recipe.checkpoint and recipe.checkpoint.dir else run_dir / "checkpoints"
    at = checked_location(output)
    local = _parts_folder(run_dir) / at.name if isinstance(at, Url) else at
    job = PredictionJob(
        *model_of(run_dir, checkpoints, step, saves=recipe.checkpoint is not None),
        data,
        tuple(columns.split(",")) if columns else (),
        local,
        part_size,
    )
    own = Shard.parse(shard) if shard else None
    if dry_run:
        _print_plan(job, workers)
        return
    require_tensorflow()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdist_cli.task.prediction.outputs import format_of  # noqa: PLC0415 it imports numpy

    format_of(local)
    _check_new(at)
    job.open()
    if own or workers == 1:
        _predict_here(job, recipe, run_dir, own or Shard(), batch_size)
    else:
        _predict_in_processes(job, workers, ["predict", str(run_dir), *_arguments(job, batch_size)])
    if not own:
        _join(job)
        if isinstance(at, Url):
            upload_result(local, at)
            local.unlink()
        console.write(str(at))


def _parts_folder(run: Location) -> Path:
    """Returns the folder of this machine for predictions that are uploaded."""
    return run / "predictions" if isinstance(run, Path) else Path.cwd() / "predictions" / run.name


def _check_new(output: Location) -> None:
    if isinstance(output, Url) and exists(output):
        raise UsageError(f"{output} exists", code="output-exists", hint="remove it, or choose another --output")


def _print_plan(job: PredictionJob, workers: int) -> None:
    console.write(f"model    {job.model}" + (f", step {job.step}" if job.step is not None else ""))
    console.write(f"data     {job.data}" + (f", columns {', '.join(job.columns)}" if job.columns else ""))
    console.write(f"output   {job.output}, in parts of {job.part_size} examples in {job.folder}")
    console.write(f"workers  {workers}")
    console.write(f"done     {len(job.done())} of {job.parts or 'an unknown number of'} parts")


def _arguments(job: PredictionJob, batch_size: int) -> list[str]:
    arguments = ["--data", job.data, "--output", str(job.output)]
    arguments += ["--batch-size", str(batch_size), "--part-size", str(job.part_size)]
    arguments += ["--columns", ",".join(job.columns)] if job.columns else []
    return arguments + (["--step", str(job.step)] if job.step is not None else [])


def _predict_here(job: PredictionJob, recipe: Recipe, run: Location, shard: Shard, batch_size: int) -> None:
    from tfdist_cli.task.prediction.worker import predict_parts  # noqa: PLC0415 it imports TensorFlow

    examples = 0

    def done(count: int) -> None:
        nonlocal examples
        examples += count
        if shard.count == 1:
            _print_progress(job, f"{examples} examples")

    predict_parts(job, recipe, run, shard, batch_size, done)


def _predict_in_processes(job: PredictionJob, workers: int, arguments: Sequence[str]) -> None:
    """Predicts in several processes, and starts one again that is killed.

    Raises:
        UsageError, TaskLost: a process failed; it has printed why.
    """
    ending = threading.Event()
    signal.signal(signal.SIGTERM, _terminated)
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(_supervise, job, Shard(n, workers), arguments, ending) for n in range(workers)}
        try:
            while running:
                ended, running = wait(running, _SECONDS, FIRST_COMPLETED)
                for each in ended:
                    each.result()
                _print_progress(job)
        finally:
            ending.set()


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """Handles SIGTERM: the processes end, too."""
    sys.exit(ExitCode.TERMINATED)


def _supervise(job: PredictionJob, shard: Shard, arguments: Sequence[str], ending: threading.Event) -> None:
    threads = str(max(1, Machine.here().cores // shard.count))
    defaults = {"TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": threads}
    defaults["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # several processes share a GPU
    environment = defaults | os.environ
    command = [sys.executable, "-m", "tfdist_cli", *arguments, "--shard", f"{shard.index}/{shard.count}"]
    attempts, before = 0, -1
    while not ending.is_set():
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None:
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                if ending.is_set():
                    process.terminate()
        if process.returncode == 0 or ending.is_set():
            return
        done = sum(map(shard.takes, job.done()))
        attempts = attempts + 1 if done == before else 1
        before = done
        if process.returncode > 0 or attempts >= _ATTEMPTS:
            raise TaskLost(
                f"process {shard.index} of {shard.count} failed with exit code {process.returncode}",
                code="prediction-failed",
                hint="see its error above; call the command again to continue with the parts that are missing",
            )
        console.err.print(f"process {shard.index} was killed by signal {-process.returncode}, and is started again")


def _print_progress(job: PredictionJob, examples: str = "") -> None:
    """Prints how many parts are done; nothing while none is, and their number is not known."""
    total, done = job.parts, len(job.done())
    parts = f"{done} of {total} parts" if total else f"{done} {'part' if done == 1 else 'parts'}" if done else ""
    text = ", ".join(filter(None, [parts, examples]))
    if text:
        console.err.print(text)


def _join(job: PredictionJob) -> None:
    from tfdist_cli.task.prediction.worker import join  # noqa: PLC0415 it imports TensorFlow

    missing = sorted(set(range(job.parts or 0)) - job.done())
    if missing:
        raise TaskLost(
            f"{len(missing)} parts of {job.parts} are missing, the first is {missing[0]}",
            code="parts-missing",
            hint="call the command again: it predicts the parts that are missing",
        )
    join(job)
    shutil.rmtree(job.folder)
