"""`python -m benchmarks.links`: training on hosts with slow links, or links with a long delay.

The hosts are network namespaces of this machine, those of the tests; tasks start over ssh. Needs root on Linux, `ip`,
`tc` and `sshd`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import log
from tests.support.lab.hosts import Host, Lab, ip, make_hosts, missing

RECIPE = """
import keras
import numpy as np
import tensorflow as tf


def model(params):
    if params["model"] == "mlp":
        layers = [keras.Input((784,)), keras.layers.Dense(500, "relu"), keras.layers.Dense(500, "relu")]
        optimizer = keras.optimizers.Adam()
    else:
        layers = [keras.Input((16,), dtype="int32"), keras.layers.Embedding(1_000_000, 32), keras.layers.Flatten()]
        optimizer = keras.optimizers.Adagrad()
    network = keras.Sequential([*layers, keras.layers.Dense(10)])
    network.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return network


def dataset(params, split, shard):
    chance = np.random.default_rng(shard.index)
    labels = chance.integers(10, size=6400)
    if params["model"] == "mlp":
        inputs = chance.normal(size=(6400, 784)).astype("float32")
    else:
        inputs = chance.integers(1_000_000, size=(6400, 16), dtype="int32")
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).cache()
"""
RECIPE_YAML = """
module: slow_links
params: {model: mlp}
train: {epochs: 2, share: copy}
evaluate: null
"""
CLUSTER = """
name: links
strategy: parameter_server
launcher: ssh
ssh: {config: %s, python: %s, shared: true}
roles: {chief: {}, ps: {replicas: 2}, worker: {replicas: 2}}
hosts: [%s]
recipe: recipe.yaml
"""
BATCH_SIZES = {"mlp": 64, "embedding": 256}
SETTINGS: dict[str, dict[str, object]] = {
    "default": {},
    "wire: float16": {"wire": "float16"},
    "push_every: 10": {"updates.push_every": 10},
    "both": {"wire": "float16", "updates.push_every": 10},
}
LINKS = ("none", "10 ms each way", "100 Mbit/s")
PUMP = """
import collections, fcntl, os, select, struct, sys, time

there, delay = int(sys.argv[1]), float(sys.argv[2])
here = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(here, 0x400454CA, struct.pack("16sH", b"eth0", 0x1002))  # TUNSETIFF: IFF_TAP, IFF_NO_PI
print("made", flush=True)
sys.stdin.readline()  # the device has an address, and is up
other = {here: there, there: here}
queued = {side: collections.deque() for side in other}
for side in other:
    os.set_blocking(side, False)
while True:
    due = [frames[0][0] for frames in queued.values() if frames]
    wait = max(0.0, min(due) - time.monotonic()) if due else None
    for side in select.select([here, there], [], [], wait)[0]:
        try:
            while True:
                queued[other[side]].append((time.monotonic() + delay, os.read(side, 65536)))
        except BlockingIOError:
            pass
    for side, frames in queued.items():
        while frames and frames[0][0] <= time.monotonic():
            try:
                os.write(side, frames.popleft()[1])
            except BlockingIOError:
                pass  # a full device drops frames
"""
"""Forwards frames between a host's `eth0`, which it creates, and a device here, with a delay."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Args:
        model: `mlp` or `embedding`.
        link: one of `LINKS`.
        setting: one of `SETTINGS`.
    """

    model: str
    link: str
    setting: str


def main() -> None:
    """Measures, and prints a table of steps per second, also relative to an unlimited link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--steps",
        type=int,
        default=60,
        help="measured steps of all workers; ten times as many on an unlimited link",
    )
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    cases = [
        Case(model, link, setting)
        for link in LINKS
        for model in BATCH_SIZES
        for setting in (SETTINGS if link != "none" else ["default"])
    ]
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for link in LINKS:
            with tempfile.TemporaryDirectory(prefix="tfdist-links-") as folder, _hosts(Path(folder), link) as lab:
                for case in cases:
                    if case.link == link:
                        steps = options.steps * (10 if link == "none" else 1)
                        rates[case].append(_rate(lab, Path(folder), case, steps))
                        log(f"{case}: {rates[case][-1]:.1f} steps/s")
    print("| model | link | setting | steps/s | relative to no limit |\n|---|---|---|---|---|")
    for case, found in rates.items():
        rate = statistics.median(found)
        whole = statistics.median(rates[Case(case.model, "none", "default")])
        print(f"| {case.model} | {case.link} | {case.setting} | {rate:.1f} | {rate / whole:.2f} |")


@contextmanager
def _hosts(folder: Path, link: str) -> Iterator[Lab]:
    with make_hosts(folder, 4) as lab, ExitStack() as stack:
        for host in lab.hosts:
            if link == "100 Mbit/s":
                limit = ["root", "tbf", "rate", "100mbit", "burst", "128kb", "latency", "400ms"]
                subprocess.run(["tc", "qdisc", "add", "dev", host.link, *limit], check=True)
                subprocess.run(["tc", "-n", host.name, "qdisc", "add", "dev", "eth0", *limit], check=True)
            elif link == "10 ms each way":
                stack.enter_context(_delayed(host, 0.005))  # half of the delay between two hosts
        yield lab


@contextmanager
def _delayed(host: Host, seconds: float) -> Iterator[None]:
    """Replaces a host's link by one with a delay."""
    bridge = json.loads(subprocess.check_output(["ip", "-json", "link", "show", host.link]))[0]["master"]
    ip("link", "delete", host.link)
    ip("tuntap", "add", host.link, "mode", "tap")
    ip("link", "set", host.link, "master", bridge, "up")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH", host.link.encode(), 0x1002))
    command = ["ip", "netns", "exec", host.name, sys.executable, "-c", PUMP, str(device), str(seconds)]
    pump = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[device], text=True)
    try:
        if pump.stdin is None or pump.stdout is None or not pump.stdout.readline():
            raise RuntimeError("the cable could not be made")
        ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        ip("-n", host.name, "link", "set", "eth0", "up")
        print("up", file=pump.stdin, flush=True)
        yield
    finally:
        pump.kill()
        pump.wait()
        os.close(device)


def _rate(lab: Lab, folder: Path, case: Case, steps: int) -> float:
    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "slow_links.py").write_text(RECIPE, encoding="utf-8")
    (project / "recipe.yaml").write_text(RECIPE_YAML, encoding="utf-8")
    hosts = ", ".join(host.name for host in lab.hosts)
    (project / "cluster.yaml").write_text(CLUSTER % (lab.config, sys.executable, hosts), encoding="utf-8")
    run = project / f"run-{len(list(project.glob('run-*')))}"
    settings = {"params.model": case.model, "train.batch_size": BATCH_SIZES[case.model], **SETTINGS[case.setting]}
    settings |= {"train.steps_per_epoch": steps}
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tfdist_cli", "launch", "cluster.yaml", "--run-dir", run.name, *given]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float([line["steps_per_second"] for line in lines if line["split"] == "train" and line["epoch_done"]][-1])


if __name__ == "__main__":
    main()
