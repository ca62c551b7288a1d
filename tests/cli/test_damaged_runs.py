"""Commands that show a run whose directory is damaged: one clear line or more, an exit code, and the other runs."""

import io
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_cli.__main__ import main
from tfdist_cli.cli import export
from tfdist_cli.cli.console import console
from tfdist_cli.errors import UsageError

TASKS = ("chief:0", "worker:0", "ps:0")
COMMANDS = (
    ("list",),
    ("list", "--json"),
    ("status", "RUN"),
    ("status", "RUN", "--json"),
    ("logs", "RUN"),
    ("stop", "RUN"),
    ("scale", "RUN", "worker=3"),
    ("export", "RUN"),
    ("report", "RUN", "--output", os.devnull),
)
FILES = (
    "plan.json",
    "events.jsonl",
    "metrics.jsonl",
    "resources.jsonl",
    "result.json",
    "launcher.lock",
    "recipe.yaml",
    "slurm_job",
    "checkpoints",
    "attempt_1/chief-0/stderr.log",
)
PLAIN_FILES = tuple(name for name in FILES if name != "checkpoints")
LINES: dict[str, list[dict[str, Any]]] = {
    "events.jsonl": [
        {"event": "launch"},
        {"event": "started", "task": "chief:0", "pid": 2**22 + 1},
        {"event": "state", "task": "chief:0", "state": "training"},
        {"event": "scale", "request": "r", "answer": "accepted", "replicas": {"worker": [1, 2]}},
        {"event": "scaled", "request": "r", "resumed": 5, "took": 3.0, "replicas": {"worker": [1, 2]}},
        {"event": "exited", "task": "chief:0", "status": "failed", "cause": "exit code 1"},
        {"event": "phase", "phase": "ended", "cause": ""},
    ],
    "metrics.jsonl": [{"split": "train", "step": 10, "epoch": 1, "epoch_done": True, "values": {"loss": 0.5}}],
    "resources.jsonl": [{"tasks": {"chief:0": {"cpu": 1.5, "memory": 3, "sent": 1, "gpus": {"0": [50, 7]}}}}],
}
STAMP = {"time": "2026-01-02T03:04:05+00:00", "seconds": 5.0, "attempt": 1}
OBJECTS = {
    "plan.json": {"name": "bad", "strategy": "single", "tasks": [{"task": task} for task in TASKS]},
    "result.json": {"exit_code": 1, "headline": "chief:0 failed", "signal": None, "checkpoints": [{"step": 5}]},
}


def whole_run(path):
    (path / "attempt_1/chief-0").mkdir(parents=True)
    (path / "attempt_1/chief-0/stderr.log").write_text("hello\n")
    (path / "checkpoints/step-00000010").mkdir(parents=True)
    (path / "recipe.yaml").write_text("module: digits\n")
    (path / "launcher.lock").write_text("")
    for name, value in OBJECTS.items():
        (path / name).write_text(json.dumps(value))
    for name, lines in LINES.items():
        (path / name).write_text("".join(f"{json.dumps(STAMP | line)}\n" for line in lines))


def tfdist(*arguments):
    """Runs a command as its own process would: its exit code, and what it prints, which has to be UTF-8.

    No Slurm is found by it: one that runs on this machine would be asked for jobs that damaged files name.
    """
    written = [io.BytesIO(), io.BytesIO()]
    out, err = (io.TextIOWrapper(each, encoding="utf-8", write_through=True) for each in written)
    console._console.cache_clear()
    before, argv = signal.getsignal(signal.SIGINT), sys.argv
    sys.argv = ["tfdist", *map(str, arguments)]
    try:
        no_slurm = patch.dict(os.environ, {"PATH": os.devnull})
        with no_slurm, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, before)
        console._console.cache_clear()
    return int(end.value.code or 0), written[0].getvalue().decode(), written[1].getvalue().decode()


@contextmanager
def runs(damage):
    """A folder of three runs, one of which is damaged."""
    with tempfile.TemporaryDirectory() as name:
        for run in ("before", "bad", "later"):
            whole_run(Path(name, run))
        damage(Path(name, "bad"))
        yield Path(name)


def check(parent, commands=COMMANDS):
    for command in commands:
        name, *rest = (str(parent / "bad") if word == "RUN" else word for word in command)
        code, out, err = tfdist(name, *([parent] if name == "list" else []), *rest)
        assert code in (0, 1, 2), (command, code, err)
        assert "Traceback" not in err
        if code:
            assert err.startswith(("error: ", "error[")), (command, err)
        if name == "list":
            assert code == 0
            assert "before" in out
            assert "later" in out
        elif code == 0:
            assert out or err or name == "logs", command
        if "--json" in command and code == 0:
            json.loads(out)


@pytest.fixture(autouse=True, scope="module")
def _without_tensorflow():
    """An export goes no further than to what it reads without TensorFlow."""

    def refuse():
        raise UsageError("there is no TensorFlow")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export, "require_tensorflow", refuse)
        yield


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def fifo(path):
    remove(path)
    os.mkfifo(path)


def folder(path):
    remove(path)
    path.mkdir()


def circle(path):
    remove(path)
    path.symlink_to(path)


def terminal(path):
    remove(path)
    path.symlink_to("/dev/zero")


def test_a_whole_run_is_shown():
    with runs(lambda run: None) as parent:
        check(parent)
        code, out, err = tfdist("status", parent / "bad")
        assert (code, err) == (0, "")
        assert "worker 1 → 2 after 5.0 s; " in out
        assert "from step 5 after 3.0 s" in out
        assert tfdist("list", parent)[1].count("chief:0 failed") == 3


@pytest.mark.rotates(5)
@pytest.mark.parametrize("damage", [fifo, folder, circle, terminal, remove])
@pytest.mark.parametrize("name", FILES)
def test_something_else_than_a_file(name, damage):
    with runs(lambda run: damage(run / name) if (run / name).exists() else None) as parent:
        check(parent)


DEEP = "[" * 100_000
NASTY = {
    "a bad time": STAMP | {"time": "2026-13-45T99:99:99"},
    "a time before all others": STAMP | {"time": "0001-01-01T00:00:00+14:00"},
    "a time without a zone": STAMP | {"time": "2026-01-02T03:04:05"},
    "seconds beyond all": STAMP | {"seconds": 10**400},
    "seconds that are none": STAMP | {"seconds": float("nan")},
    "no pid": STAMP | {"event": "started", "task": "chief:0"},
    "a negative pid": STAMP | {"event": "started", "task": "chief:0", "pid": -1},
    "a huge pid": STAMP | {"event": "started", "task": "chief:0", "pid": 2**40},
    "no phase": STAMP | {"event": "phase"},
    "no replicas": STAMP | {"event": "scale", "request": "s", "answer": "accepted"},
    "other replicas": STAMP | {"event": "scale", "request": "s", "answer": "accepted", "replicas": {"worker": [1]}},
    "took nothing": STAMP | {"event": "scaled", "request": "r", "took": "long", "resumed": []},
    "half a surrogate pair": STAMP | {"event": "state", "task": "chief:0", "state": "\ud800"},
}


@pytest.mark.parametrize("line", [pytest.param(value, id=name) for name, value in NASTY.items()])
@pytest.mark.parametrize("alone", [True, False])
def test_a_line_that_is_wrong(line, alone):
    def damage(run):
        with (run / "events.jsonl").open("w" if alone else "a") as file:
            file.write(json.dumps(line) + "\n")

    with runs(damage) as parent:
        check(parent)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("content", [DEEP, '{"tasks": ' + DEEP, '{"a":' * 90 + "1" + "}" * 90, "9" * 5000, "\xff"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_nested_or_no_json(name, content):
    def damage(run):
        if (run / name).is_file():
            (run / name).write_text(content + "\n", encoding="latin-1")

    with runs(damage) as parent:
        check(parent)


def test_names_that_are_none():
    def damage(run):
        (run / "attempt_1/chief-²").mkdir()
        (run / "attempt_1/chief-²/stdout.log").write_text("no")
        (run / "attempt_²/chief-0").mkdir(parents=True)
        (run / "attempt_99999999999999999999/chief-0").mkdir(parents=True)
        (run / os.fsdecode(b"attempt_1/chief-\xff")).mkdir()
        (run / "checkpoints/step-²").mkdir()
        shutil.copytree(run, os.fsdecode(bytes(run.parent) + b"/\xff"))

    with runs(damage) as parent:
        check(parent)
        assert "\\udcff" in tfdist("list", parent)[1]


def test_a_run_that_may_not_be_read_is_named(monkeypatch):
    """The tests may be root's, who may read all."""
    exists, opened = Path.exists, os.open

    def forbidden(path):
        if "/bad/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(Path, "exists", lambda path: forbidden(path) or exists(path))
    monkeypatch.setattr(os, "open", lambda path, *more, **keys: forbidden(path) or opened(path, *more, **keys))
    with runs(lambda run: None) as parent:
        code, out, err = tfdist("list", parent)
        assert (code, out.count("chief:0 failed")) == (0, 2)
        assert err.startswith("skipped: ")
        assert str(parent / "bad") in err
        assert "Permission denied" in err
        for run in ("before", "later"):
            shutil.rmtree(parent / run)
        code, out, err = tfdist("list", parent)
        assert "no runs in" not in err


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -1, 2**31, 2**63, 2**64]),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.sampled_from(["\ud800", "chief:0", "worker:0", "worker:²", "ended", "accepted", "9999-12-31T23:59:59-14:00"]),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KINDS = st.sampled_from(["launch", "started", "state", "exited", "phase", "scale", "scaled", "loss"])
KEYS = ("time", "seconds", "task", "pid", "state", "status", "cause", "phase", "request", "answer", "replicas",
        "resumed", "took", "split", "step", "values")  # fmt: skip
EVENTS = st.builds(
    lambda stamp, event, more: stamp | {"event": event} | more,
    st.sampled_from([STAMP, STAMP | {"task": "chief:0", "request": "r", "answer": "accepted", "split": "train"}]),
    KINDS,
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
)
OBJECT = st.dictionaries(
    st.sampled_from(["name", "strategy", "tasks", "exit_code", "headline", "signal", "checkpoints", "module", "train"]),
    VALUES | st.lists(st.fixed_dictionaries({"task": LEAVES}), max_size=2),
)
CONTENTS = st.one_of(
    st.lists(EVENTS, max_size=6).map(lambda events: "".join(json.dumps(event) + "\n" for event in events).encode()),
    OBJECT.map(lambda value: json.dumps(value).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from([name for name in FILES if name != "checkpoints"]), CONTENTS, min_size=1, max_size=3
    )
)
def test_files_of_any_content(contents):
    def damage(run):
        for name, content in contents.items():
            (run / name).write_bytes(content)

    with runs(damage) as parent:
        check(parent)
