"""`python -m benchmarks.gpu`: checks and measures tfdist on this machine's GPUs.

Each check runs in its own processes with a time limit, and reports its own failure; the others continue. Checks that
need more GPUs than there are are skipped. The exit code is 0 if no check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import ROOT
from benchmarks.command import end_on_sigterm, log
from tfdist_cli.bench.machine import describe
from tfdist_cli.plan.machine import Machine

TOLERANCE = 1e-4
"""The largest difference of a weight to the CPU's after 20 steps of SGD with float32 products (TF32 is off)."""
NARROW_TOLERANCE = 5e-3
"""The same if gradients cross as float16."""
MOST = 8
"""The most GPUs that one check uses."""
BATCH = 16
"""Examples in a replica's step of checks that compare weights."""
_GIB = 2**30


class Failed(Exception):
    """A check failed, or could not run."""


@dataclass(frozen=True)
class Gpus:
    """This machine's GPUs.

    Args:
        ids: their ids in CUDA_VISIBLE_DEVICES.
        names: TensorFlow's names of those that it sees.
        reason: why there are none; empty if there are some.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    reason: str = ""

    def visible(self, count: int) -> str:
        """Returns the value of CUDA_VISIBLE_DEVICES for the first `count` GPUs."""
        return ",".join(self.ids[:count]) or "-1"


@dataclass(frozen=True)
class Check:
    """One check or measurement.

    Args:
        name: its name.
        needs: the GPUs that it needs.
        run: runs it: an empty folder, a deadline → its results.
    """

    name: str
    needs: int
    run: Callable[[Path, float], dict[str, Any]]


@dataclass
class Result:
    """The result of a check.

    Args:
        name: the check's name.
        status: `ok`, `failed` or `skipped`.
        seconds: its duration.
        found: numbers by name.
        reason: why it failed or was skipped.
    """

    name: str
    status: str
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Training:
    """A training whose weights have to be those of one process on the CPU.

    Args:
        strategy: the strategy.
        replicas: the number of replicas.
        ps: the number of parameter servers, whose updates are synchronous.
        one_gpu: whether all workers use the first GPU, each a part of its memory.
        wire: the type in which gradients cross.
        model: the name of the model.
        jit: whether XLA compiles the step.
    """

    strategy: str
    replicas: int = 1
    ps: int = 0
    one_gpu: bool = False
    wire: str = "float32"
    model: str = "perceptron"
    jit: bool = False

    def work(self) -> dict[str, Any]:
        """Returns what a task's program does."""
        updates = {"mode": "sync"} if self.ps else {}
        return {**_train_work(self.model, BATCH), "updates": updates, "wire": self.wire, "jit": self.jit}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks; prints a table and writes JSON."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    gpus = find_gpus(arguments.timeout)
    wanted = arguments.only or []
    checks = [check for check in all_checks(gpus, arguments.steps) if not wanted or check.name in wanted]
    if unknown := set(wanted) - {check.name for check in checks}:
        log(f"no such check here: {', '.join(sorted(unknown))}")
        return 2
    about = {
        "machine": describe(),
        "gpus": list(gpus.names),
        "command": " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)]),
    }
    bounds = {"tolerance": TOLERANCE, "narrow_tolerance": NARROW_TOLERANCE}
    results: list[Result] = []
    for check in checks:
        results.append(carry_out(check, gpus, arguments.timeout))
        # After each check: a machine that is lent for some minutes may be taken back.
        report = {**about, **bounds, "checks": list(map(asdict, results))}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(render(about, gpus, results))
    log(f"written to {arguments.output}")
    return int(any(result.status == "failed" for result in results))


def all_checks(gpus: Gpus, steps: int) -> list[Check]:
    """Returns the checks for these GPUs. Without GPUs, the workers of some checks compute on the CPU."""
    count = min(len(gpus.names), MOST)
    some = max(2, count)
    on = 0 if not count else some
    mirrored = "multi_worker_mirrored"
    trainings = [
        *(
            (f"training on one GPU{title}", 1, Training("single", model=model, jit=jit))
            for title, model, jit in (
                ("", "perceptron", False),
                (", XLA", "perceptron", True),
                (": convolutions", "convolutions", False),
                (": convolutions, XLA", "convolutions", True),
                (": a transformer", "transformer", False),
                (": a transformer, XLA", "transformer", True),
            )
        ),
        ("training on all GPUs in one process", 2, Training("mirrored", some)),
        ("training by mirrored workers", on, Training(mirrored, some)),
        ("training by parameter servers", on, Training("parameter_server", some, ps=1)),
        ("training by parameter servers, one GPU for both", 1, Training("parameter_server", 2, ps=1, one_gpu=True)),
        ("training by mirrored workers, one GPU for both", 1, Training(mirrored, 2, one_gpu=True)),
        ("training with a float16 wire", 2, Training(mirrored, some, wire="float16")),
    ]
    return [
        Check("devices of mirrored workers", 2, partial(_devices, gpus, some, ps=False)),
        Check("devices of parameter servers", 2, partial(_devices, gpus, some, ps=True)),
        *(Check(name, needs, partial(_trains, gpus, training)) for name, needs, training in trainings),
        Check("memory: an amount", 1, partial(_memory, gpus, "1GiB")),
        Check("memory: a fraction", 1, partial(_memory, gpus, "0.1")),
        Check("memory: grow", 1, partial(_grow, gpus)),
        *(
            Check(f"rate of Keras's fit and of tfdist: {name}", 1, partial(_against_keras, gpus, work))
            for name, work in _contests(steps).items()
        ),
        Check("rate on all GPUs in one process", 2, partial(_scaling, gpus, steps, "mirrored", some)),
        Check("rate of mirrored workers", 2, partial(_scaling, gpus, steps, "multi_worker_mirrored", some)),
        Check("rate of parameter servers", 2, partial(_scaling, gpus, steps, "parameter_server", some)),
    ]


def carry_out(check: Check, gpus: Gpus, timeout: float) -> Result:
    """Runs one check; any error in it is its result."""
    if check.needs > len(gpus.names):
        there = gpus.reason or f"there {'is' if len(gpus.names) == 1 else 'are'} {len(gpus.names)}"
        needs = f"it needs {check.needs} GPU{'s' * (check.needs > 1)}"
        log(f"{check.name}: skipped, {needs}")
        return Result(check.name, "skipped", reason=f"{needs}; {there}")
    log(f"{check.name} ...")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tfdist-gpu-") as folder:
        try:
            result = Result(check.name, "ok", found=check.run(Path(folder), begun + timeout))
        except Failed as error:
            result = Result(check.name, "failed", reason=str(error))
        except Exception as error:  # noqa: BLE001 the machine is unknown: the other checks continue
            result = Result(check.name, "failed", reason=f"{type(error).__name__}: {error}")
    result.seconds = round(time.monotonic() - begun, 1)
    log(f"{check.name}: {result.status}, {result.reason or _figures(result)}")
    return result


def find_gpus(timeout: float) -> Gpus:
    """Returns the GPUs of this machine that TensorFlow sees."""
    ids = Machine.here().gpus
    program = (
        "import json, tensorflow as tf; print(json.dumps([tf.config.experimental.get_device_details(gpu)"
        ".get('device_name', gpu.name) for gpu in tf.config.list_physical_devices('GPU')]))"
    )
    try:
        lines = _run([sys.executable, "-c", program], os.environ, time.monotonic() + timeout).splitlines()
        names = tuple(json.loads(lines[-1]))
    except (Failed, IndexError, ValueError) as error:
        return Gpus((), (), f"TensorFlow could not list them: {error}")
    if not names:
        nodes = f"although there are {len(ids)} (run `tfdist doctor`)" if ids else "and there are no /dev/nvidia*"
        return Gpus(ids, (), f"TensorFlow sees none, {nodes}")
    if len(ids) < len(names):
        ids = tuple(map(str, range(len(names))))
    return Gpus(ids, names)


def render(about: Mapping[str, Any], gpus: Gpus, results: Sequence[Result]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        f"`{about['command']}`. {about['machine']}. GPUs: {', '.join(gpus.names) or f'none ({gpus.reason})'}.",
        "",
        "| check | result | figures | seconds |",
        "|---|---|---|---|",
    ]
    for result in results:
        figures = _figures(result)
        lines.append(f"| {result.name} | {result.status} | {figures.replace('|', '/')} | {result.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _figures(result: Result) -> str:
    """Returns a result's numbers, or its reason, in one line."""
    if result.reason:
        return result.reason.splitlines()[0]
    each = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in result.found.items()
    )
    return ", ".join(each)


def _devices(gpus: Gpus, count: int, folder: Path, deadline: float, *, ps: bool) -> dict[str, Any]:
    """Checks that each worker sees one GPU, which no other sees, and that chief and ps see none."""
    cluster = _workers(count, int(ps))
    tasks = sum(role.get("replicas", 1) for role in cluster["roles"].values())
    _launch(cluster, {"do": "devices", "tasks": tasks}, gpus.visible(count), folder, deadline)
    seen = {path.stem.replace("-", ":"): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    workers = {task: found for task, found in seen.items() if task.startswith("worker")}
    for task, found in seen.items():
        expected = 1 if task in workers else 0
        if len(found["gpus"]) != expected:
            raise Failed(f"{task} sees {len(found['gpus'])} GPUs instead of {expected}: {found['visible']!r}")
    visible = [found["visible"] for found in workers.values()]
    if len(set(visible)) != count:
        raise Failed(f"workers share GPUs: {visible}")
    return {task: found["visible"] for task, found in workers.items()}


def _trains(gpus: Gpus, training: Training, folder: Path, deadline: float) -> dict[str, Any]:
    """Compares the weights of a training on GPUs, or on the CPU if there are none, with one process on the CPU.

    Args:
        gpus: this machine's GPUs.
        training: the training.
        folder: an empty folder.
        deadline: when the check ends, in seconds of the monotonic clock.

    Raises:
        Failed: the weights differ, or no GPU was used.
    """
    replicas = training.replicas
    expected = _weights_on_cpu(training.model, BATCH * replicas, _within(folder, "cpu"), deadline)
    visible = gpus.visible(1 if training.one_gpu else replicas) if gpus.names else "-1"
    own = _within(folder, "own")
    if training.strategy == "single":
        _alone(training.work(), visible, own, deadline)
    elif training.strategy == "mirrored":
        _launch(_MIRRORED, training.work(), visible, own, deadline)
    else:
        cluster = _workers(replicas, training.ps, visible if training.one_gpu else "")
        _launch(cluster, training.work(), visible, own, deadline)
    difference = float(np.max(np.abs(expected - np.load(own / "weights.npy"))))
    devices = json.loads((own / "trained.json").read_text())["devices"]
    if gpus.names and not devices:
        raise Failed("the training used no GPU")
    tolerance = TOLERANCE if training.wire == "float32" else NARROW_TOLERANCE
    if not difference <= tolerance:  # also if it is not a number
        raise Failed(f"weights differ by {difference:.2g} from the CPU's, more than {tolerance:g}")
    return {"largest difference": difference, "devices": ", ".join(devices) or "CPU"}


_on_cpu: dict[tuple[str, int], np.ndarray] = {}


def _weights_on_cpu(model: str, batch: int, folder: Path, deadline: float) -> np.ndarray:
    """Returns the weights of one process on the CPU with a batch size, computed once."""
    key = (model, batch)
    if key not in _on_cpu:
        _alone(_train_work(model, batch), "-1", folder, deadline)
        _on_cpu[key] = np.load(folder / "weights.npy")
    return _on_cpu[key]


def _train_work(model: str, batch: int) -> dict[str, Any]:
    hidden = {"perceptron": 64, "convolutions": 8, "transformer": 32}[model]
    own = {"model": model, "hidden": hidden, "batch": batch}
    return {"do": "train", **own, "updates": {}, "wire": "float32", "jit": False}


def _memory(gpus: Gpus, setting: str, folder: Path, deadline: float) -> dict[str, Any]:
    """Checks that a task can allocate half of its limit of a GPU's memory, and not twice the limit."""
    limit = _GIB if setting.endswith("GiB") else int(float(setting) * _total_memory())
    work = {"do": "memory", "limit": limit}
    _alone(work, gpus.visible(1), folder, deadline, {"TFDIST_GPU_MEMORY": setting})
    found = json.loads((folder / "memory.json").read_text())
    if not found["within"]:
        raise Failed(f"half of {limit / _GIB:.1f} GiB could not be allocated: is the GPU in use?")
    if found["beyond"]:
        raise Failed(f"twice {limit / _GIB:.1f} GiB could be allocated")
    return {"limit in GiB": limit / _GIB}


def _grow(gpus: Gpus, folder: Path, deadline: float) -> dict[str, Any]:
    """Checks that with `grow` a task that needs little memory of a GPU allocates little."""
    before = _used_memory()
    environment = _environment(gpus.visible(1), {"TF_FORCE_GPU_ALLOW_GROWTH": "true"})
    process = _start(_argv({"do": "grow", "out": str(folder)}), environment)
    try:
        while not (folder / "ready.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed("the process did not start")
            time.sleep(0.1)
        taken = _used_memory() - before
        (folder / "looked").touch()
    finally:
        _end(process)
    if taken > _total_memory() / 4:
        raise Failed(f"{taken / _GIB:.1f} GiB were allocated for a tensor of 4 KiB")
    return {"taken in GiB": taken / _GIB}


def _contests(steps: int) -> dict[str, dict[str, Any]]:
    """Returns what is trained by Keras and by tfdist in turns, by name.

    XLA compiles neither. The exception is a row for Keras's own choice, which is XLA. With larger models its search for
    the fastest kernels takes minutes.
    """
    plain = {"jit": False}
    convolutions = {**plain, "model": "convolutions", "hidden": 64, "batch": 256, "steps": max(1, steps // 2)}
    transformer = {**plain, "model": "transformer", "hidden": 512, "batch": 64, "steps": max(1, steps // 10)}
    policies = ("float32", "mixed_bfloat16", "mixed_float16")
    return {
        "a perceptron, Keras with XLA": {"jit": "auto", "steps": steps},
        "a perceptron": {**plain, "steps": steps},
        **{f"convolutions, {policy}": {**convolutions, "policy": policy} for policy in policies[::2]},
        **{f"a transformer, {policy}": {**transformer, "policy": policy} for policy in policies},
    }


def _against_keras(gpus: Gpus, work: dict[str, Any], folder: Path, deadline: float) -> dict[str, Any]:
    """Measures the steps per second of both, in turns."""
    work = {**_rate_work(0), "do": "contest", "rounds": 3, "policy": "float32", **work}
    _alone(work, gpus.visible(1), folder, deadline)
    rates = json.loads((folder / "rates.json").read_text())
    per_second = {f"{by} steps/s": statistics.median(each) / work["batch"] for by, each in rates.items()}
    ratios = [own / kerass for own, kerass in zip(rates["tfdist"], rates["keras"], strict=True)]
    return {**per_second, "tfdist to Keras": statistics.median(ratios), "from": min(ratios), "to": max(ratios)}


def _scaling(gpus: Gpus, steps: int, strategy: str, count: int, folder: Path, deadline: float) -> dict[str, Any]:
    """Measures the examples per second on several GPUs and on one."""
    one, own = _within(folder, "one"), _within(folder, "own")
    _alone(_rate_work(steps), gpus.visible(1), one, deadline)
    work = _rate_work(steps)
    if strategy == "parameter_server":
        work["steps"] = steps * count  # a step is one worker's
        cluster = _workers(count, 1)
    else:
        work["batches_per_step"] = count
        cluster = _MIRRORED if strategy == "mirrored" else _workers(count, 0)
    _launch(cluster, work, gpus.visible(count), own, deadline)
    several, single = (json.loads((each / "rate.json").read_text())["examples_per_second"] for each in (own, one))
    return {"GPUs": count, "examples/s": several, "on one GPU": single, "times one GPU": several / single}


_RATE_BATCH = 256
_MIRRORED = {"strategy": "mirrored", "roles": {"chief": {"gpus": "all"}}}
"""One process with all GPUs."""


def _rate_work(steps: int) -> dict[str, Any]:
    return {
        "do": "rate",
        "model": "perceptron",
        "steps": steps,
        "batch": _RATE_BATCH,
        "hidden": 2048,
        "updates": {},
        "jit": False,
        "batches_per_step": 1,
    }


def _alone(
    work: dict[str, Any], visible: str, folder: Path, deadline: float, more: Mapping[str, str] | None = None
) -> None:
    """Runs the probe in one process without a cluster."""
    _run(_argv({**work, "out": str(folder)}), _environment(visible, more), deadline)


def _launch(cluster: Mapping[str, Any], work: dict[str, Any], visible: str, folder: Path, deadline: float) -> None:
    """Runs the probe in each task of a cluster that `tfdist launch` starts.

    Args:
        cluster: the keys of the cluster file.
        work: what the probe is to do.
        visible: the GPUs that the launcher sees.
        folder: an empty folder for results.
        deadline: when it ends, in seconds of the monotonic clock.

    Raises:
        Failed: a task failed, or did not exit in time.
    """
    file = _within(folder, "cluster") / "cluster.yaml"
    file.write_text(json.dumps({"name": "gpu-check", **cluster}), encoding="utf-8")
    launch = [sys.executable, "-m", "tfdist_cli", "launch", str(file), "--run-dir", str(file.parent / "run")]
    _run([*launch, "--", *_argv({**work, "out": str(folder)})], _environment(visible), deadline)


def _workers(count: int, ps: int, one_gpu: str = "") -> dict[str, Any]:
    """Returns the keys of a cluster of workers.

    Args:
        count: the number of workers.
        ps: the number of parameter servers; with none the workers are mirrored.
        one_gpu: the id of the GPU that all of them use; empty if each has its own.
    """
    worker: dict[str, Any] = {"replicas": count}
    if one_gpu:
        worker |= {"gpus": [int(one_gpu) if one_gpu.isdecimal() else one_gpu], "gpu_memory": "4GiB"}
    if ps:
        return {"strategy": "parameter_server", "roles": {"chief": {}, "ps": {"replicas": ps}, "worker": worker}}
    # NCCL refuses two tasks on one GPU.
    ring = {"communication": "ring"} if one_gpu else {}
    return {"strategy": "multi_worker_mirrored", "roles": {"worker": worker}, **ring}


def _argv(work: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.programs.gpu_probe", json.dumps(work)]


def _environment(visible: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "1"} | dict(more or {})


def _within(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def _run(argv: Sequence[str], environment: Mapping[str, str], deadline: float) -> str:
    """Runs a program and returns its output.

    Raises:
        Failed: it failed, or did not exit in time.
    """
    process = _start(argv, environment)
    try:
        printed, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise Failed("it did not exit in time (--timeout)") from None
    finally:
        _end(process)
    if process.returncode:
        last = "\n".join(errors.strip().splitlines()[-15:])
        code = process.returncode
        how = f"exit code {code}: {_last_error(errors)}" if code > 0 else f"killed by signal {-code}"
        raise Failed(f"{how}\n{last}")
    return printed


def _last_error(errors: str) -> str:
    """Returns the last line of a program's stderr that names an error."""
    lines = [line for line in errors.splitlines() if "Error" in line or "error" in line]
    return (lines or errors.strip().splitlines() or ["no output"])[-1].strip()


def _start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(argv),
        env=dict(environment),
        cwd=tempfile.gettempdir(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a program with SIGTERM, on which a launcher ends its tasks, or else with SIGKILL."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=40)
            return
        except subprocess.TimeoutExpired:
            continue


def _total_memory() -> int:
    """Returns the bytes of the first GPU's memory."""
    return _query_driver("memory.total")


def _used_memory() -> int:
    return _query_driver("memory.used")


def _query_driver(what: str) -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Failed("nvidia-smi, which reports a GPU's memory, was not found")
    first = Machine.here().gpus[:1]
    chosen = ["-i", first[0]] if first else []
    command = [program, *chosen, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    lines = _run(command, os.environ, time.monotonic() + 30).split()
    return int(lines[0]) * 2**20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", action="append", metavar="CHECK", help="run only this check; can be repeated")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a check may take (default: 300)")
    parser.add_argument("--steps", type=int, default=200, help="steps in an epoch that is timed (default: 200)")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu.json"), help="the file for the results as JSON (default: gpu.json)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
