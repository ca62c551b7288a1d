"""`tfdist bench`: measures throughput with several numbers of workers, and the phases of a step."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tfdist_cli.bench.machine import Usage, describe
from tfdist_cli.bench.measure import Rate, Split, read_rate, read_split
from tfdist_cli.bench.plot import plot, require_matplotlib
from tfdist_cli.bench.results import Results, Row
from tfdist_cli.bench.variants import (
    Variant,
    can_measure_phases,
    measured_recipe,
    variants_of,
    whole_executions,
    with_phases,
    workers_of,
)
from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.summary import print_failure
from tfdist_cli.cli.job import Job
from tfdist_cli.cli.launch import launch_job
from tfdist_cli.cli.options import ClusterArgument, RecipeOption, SetOption
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.supervisor.state import Timeouts
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

EXAMPLES = (
    "tfdist bench configs/local.yaml",
    "tfdist bench cluster.yaml --recipe recipe.yaml --workers 1,2,4 --output measured",
    "tfdist bench cluster.yaml --set wire=bfloat16 --set updates.prefetch=true --json",
)


def bench(  # noqa: PLR0913 a parameter is an option
    cluster: ClusterArgument,
    *,
    recipe: RecipeOption = None,
    overrides: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each worker in a run.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Number of runs with each number of workers.")] = 3,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Numbers of workers to measure. Default: 1, powers of 2, and the cluster's number.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for bench.md, bench.svg and bench.json. The plot needs the extra 'plot'."),
    ] = None,
) -> None:
    """Measure a recipe's throughput, how it scales with workers, and the phases of a step.

    Each run starts a cluster on this machine as `tfdist launch` does, without checkpoints, evaluation and export.
    Before the measured steps, each run takes as many warm-up steps, in which functions are traced. Rounds are
    interleaved: each has one run per number of workers, and one in a single process on all cores (strategy: single).

    One more run of each measures the phases of a step with the worker's clock: wait (for a token of the chief), data,
    pull (parameters from the ps), compute, push (gradients to the ps) or all-reduce, and update. The rest is the time
    between a worker's functions. Other programs disturb the measurement: the results report their share.
    """
    spec, trained = load_run(cluster, recipe, overrides or ())
    if trained is None:
        raise UsageError(
            f"nothing to measure: {cluster} names no recipe",
            code="nothing-to-run",
            hint="set 'recipe' in the file, or pass --recipe FILE",
        )
    variants = variants_of(spec, trained, workers_of(workers) if workers is not None else ())
    require_tensorflow()
    if output is not None:
        require_matplotlib()
        _make_folder(output)
    results = _measure(spec, trained, variants, whole_executions(trained, steps), rounds)
    if output is not None:
        _write(results, output)
    if as_json:
        console.write(json.dumps(results.as_json(), indent=2))
    else:
        _print(results)


def _measure(cluster: Cluster, recipe: Recipe, variants: list[Variant], steps: int, rounds: int) -> Results:
    """Runs all rounds, then the runs that measure the phases of a step."""
    rates: list[list[Rate]] = [[] for _ in variants]
    splits: list[Split | None] = [None for _ in variants]
    runs = _Runs(recipe, steps)
    for number in range(rounds):
        # Every other round runs in reverse order, so that a changing load favours no variant.
        for place in sorted(range(len(variants)), reverse=number % 2 == 1):
            with runs.run(variants[place]) as (run_dir, result):
                rates[place].append(read_rate(run_dir, result))
            _say(f"round {number + 1}/{rounds}  {variants[place].name}: {rates[place][-1].steps:.1f} steps/s")
    for place, variant in enumerate(variants):
        if can_measure_phases(variant.cluster):
            with runs.run(replace(variant, cluster=with_phases(variant.cluster))) as (run_dir, _):
                split = splits[place] = read_split(run_dir)
            _say(f"parts of a step  {variant.name}: {split.step:.2f} ms")
    rows = [
        Row(variant.name, variant.workers, variant.alone, tuple(rates[place]), splits[place])
        for place, variant in enumerate(variants)
    ]
    title = f"{cluster.name}: {recipe.module}, {cluster.strategy}"
    return Results(title, describe(), steps, runs.others, tuple(rows))


class _Runs:
    """Runs trainings one after the other, each in a temporary folder.

    Args:
        recipe: the recipe of the file.
        steps: measured steps of each worker.
    """

    def __init__(self, recipe: Recipe, steps: int) -> None:
        self._recipe = recipe
        self._steps = steps
        self.others = 0.0
        """Largest share of the machine that other processes have used during a run."""

    @contextmanager
    def run(self, variant: Variant) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """Trains a variant; yields the run directory and the chief's result while the context is open.

        Raises:
            typer.Exit: the training failed or was stopped. The failure is printed, and its logs are kept.
        """
        recipe = measured_recipe(self._recipe, variant, self._steps)
        folder = Path(tempfile.mkdtemp(prefix="tfdist-bench-"))
        kept = False
        try:
            before = Usage.now()
            job = Job(variant.cluster, recipe, (), folder / "run")
            report, run_dir = launch_job(LocalLauncher(), job, job.rules(Timeouts(), max_restarts=0), quiet=True)
            self.others = max(self.others, before.others())
            if report.exit_code:
                kept = bool(report.failures)  # the logs show the reason
                print_failure(report)
                raise typer.Exit(report.exit_code)
            yield run_dir, report.result
        finally:
            if not kept:
                shutil.rmtree(folder)


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create {output}: {error.strerror}", code="output-not-writable", hint="choose another folder"
        ) from error


def _write(results: Results, output: Path) -> None:
    plot(results, output / "bench.svg")
    (output / "bench.json").write_text(json.dumps(results.as_json(), indent=2) + "\n", encoding="utf-8")
    (output / "bench.md").write_text(results.as_markdown("bench.svg"), encoding="utf-8")


def _print(results: Results) -> None:
    console.out.print(Text(f"{results.title}\n{results.machine}\n", style="bold"))
    for heads, *rows in results.tables():
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.out.print(table)
    for note in results.notes():
        console.out.print(Text(note, style="dim"))


def _say(text: str) -> None:
    console.err.print(Text(text, style="dim"))
