"""Runs Keras's own tests of trainers and callbacks with tfdist in the place of `fit`, `evaluate` and `predict`.

    pip download --no-deps --no-binary keras keras==3.15.1
    python -m tests.compat.keras_suite keras-3.15.1.tar.gz

The archive holds Keras's tests, and has to have the version that is installed. The tests train in one process, under
tfdist's strategy `single`; each file has a process of its own, since some tests reset TensorFlow. Each test has passed,
was refused by an error of tfdist's with a code, or has failed. A failed test is repeated with Keras itself: where
these fail too, tfdist is not at fault. The exit status is 1 if a test has failed only with tfdist.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import pytest

from tfdist_cli.errors import TfdistError

ROOT = Path(__file__).parents[2]
FOLDERS = ("keras/src/trainers/", "keras/src/callbacks/")
METHODS = ("fit", "evaluate", "predict")
SECONDS = 600
"""A test that takes longer has failed."""
OF_KERASS_CODE = {
    "test_fit_sparse": "it looks into Keras's update of sparse gradients; tfdist updates with fused kernels",
    "test_retracing": "it counts how often Keras traces the step; tfdist traces each step of an execution",
    "test_evaluate_with_custom_compute_loss": "Keras traces no train step to evaluate; tfdist does",
    "test_steps_per_execution_steps_per_epoch_match_multi_epoch": "Keras rounds steps_per_epoch up to a multiple of "
    "steps_per_execution; tfdist takes exactly as many steps",
}
"""Tests of Keras's implementation, by the start of their names, and why they say nothing of another one."""
_MARKERS = ("requires_trainable_backend", "requires_tpu", "multi_device", "skip_if_backend")
_CONFTEST = """
import pytest


def skip_if_backend(backend, reason):
    return pytest.mark.skipif(backend == "tensorflow", reason=reason)
"""
"""Keras's archive does not have the module that some of its tests import under this name."""


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Args:
        test: its name.
        kind: `passed`, `refused`, `failed`, `skipped` or `of Keras's code`.
        reason: the code of a refusal, or the first line of an error.
        trains: whether it called one of the replaced methods.
    """

    test: str
    kind: str
    reason: str
    trains: bool


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Returns the kind of outcome and its reason for the error of a test; None if it has passed."""
    if error is None:
        return "passed", ""
    if isinstance(error, ImportError):  # Keras's tests need libraries that neither it nor tfdist does
        return "skipped", str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TfdistError):
            return "refused", str(cause.code)
        cause = cause.__cause__
    lines = str(error).strip().splitlines()
    return "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"


class Recorder:
    """A plugin of pytest that records the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.calls = 0
        self._calls_before = 0

    def pytest_configure(self, config):
        for marker in _MARKERS:
            config.addinivalue_line("markers", marker)

    def pytest_runtest_setup(self):
        self._calls_before = self.calls

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call" or call.excinfo is not None:
            kind, reason = outcome_of(call.excinfo.value if call.excinfo else None)
            if report.outcome == "skipped":
                kind, reason = "skipped", str(call.excinfo.value)
            own = next((why for name, why in OF_KERASS_CODE.items() if item.name.startswith(name)), None)
            if own and kind == "failed":
                kind, reason = "of Keras's code", own
            trains = self.calls > self._calls_before
            self.outcomes.setdefault(item.nodeid, Outcome(item.nodeid, kind, reason, trains))
        return report


def replace_methods(recorder, methods):
    """Puts tfdist's functions in the place of methods of Keras's models."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer  # noqa: PLC0415 imports TensorFlow

    import tfdist_cli as tfdist  # noqa: PLC0415 as above

    def begin(model):
        recorder.calls += 1
        model.run_eagerly = False  # tfdist refuses it; most tests that run eagerly expect what a function computes, too

    def fit(model, *args, **given):
        begin(model)
        return tfdist.fit(model, *args, **given)

    def evaluate(model, *args, **given):
        begin(model)
        return tfdist.evaluate(model, *args, **{"return_dict": False, **given})

    def predict(model, x, *args, **given):
        begin(model)
        x = (x,) if isinstance(x, tuple) else x  # a tuple is several inputs
        return tfdist.predict(model, x, *args, **given)

    for method in (fit, evaluate, predict):
        if method.__name__ in methods:
            setattr(TensorFlowTrainer, method.__name__, method)


def run_tests(folder, methods, names, result):
    """Runs tests in this process, and writes their outcomes."""
    recorder = Recorder()
    replace_methods(recorder, methods)
    if importlib.util.find_spec("jax") is None:  # a file of tests imports it, and uses it with its own backend only
        sys.modules["jax"] = types.ModuleType("jax")
    os.chdir(folder)
    pytest.main(
        [*names, f"--rootdir={folder}", "-c", os.devnull, "-o", "python_files=*_test.py", "-q", "--tb=short",
         "-p", "no:cacheprovider", "--import-mode=importlib", f"--timeout={SECONDS}", "--no-header", "-ra",
         "-o", "pythonpath=."],
        plugins=[recorder],
    )  # fmt: skip
    result.write_text(json.dumps([asdict(each) for each in recorder.outcomes.values()]))


def extract(archive, folder):
    """Writes the tests in Keras's archive into a folder, and returns Keras's version."""
    with tarfile.open(archive) as opened:
        for member in opened:
            path = member.name.partition("/")[2]
            if path.startswith(FOLDERS) and path.endswith("_test.py"):
                (folder / path.removeprefix("keras/src/").replace("/", "_")).write_bytes(
                    opened.extractfile(member).read()
                )
        root = opened.getnames()[0].split("/")[0]
        about = opened.extractfile(f"{root}/PKG-INFO").read().decode()
    (folder / "conftest.py").write_text(_CONFTEST)
    return re.search(r"^Version: (.+)$", about, re.MULTILINE).group(1)


def in_processes(folder, methods, names=()):
    """Runs tests, those of each file in a process; returns their outcomes by name, and what pytest has written."""
    files = collections.defaultdict(list)
    for name in names or sorted(each.name for each in folder.glob("*_test.py")):
        files[name.partition("::")[0]].append(name)
    result, outcomes, output = folder / "outcomes.json", {}, ""
    argv = [sys.executable, "-m", "tests.compat.keras_suite", "--in", str(folder), "--methods", ",".join(methods)]
    for own in files.values():
        ended = subprocess.run([*argv, *own], check=False, capture_output=True, text=True, cwd=ROOT)
        output += ended.stdout
        if not result.exists():
            raise SystemExit(f"{own[0]} did not run to its end:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
        outcomes |= {each["test"]: Outcome(**each) for each in json.loads(result.read_text())}
        result.unlink()
    return outcomes, output


def report(outcomes):
    """Prints the numbers, and each test that was refused or has failed. Returns whether none has failed."""
    kinds = ("passed", "refused", "failed", "of Keras's code", "fails with Keras", "skipped")
    print(f"{'':44}" + "".join(f"{kind:>18}" for kind in kinds))
    parts = {
        "trainers, calling tfdist": lambda each: each.test.startswith("trainers") and each.trains,
        "callbacks, calling tfdist": lambda each: each.test.startswith("callbacks") and each.trains,
        "not calling tfdist": lambda each: not each.trains,
    }
    for name, belongs in parts.items():
        counts = collections.Counter(each.kind for each in outcomes if belongs(each))
        print(f"{name:44}" + "".join(f"{counts[kind]:18}" for kind in kinds))
    for kind in kinds[1:]:
        by_reason = collections.defaultdict(list)
        for each in outcomes:
            if each.kind == kind:
                by_reason[each.reason].append(each.test.partition("::")[2] or each.test)
        for reason, tests in sorted(by_reason.items()):
            print(f"\n{kind}: {reason} ({len(tests)})")
            if kind != "skipped":
                print("".join(f"    {test}\n" for test in tests), end="")
    return not any(each.kind == "failed" for each in outcomes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, help="keras-VERSION.tar.gz, or names of tests with --in")
    parser.add_argument("names", nargs="*", help="only these tests, FILE or FILE::CLASS::TEST")
    parser.add_argument("--methods", default=",".join(METHODS), help="the methods to replace")
    parser.add_argument("--output", type=Path, help="where pytest's output is written")
    given = parser.parse_args()
    methods = [each for each in given.methods.split(",") if each]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        version, installed = extract(given.archive, folder), metadata.version("keras")
        if version != installed:
            raise SystemExit(f"these are the tests of Keras {version}, and Keras {installed} is installed")
        outcomes, output = in_processes(folder, methods, given.names)
        if given.output:
            given.output.write_text(output)
        if failed := [test for test, each in outcomes.items() if each.kind == "failed"]:
            for test, plain in in_processes(folder, [], failed)[0].items():
                if plain.kind == "failed":
                    outcomes[test] = Outcome(test, "fails with Keras", plain.reason, trains=outcomes[test].trains)
    return 0 if report(list(outcomes.values())) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        _, _, where, _, replaced, *chosen = sys.argv
        run_tests(Path(where), [each for each in replaced.split(",") if each], chosen, Path(where, "outcomes.json"))
    else:
        sys.exit(main())
