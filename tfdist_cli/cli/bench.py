"""`tfdist bench`: measures throughput with several numbers of workers, and the phases of a step."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tfdist_cli.bench.advice import Advice
from tfdist_cli.bench.machine import Usage, describe
from tfdist_cli.bench.measure import Rate, Split, read_rate, read_split
from tfdist_cli.bench.plot import plot, require_matplotlib
from tfdist_cli.bench.results import Results, Row
from tfdist_cli.bench.trials import Trial, trials_of
from tfdist_cli.bench.variants import (
    Variant,
    can_measure_phases,
    measured_cluster,
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
from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.run.report import Report
from tfdist_cli.launch.supervisor.state import Timeouts
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.run_storage.recipe import RecipeFetcher
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import MOST_TASKS

EXAMPLES = (
    "tfdist bench configs/local.yaml",
    "tfdist bench cluster.yaml --recipe recipe.yaml --workers 1,2,4 --output measured",
    "tfdist bench cluster.yaml --set wire=bfloat16 --set updates.prefetch=true --json",
    "tfdist bench cluster.yaml --advise",
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
    advise: Annotated[
        bool, typer.Option("--advise", help="Measure changes of single settings instead, and say which of them help.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for bench.md, bench.svg and bench.json; with --advise for advice.md and advice.json. "
            "The plot needs the extra 'plot'."
        ),
    ] = None,
) -> None:
    """Measure a recipe's throughput, how it scales with workers, and the phases of a step.

    Each run starts a cluster on this machine as `tfdist launch` does, without checkpoints, evaluation and export.
    Before the measured steps, each run takes as many warm-up steps, in which functions are traced. Rounds are
    interleaved: each has one run per number of workers, and one in a single process on all cores (strategy: single).

    One more run of each measures the phases of a step with the worker's clock: wait (for a token of the chief), data,
    pull (parameters from the ps), compute, push (gradients to the ps) or all-reduce, and update. The rest is the time
    between a worker's functions. Other programs disturb the measurement: the results report their share.

    With --advise each run has one setting of the cluster or the recipe changed, such as the update rule, the wire, the
    number of ps or threads. The changes that help are listed with the lines to write, and with what they change about
    the training. A gain counts if it exceeds the differences of runs of the same settings.
    """
    spec, trained = load_run(cluster, recipe, overrides or (), fetch=RecipeFetcher())
    if trained is None:
        raise UsageError(
            f"nothing to measure: {cluster} names no recipe",
            code="nothing-to-run",
            hint="set 'recipe' in the file, or pass --recipe FILE",
        )
    if advise:
        _check_advisable(workers, rounds)
        require_tensorflow()
        if output is not None:
            _make_folder(output)
        _show_advice(_advise(spec, trained, _Files(cluster, recipe, overrides or ()), steps, rounds), as_json, output)
        return
    variants = variants_of(spec, trained, _counts(workers) if workers is not None else ())
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


def _counts(workers: str) -> list[int]:
    """Returns the numbers of workers to measure.

    Raises:
        UsageError: it is no list of positive integers, or one is more than a cluster may have.
    """
    counts = workers_of(workers)
    if max(counts) > MOST_TASKS:
        raise UsageError(
            f"--workers {workers}: expected at most {MOST_TASKS}, got {max(counts)}",
            code="out-of-range",
            hint="each worker is a process of this machine: measure up to the number of its cores",
        )
    return counts


def _measure(cluster: Cluster, recipe: Recipe, variants: list[Variant], steps: int, rounds: int) -> Results:
    """Runs all rounds, then the runs that measure the phases of a step."""
    rates: list[list[Rate]] = [[] for _ in variants]
    splits: list[Split | None] = [None for _ in variants]
    runs = _Runs(steps)
    for number in range(rounds):
        # Every other round runs in reverse order, so that a changing load favours no variant.
        for place in sorted(range(len(variants)), reverse=number % 2 == 1):
            rates[place].append(runs.rate(variants[place], recipe))
            _say(f"round {number + 1}/{rounds}  {variants[place].name}: {rates[place][-1].steps:.1f} steps/s")
    for place, variant in enumerate(variants):
        if can_measure_phases(variant.cluster):
            with runs.run(replace(variant, cluster=with_phases(variant.cluster)), recipe) as (run_dir, _):
                split = splits[place] = read_split(run_dir)
            _say(f"parts of a step  {variant.name}: {split.step:.2f} ms")
    rows = [
        Row(variant.name, variant.workers, variant.alone, tuple(rates[place]), splits[place])
        for place, variant in enumerate(variants)
    ]
    title = f"{cluster.name}: {recipe.module}, {cluster.strategy}"
    return Results(title, describe(), steps, runs.others, tuple(rows))


@dataclass(frozen=True)
class _Files:
    """What the settings are read from, see `load_run`."""

    cluster: Path
    recipe: Path | None
    overrides: Sequence[str]


def _check_advisable(workers: str | None, rounds: int) -> None:
    if workers is not None:
        raise UsageError(
            "--advise measures the cluster with its own number of workers",
            code="advice-with-workers",
            hint="remove --workers; use --set roles.worker.replicas=N for another number",
        )
    if rounds < 2:
        raise UsageError(
            "--advise compares runs of the same settings, and one round has none",
            code="too-few-rounds",
            hint="use --rounds 2 or more",
        )


def _advise(cluster: Cluster, recipe: Recipe, files: _Files, steps: int, rounds: int) -> Advice:
    """Measures the settings as they are, one process, and each candidate, in interleaved rounds."""
    trials = trials_of(
        cluster,
        recipe,
        lambda changes: load_run(files.cluster, files.recipe, [*files.overrides, *changes], fetch=RecipeFetcher()),
    )
    runs = _Runs(steps)
    for number in range(rounds):
        for trial in trials[:: -1 if number % 2 else 1]:
            if not trial.error:
                _say(f"round {number + 1}/{rounds}  {trial.name}: {runs.try_out(trial)}")
    base, *others = trials
    return Advice(
        f"{cluster.name}: {recipe.module}, {cluster.strategy}",
        describe(),
        whole_executions(recipe, steps),
        runs.others,
        files.cluster,
        _relative(files.recipe or cluster.recipe_file or files.cluster),
        base.row,
        next((each.row for each in others if each.variant.alone), None),
        tuple(each for each in others if each.candidate),
    )


def _relative(path: Path) -> Path:
    """The path as the user would write it, if it is in the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _show_advice(advice: Advice, as_json: bool, output: Path | None) -> None:
    if output is not None:
        (output / "advice.json").write_text(json.dumps(advice.as_json(), indent=2) + "\n", encoding="utf-8")
        (output / "advice.md").write_text(advice.as_markdown(), encoding="utf-8")
    if as_json:
        console.write(json.dumps(advice.as_json(), indent=2))
        return
    warning = advice.warning()
    if warning:
        console.out.print(Text.assemble(("warning: ", "bold"), warning), soft_wrap=True)
    console.out.print(Text(f"{advice.title}\n{advice.machine}\n", style="bold"))
    _print_table(advice.table())
    console.out.print()
    for line in advice.lines():
        console.out.print(Text(line), soft_wrap=True)
    console.out.print()
    for note in advice.notes():
        console.out.print(Text(note, style="dim"))


class _TrainingFailed(Exception):
    """A training failed that may be impossible."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.headline)
        message = report.failures[0].message if report.failures else ""
        self.reason = (message or report.headline).partition("\n")[0]


class _Runs:
    """Runs trainings one after the other, each in a temporary folder.

    Args:
        steps: measured steps of each worker, rounded up to whole executions.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.others = 0.0
        """Largest share of the machine that other processes have used during a run."""

    def rate(self, variant: Variant, recipe: Recipe) -> Rate:
        """Trains a variant, and returns its rate; raises what `run` does."""
        with self.run(variant, recipe) as (run_dir, result):
            return read_rate(run_dir, result)

    def try_out(self, trial: Trial) -> str:
        """Measures a trial once more; returns the result in words.

        A candidate may fail; without the settings as they are, nothing can be compared.

        Raises:
            typer.Exit: see `run`.
        """
        try:
            with self.run(trial.variant, trial.recipe, may_fail=trial.candidate is not None) as (run_dir, result):
                trial.rates.append(read_rate(run_dir, result))
        except _TrainingFailed as failed:
            trial.error = failed.reason
            return f"failed: {trial.error}"
        return f"{trial.rates[-1].examples:,.0f} examples/s"

    @contextmanager
    def run(
        self, variant: Variant, recipe: Recipe, *, may_fail: bool = False
    ) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """Trains a variant; yields the run directory and the chief's result while the context is open.

        Raises:
            typer.Exit: the training failed or was stopped. The failure is printed, and its logs are kept.
            _TrainingFailed: it failed, and `may_fail` is set.

        The logs are also kept if the context ends with a `TfdistError`, as for a training that ended too early.
        """
        recipe = measured_recipe(recipe, variant, whole_executions(recipe, self._steps))
        folder = Path(tempfile.mkdtemp(prefix="tfdist-bench-"))
        kept = False
        try:
            before = Usage.now()
            job = Job(measured_cluster(variant.cluster), recipe, (), folder / "run")
            report, run_dir = launch_job(LocalLauncher(), job, job.rules(Timeouts(), max_restarts=0), quiet=True)
            self.others = max(self.others, before.others())
            if report.exit_code and may_fail and report.signum is None:
                raise _TrainingFailed(report)
            if report.exit_code:
                kept = bool(report.failures)  # the logs show the reason
                print_failure(report)
                raise typer.Exit(report.exit_code)
            yield run_dir, report.result
        except TfdistError:
            kept = True
            raise
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
    for table in results.tables():
        _print_table(table)
    for note in (*results.notes(), "Which settings would make it faster: tfdist bench --advise."):
        console.out.print(Text(note, style="dim"))


def _print_table(rows: list[list[str]]) -> None:
    heads, *others = rows
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in others:
        table.add_row(*row)
    console.out.print(table)


def _say(text: str) -> None:
    console.err.print(Text(text, style="dim"))
