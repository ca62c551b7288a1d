"""What is printed at the end of a launch."""

from pathlib import Path

import pytest

from tfdist_cli.cli.console.summary import _facts, print_failure, print_report
from tfdist_cli.launch.run.report import Failure, Report, TaskExit
from tfdist_cli.launch.run.snapshot import WorkerFigures
from tfdist_cli.launch.supervisor.events import ResizeAccepted
from tfdist_cli.launch.supervisor.state import Resize, Status
from tfdist_cli.spec.task_id import TaskId


def failure(index, *, message="", what="exit code 1", lines=(), traceback="", hint=""):
    log = Path("/runs/x/stderr.log")
    return Failure(TaskId("worker", index), 2.0, what, message, hint, traceback, lines, log)


def failed(*failures, **fields):
    ends = tuple(TaskExit(each.task, Status.FAILED, each.reason, 1, 2.0) for each in failures)
    return Report(1, failures[0].summary, failures, ends, 3.0, **fields)


def test_a_mistake_that_says_what_to_do_needs_no_lines(capsys):
    print_failure(failed(failure(0, message="UsageError: no such split", hint="use train", lines=("noise",))))
    assert capsys.readouterr().err.splitlines() == [
        "error: worker:0 failed after 2.0 s, exit code 1: UsageError: no such split",
        "hint: use train",
        "log: /runs/x/stderr.log",
    ]


def test_the_last_lines_of_one_that_said_nothing(capsys):
    print_failure(failed(failure(0, lines=("[red]a", "\x1b[2Jb"))))
    assert capsys.readouterr().err.splitlines()[1:3] == ["  [red]a", "  b"]


def test_consequences_are_short_and_few(capsys):
    after = [failure(index, lines=("x" * 500,)) for index in range(1, 31)]
    print_failure(failed(failure(0, message="Lost: a\nb"), *after, warnings=("the disk is full",)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0:3] == ["error: worker:0 failed after 2.0 s, exit code 1: Lost: a", "b", "log: /runs/x/stderr.log"]
    assert lines[3] == f'then: worker:1 failed after 2.0 s, exit code 1: "{"x" * 100}"'
    assert lines[-2:] == ["then: 20 more tasks failed", "warning: the disk is full"]
    assert len(lines) == 15


def test_a_consequence_shows_the_error_and_not_the_hint_after_it(capsys):
    print_failure(failed(failure(0, message="Lost: a"), failure(1, lines=("it is lost", "hint: look elsewhere"))))
    assert capsys.readouterr().err.splitlines()[-1].endswith('"it is lost"')


@pytest.mark.parametrize("code", [0, 1])
def test_what_came_of_the_run(capsys, code):
    workers = [TaskExit(TaskId("worker", index), Status.STOPPED, "ended by the launcher", -15, 2.0) for index in (0, 1)]
    report = Report(
        code,
        "",
        (),
        (TaskExit(TaskId("chief"), Status.DONE, "exit code 0", 0, 61.0), *workers),
        3723.0,
        {"step": 20, "examples": 640, "seconds": 1.5, "metrics": {"loss": 0.123456}},
        {"step": 20, "metrics": {"loss": 0.5}},
        {"/c/10": 10, "/c/20": 20},
        ("/x/saved_model",),
    )
    print_report(report, Path("/runs/x"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "chief:0     done                   1:01",
        "worker:0-1  ended by the launcher  2.0 s",
        "training    to step 20, 640 examples in 1.5 s",
        "metrics     loss 0.1235",
        "evaluation  loss 0.5  at step 20",
        "checkpoint  /c/20  at step 20",
        "export      /x/saved_model",
        "run         /runs/x",
        *(["resume      launch again with --run-dir /runs/x"] if code else []),
        "time        1:02:03",
    ]


@pytest.mark.parametrize(("first", "said"), [(0, "to step 20, "), (12, "from step 12 to step 20, ")])
def test_a_training_that_resumed_says_where(first, said):
    result = {"first": first, "step": 20, "examples": 640, "seconds": 1.5}
    facts = dict(_facts(Report(0, "", (), (), 3.0, result), Path("/runs/x")))
    assert facts["training"].startswith(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "; no step after that"),
        ({"trained_at": 9.0}, "from the beginning after 7.0 s"),
        ({"trained_at": 9.0, "resumed": 40}, "from step 40 after 7.0 s"),
    ],
)
def test_other_numbers_of_tasks(capsys, fields, said):
    resize = Resize(ResizeAccepted("a", {"worker": (1, 3), "ps": (2, 1)}, ()), 2.0, 1, **fields)
    print_failure(Report(0, "", (), (), 3.0, resizes=(resize,)))
    printed = capsys.readouterr().err
    assert printed.startswith("scaled: worker 1 → 3, ps 2 → 1 after 2.0 s")
    assert printed.endswith(f"{said}\n")


def workers_printed(capsys, *workers):
    figures = {f"worker:{index}": WorkerFigures(*each) for index, each in enumerate(workers)}
    print_report(Report(0, "", (), (), 3.0, workers=figures), Path("/runs/x"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    return lines[: lines.index("run         /runs/x")]


def test_each_worker_of_different_speeds(capsys):
    assert workers_printed(capsys, (1200, 9600, 61.25), (600, 4800, None)) == [
        "workers     worker:0  1,200 steps, 61.2 steps/s, 67% of the examples",
        "            worker:1  600 steps, 33% of the examples",
    ]


def test_many_workers_in_one_line(capsys):
    assert workers_printed(capsys, *[(100 + index, 1000, 2.0 + index) for index in range(10)]) == [
        "workers     10, each 100 to 109 steps, 2.0 to 11.0 steps/s, 10% of the examples"
    ]


def test_one_worker_needs_no_line(capsys):
    assert workers_printed(capsys, (100, 1000, 2.0)) == []
