"""Predicts the steps per second of a cluster from measured costs: a closed network of queues.

Each worker has one step under way. A step waits while the worker computes, and passes through the parts that all
workers share: the chief, which one thread of Python drives, and each ps. Exact mean value analysis (Reiser and
Lavenberg, 1980) gives the rate for any number of workers, with the queues in front of busy parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Costs:
    """What a training costs, measured by `python -m benchmarks.scale --measure`.

    Args:
        chief: processor milliseconds of the chief for each worker step.
        ps: processor milliseconds of all ps together for each worker step.
        ps_per_server: further ones for each ps that holds a part of the variables.
        worker: processor milliseconds of the worker for each step, beside its computation.
        worker_per_server: further ones for each ps.
        chief_idle: processor milliseconds per second of the chief for each worker, whether or not it takes steps.
        ps_idle: processor milliseconds per second of each ps, whether or not there are steps.
        worker_idle: those of each worker.
        launcher: processor milliseconds per second of the launcher for each task.
    """

    chief: float
    ps: float
    ps_per_server: float
    worker: float
    worker_per_server: float
    chief_idle: float
    ps_idle: float
    worker_idle: float
    launcher: float


@dataclass(frozen=True)
class Size:
    """A cluster and a training.

    Args:
        workers: the number of workers.
        ps: the number of ps.
        step_ms: milliseconds that a worker computes or waits in a step.
        megabytes: the size of the variables.
        cores: the cores that all tasks share; None if each task has a machine of its own.
        ps_cores: the cores of each ps.
        gigabits: the bandwidth of each ps's network in each direction; infinite on one machine.
    """

    workers: int
    ps: int = 1
    step_ms: float = 500.0
    megabytes: float = 1.0
    cores: float | None = None
    ps_cores: int = 4
    gigabits: float = float("inf")


@dataclass(frozen=True)
class Prediction:
    """What a cluster is predicted to do.

    Args:
        rate: steps per second of all workers together.
        efficiency: the part of the workers' time that they compute.
        used: the part of each shared part that is busy.
        saturated_at: the steps per second at which each part is busy all the time.
        workers_at: the workers whose steps alone, without queues, would keep each part busy all the time.
    """

    rate: float
    efficiency: float
    used: Mapping[str, float]
    saturated_at: Mapping[str, float]
    workers_at: Mapping[str, float]


def predict(size: Size, costs: Costs) -> Prediction:
    """The rate of a cluster, and what limits it."""
    stations = shared_cores(size, costs) if size.cores else separate_machines(size, costs)
    delay = size.step_ms + (0.0 if size.cores else worker_ms(size, costs))
    delay += sum(station.delay for station in stations)
    rate = throughput(size.workers, delay, [station.demand for station in stations])
    alone = delay + sum(station.demand for station in stations)
    busy = {station.name: station.demand for station in stations if station.demand}
    return Prediction(
        rate,
        efficiency=rate * size.step_ms / 1000 / size.workers,
        used={name: rate * demand / 1000 if rate else 1.0 for name, demand in busy.items()},
        saturated_at={name: 1000 / demand for name, demand in busy.items()},
        workers_at={name: alone / demand if rate else 0.0 for name, demand in busy.items()},
    )


@dataclass(frozen=True)
class Station:
    """A part through which each step passes.

    Args:
        name: the part.
        demand: milliseconds for which a step occupies it.
        delay: milliseconds that a step spends there without occupying it: with several cores, a step uses one of them,
            and occupies the part for a share of its time only (Seidmann's approximation).
    """

    name: str
    demand: float
    delay: float = 0.0


def separate_machines(size: Size, costs: Costs) -> list[Station]:
    """The shared parts where each task has its own machine."""
    demand = ps_ms(size, costs) / size.ps
    rest = 1.0 - costs.chief_idle * size.workers / 1000
    chief = Station("chief", costs.chief / rest if rest > 0 else float("inf"))
    # A step uses all ps at once, each for its part: one station stands for all of them.
    ps = Station("ps", demand / size.ps_cores, demand - demand / size.ps_cores)
    seconds = size.megabytes * 1e6 / size.ps / (size.gigabits * GIGABIT)
    return [chief, ps, Station("network of a ps", 1000 * seconds, 1000 * seconds)]


def shared_cores(size: Size, costs: Costs) -> list[Station]:
    """The cores of one machine, on which all tasks run."""
    cores = size.cores or 1
    free = cores - idle_cores(size, costs)
    demand = costs.chief + ps_ms(size, costs) + worker_ms(size, costs)
    busy = demand / free if free > 0 else float("inf")
    return [Station("cores", busy, max(0.0, demand - busy))]


def idle_cores(size: Size, costs: Costs) -> float:
    """The cores that the tasks and the launcher use without steps."""
    launcher = costs.launcher * (1 + size.ps + size.workers)
    return ((costs.chief_idle + costs.worker_idle) * size.workers + costs.ps_idle * size.ps + launcher) / 1000


def ps_ms(size: Size, costs: Costs) -> float:
    """Processor milliseconds of all ps together for a step."""
    return costs.ps + costs.ps_per_server * size.ps


def worker_ms(size: Size, costs: Costs) -> float:
    """Processor milliseconds of a worker for a step, beside its computation."""
    return costs.worker + costs.worker_per_server * size.ps


def throughput(customers: int, delay: float, demands: list[float]) -> float:
    """Steps per second of a closed network of queues, by exact mean value analysis.

    Args:
        customers: steps that are under way.
        delay: milliseconds of a step in which it waits for no shared part.
        demands: milliseconds for which a step occupies each shared part.
    """
    if any(demand == float("inf") for demand in demands):
        return 0.0
    queues = [0.0] * len(demands)
    rate = 0.0
    for number in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = number / (delay + sum(times))
        queues = [rate * time for time in times]
    return 1000 * rate
