"""`python -m benchmarks.gpu`: skipped checks, failures, and the checks on a machine without GPUs."""

import json
import re
import signal
import sys
import time

import pytest

from benchmarks import gpu
from benchmarks.gpu import Check, Failed, Gpus, Result

NONE = Gpus((), (), "TensorFlow sees none")
TWO = Gpus(("3", "5"), ("A", "B"))


def carried_out(run, gpus=TWO, needs=1):
    return gpu.carry_out(Check("it", needs, run), gpus, 10.0)


def failing(error):
    def run(folder, deadline):
        raise error

    return run


def test_a_check_that_needs_more_gpus_is_skipped():
    result = carried_out(failing(AssertionError("never run")), NONE)
    assert result.status == "skipped"
    assert NONE.reason in result.reason
    assert re.findall(r"\d+", carried_out(failing(AssertionError("never run")), TWO, 3).reason) == ["3", "2"]


@pytest.mark.parametrize("error", [Failed("weights differ"), ValueError("something else")])
def test_any_error_is_a_failure_of_the_check(error):
    result = carried_out(failing(error))
    assert result.status == "failed"
    assert str(error) in result.reason


def test_a_check_has_its_folder_and_its_deadline():
    def run(folder, deadline):
        assert folder.is_dir()
        return {"left": deadline - time.monotonic()}

    assert 0 < carried_out(run).found["left"] <= 10


def test_a_program_that_fails_is_named_by_its_error():
    argv = [sys.executable, "-c", "raise ValueError('no such thing')"]
    with pytest.raises(Failed, match=r"1: ValueError: no such thing"):
        gpu._run(argv, {}, time.monotonic() + 60)


def test_a_program_that_crashes_is_named_by_its_signal():
    argv = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    with pytest.raises(Failed, match=r"signal 11"):
        gpu._run(argv, {}, time.monotonic() + 60)


@pytest.mark.slow
def test_a_program_that_does_not_exit_is_killed():
    with pytest.raises(Failed, match="in time"):
        gpu._run([sys.executable, "-c", "import signal; signal.pause()"], {}, time.monotonic())


def test_tasks_that_see_the_same_gpu_fail(monkeypatch, tmp_path):
    def launch(cluster, work, visible, folder, deadline):
        for task in ("worker-0", "worker-1"):
            (folder / f"{task}.json").write_text(json.dumps({"visible": "3", "gpus": ["A"]}))

    monkeypatch.setattr(gpu, "_launch", launch)
    with pytest.raises(Failed, match="share GPUs"):
        gpu._devices(TWO, 2, tmp_path, 0.0, ps=False)


def cells(table, name):
    """The cells of a check's line in a Markdown table."""
    [line] = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_line_for_each_check():
    about = {"command": "python -m benchmarks.gpu", "machine": "2 cores"}
    results = [Result("rate", "ok", 3.2, {"times one GPU": 1.8765}), Result("memory", "failed", reason="a | b\nmore")]
    table = gpu.render(about, TWO, results)
    assert cells(table, "rate") == ["rate", "ok", "times one GPU 1.877", "3"]
    assert cells(table, "memory") == ["memory", "failed", "a / b", "0"]
    assert "GPUs: A, B." in table


def test_checks_use_no_more_gpus_than_there_are():
    many = Gpus(tuple(map(str, range(16))), ("A",) * 16)
    for gpus in (NONE, Gpus(("0",), ("A",)), TWO, many):
        needs = [check.needs for check in gpu.all_checks(gpus, 10)]
        assert max(needs) <= max(2, min(len(gpus.names), gpu.MOST))


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Runs the command with some arguments, and returns the checks that it has written, by name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own process keeps its handlers

    def run(*arguments):
        output = tmp_path / "gpu.json"
        assert gpu.main(["--output", str(output), *arguments]) == 0
        return {check["name"]: check for check in json.loads(output.read_text())["checks"]}

    return run


def test_without_gpus_it_lists_what_it_skipped(written, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_gpus", lambda timeout: NONE)
    monkeypatch.setattr(gpu, "_trains", lambda *_, **__: {"largest difference": 0.0})
    checks = written()
    done = {name for name, check in checks.items() if check["status"] == "ok"}
    assert done == set(ON_CPU)
    assert all(check["status"] == "skipped" and check["reason"] for name, check in checks.items() if name not in done)
    assert cells(capsys.readouterr().out, "training on one GPU")[1] == "skipped"


ON_CPU = "training by mirrored workers", "training by parameter servers"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rotates(5, day)) for day, name in enumerate(ON_CPU)]
)
def test_without_gpus_it_compares_clusters_on_the_cpu(name, written):
    [check] = written("--only", name).values()
    assert check["status"] == "ok"
    assert check["found"]["largest difference"] <= gpu.TOLERANCE
