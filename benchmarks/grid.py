"""The contests: a grid of models, placements and peers, and a few beside it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster import CLUSTER_THREADS, ROOT
from benchmarks.sizes import SIZES, Size
from benchmarks.workload import Workload
from tfdist_cli.bench.machine import onednn_by_default

TORCH_PYTHON = "TFDIST_BENCHMARK_TORCH_PYTHON"
"""The variable with the interpreter that has PyTorch, if it is not installed beside TensorFlow."""
WORKERS = 2
STAGED = ("mlp_deep", "mlp_deep_1024", "mlp_deep_4096", "transformer_64", "cnn_1024")
"""Models whose layers are divided into stages; they are in no other contest."""
SYNC = {"mode": "sync"}


@dataclass(frozen=True)
class Side:
    """A program in a contest.

    Args:
        name: its name in the table.
        program: its module.
        roles: tasks of each role; none is one process.
        work: what it trains.
        batches: batches of the model's size in one of its steps, where the sides differ in it.
        python: the environment variable with the interpreter that has its packages.
        checkout: the checkout whose `tfdist_cli` it uses.
        bound: whether each worker stays on its own cores.
    """

    name: str
    program: str
    roles: Mapping[str, int]
    work: Workload
    batches: int = 1
    python: str | None = None
    checkout: Path = ROOT
    bound: bool = False

    @property
    def mirrored(self) -> bool:
        """Whether its workers watch one another."""
        return "worker" in self.roles and "chief" not in self.roles

    @property
    def settings(self) -> str:
        """Its settings, for the table."""
        work = self.work
        many = {"worker": "workers"}
        counts = [f"{count} {many.get(role, role) if count > 1 else role}" for role, count in self.roles.items()]
        tasks = ", ".join(counts) or "1 process, both cores"
        parts = [tasks, f"batch {work.batch_size}"]
        if self.program == PROGRAMS["torch"]:
            parts.append("fp16 hook" if work.wire == "float16" else "float32")
        else:
            parts += [f"{work.steps_per_execution} steps an execution", *_spoken(work)]
        return "; ".join(parts)


def _spoken(work: Workload) -> list[str]:
    updates = ", ".join(f"{key}: {value}" for key, value in work.updates.items())
    spread = [] if work.spread is None else [f"`shard: {{min_bytes: {work.spread}}}`"]
    jit = ["XLA"] if work.jit else []
    micro = [f"`micro_batches: {work.micro_batches}`"] if work.micro_batches > 1 else []
    micro += [f"`balance: {work.balance}`"] if work.balance else []
    kernels = "oneDNN" if work.onednn else "Eigen"
    return [work.wire, *micro, *([f"`updates: {{{updates}}}`"] if updates else []), *spread, *jit, kernels]


PROGRAMS = {name: f"benchmarks.programs.{name}" for name in ("tfdist_fit", "tf_keras_fit", "keras_fit")}
PROGRAMS["torch"] = "benchmarks.programs.torch_ddp"
PROGRAMS["parts"] = "benchmarks.programs.part_updates"
THREADS = "; ".join(f"`{name}={value}`" for name, value in CLUSTER_THREADS.items())
"""What every task of a cluster has, of all programs."""


@dataclass(frozen=True)
class Contest:
    """tfdist and a peer, which train the same model.

    Args:
        name: `model:placement:peer`.
        ours: tfdist.
        peer: the program that it is compared with.
        title: of the row.
    """

    name: str
    title: str
    ours: Side
    peer: Side

    @property
    def row(self) -> str:
        """What all contests of the same training of tfdist have in common, whichever the peer."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True)
class Placement:
    """A kind of cluster.

    Args:
        title: its name in the table.
        peers: the names of those that can do the same.
        ps: whether it has parameter servers.
        workers: the number of workers; none for one process.
        together: whether a step is one batch of each worker.
        updates: tfdist's rule of updates.
    """

    title: str
    peers: tuple[str, ...]
    ps: bool = False
    workers: int = WORKERS
    together: bool = True
    updates: Mapping[str, Any] = field(default_factory=dict)


PLACEMENTS = {
    "ps_async": Placement("ps, asynchronous", ("tf_keras", "keras"), ps=True, together=False),
    # Of the peers, none has synchronous parameter servers: their own synchronous training takes the place.
    "ps_sync": Placement("ps, synchronous", ("tf_keras", "torch", "keras"), ps=True, updates=SYNC),
    "mirrored": Placement("mirrored", ("tf_keras", "torch", "torch_fp16", "keras")),
    "single": Placement("one process", ("keras",), workers=0, together=False),
}


FASTER_WITH_XLA = frozenset(
    {
        "mlp:single",
        "mlp:keras_64",
        "mlp:keras_128",
        "mlp_large:single",
        "mlp_large:keras_256",
        "mlp_large:keras_512",
    }
)
"""The sides of the grid that train faster with XLA (see `tuning`): `model:placement` of tfdist, `model:keras_batch`."""
FASTER_WITH_XLA_WITHOUT_AVX512 = frozenset(
    {"mlp:mirrored", "mlp_large:ps_async", "mlp_large:ps_sync", "mlp_large:mirrored"}
)
"""Those that do where TensorFlow does not use oneDNN by default: with AVX-512, its kernels are faster than XLA's."""
FASTER_WITH_EIGEN = ("two_tower:*", "wide_deep:ps_*", "wide_deep:single", "mlp_large:keras_*")
"""Patterns of those that train faster without oneDNN. tf_keras is `model:tf_keras`."""


def _xla(side: str) -> bool:
    return side in FASTER_WITH_XLA or (side in FASTER_WITH_XLA_WITHOUT_AVX512 and not onednn_by_default())


def _onednn(side: str) -> bool:
    return not any(fnmatch.fnmatch(side, pattern) for pattern in FASTER_WITH_EIGEN)


def _work(key: str, placement: Placement, **changes: Any) -> Workload:
    """Returns what a worker of a placement trains."""
    size = SIZES[key]
    # Asynchronous workers share the steps of an epoch.
    steps = size.steps * (1 if placement.together else max(1, placement.workers))
    work = Workload(key, size.batch, steps, size.steps_per_execution, updates=dict(placement.updates))
    return replace(work, **changes)


def _roles(size: Size, placement: Placement) -> dict[str, int]:
    if not placement.workers:
        return {}
    servers = {"chief": 1, "ps": size.ps} if placement.ps else {}
    return {**servers, "worker": placement.workers}


def _ours(key: str, name: str, **changes: Any) -> Side:
    """Returns tfdist on a placement."""
    placement = PLACEMENTS[name]
    faster = {"jit": _xla(f"{key}:{name}"), "onednn": _onednn(f"{key}:{name}")}
    work = _work(key, placement, **{**faster, **changes})
    return Side("`tfdist.fit`", PROGRAMS["tfdist_fit"], _roles(SIZES[key], placement), work, bound=placement.ps)


def _peer(name: str, key: str, placement: Placement) -> Side:
    """Returns a peer: on the same tasks, as synchronous workers, or in one process with as many examples in a step."""
    size = SIZES[key]
    work = replace(_work(key, placement), updates={})
    if name == "keras":
        batch = size.batch * (placement.workers if placement.together else 1)
        side = f"{key}:keras_{batch}"
        alone = replace(work, batch_size=batch, jit=_xla(side), onednn=_onednn(side))
        return Side("Keras 3 `Model.fit`, one process", PROGRAMS["keras_fit"], {}, alone)
    if name == "tf_keras":
        roles = _roles(size, placement) if not placement.together else {"worker": placement.workers}
        work = replace(work, onednn=_onednn(f"{key}:tf_keras"))
        return Side("tf_keras `Model.fit`", PROGRAMS["tf_keras_fit"], roles, work, bound="ps" in roles)
    work = replace(work, wire="float16" if name == "torch_fp16" else "float32")
    roles = {"worker": placement.workers}
    return Side("PyTorch DDP, gloo", PROGRAMS["torch"], roles, work, python=TORCH_PYTHON, bound=True)


def _grid() -> dict[str, Contest]:
    contests = {}
    for key, size in SIZES.items():
        if size.kind == "table" or key in STAGED:
            continue
        for name, placement in PLACEMENTS.items():
            for peer in placement.peers:
                if peer == "torch_fp16" and size.sparse:
                    continue  # gloo sums no sparse gradients in float16
                wire = {"wire": "float16"} if peer == "torch_fp16" else {}
                title = f"{size.title}: {placement.title}"
                full = f"{key}:{name}:{peer}"
                contests[full] = Contest(full, title, _ours(key, name, **wire), _peer(peer, key, placement))
    return contests


def _variants() -> dict[str, Contest]:
    """Returns contests of other settings of tfdist."""
    placement = PLACEMENTS["ps_async"]
    settings: dict[str, dict[str, Any]] = {
        "ps_bfloat16": {"wire": "bfloat16"},
        "ps_local_steps": {"updates": {"local_steps": 20}},
    }
    contests = {}
    for setting, changes in settings.items():
        for peer in placement.peers:
            full = f"mlp:{setting}:{peer}"
            title = f"{SIZES['mlp'].title}: {placement.title}"
            contests[full] = Contest(full, title, _ours("mlp", "ps_async", **changes), _peer(peer, "mlp", placement))
    return contests


def _itself() -> dict[str, Contest]:
    """Returns contests of tfdist against itself."""
    contests = {}
    for full, ours, peer, changes in (
        ("table_8:ps_async:table", "table_8", "table", {}),
        ("bag_rs:ps_async:bag", "bag_rs", "bag", {}),
        ("table_10m:ps_async:table_100k", "table_10m", "table_100k", {}),
        ("table_10m:ps_spread:table_100k", "table_10m", "table_100k", {"spread": 2**20}),
        *(
            (f"{key}:{at}:table", key, "table", {})
            for key in ("dynamic", "dynamic_lru")
            for at in ("ps_async", "single")
        ),
    ):
        at = "single" if ":single:" in full else "ps_async"
        other = replace(_ours(peer, at, **changes), name=f"`tfdist.fit`, {SIZES[peer].title}")
        contests[full] = Contest(full, SIZES[ours].title, _ours(ours, at, **changes), other)
    synchronous = replace(_ours("mlp", "ps_sync"), batches=WORKERS)
    asynchronous = replace(_ours("mlp", "ps_async"), name="`tfdist.fit`, asynchronous")
    full = "mlp:ps_sync:ps_async"
    contests[full] = Contest(full, f"{SIZES['mlp'].title}: batches per second", synchronous, asynchronous)
    return contests


def _stages() -> dict[str, Contest]:
    """Returns the contests of models whose layers are on two workers, and one process with the same batches.

    The layers are divided by their bytes in those named `stages`, and by their times in those named `stages_time`.
    """
    contests = {}
    for key in (*STAGED, "transformer_large"):
        size = SIZES[key]
        work = Workload(key, size.batch, size.steps, size.steps_per_execution)
        tasks = {"chief": 1, "worker": WORKERS}
        peer = Side("Keras 3 `Model.fit`, one process", PROGRAMS["keras_fit"], {}, work)
        divided = replace(work, micro_batches=8)
        for placement, staged in (("stages", divided), ("stages_time", replace(divided, balance="time"))):
            ours = Side("`tfdist.fit`", PROGRAMS["tfdist_fit"], tasks, staged)
            full = f"{key}:{placement}:keras"
            contests[full] = Contest(full, f"{size.title}: {WORKERS} stages", ours, peer)
    return contests


def _tables() -> dict[str, Contest]:
    placement = PLACEMENTS["ps_async"]
    contests = {}
    for key in ("table", "table_8"):
        full = f"{key}:ps_async:tf_keras"
        title = f"{SIZES[key].title}: {placement.title}"
        contests[full] = Contest(full, title, _ours(key, "ps_async"), _peer("tf_keras", key, placement))
    alone = PLACEMENTS["single"]
    for key in ("table", "bag"):
        title = f"{SIZES[key].title}: {alone.title}"
        contests[f"{key}:single:keras"] = Contest(
            f"{key}:single:keras", title, _ours(key, "single"), _peer("keras", key, alone)
        )
    return contests


def _tuning() -> dict[str, Contest]:
    """Returns contests of the same program with other kernels: those that `FASTER_WITH_…` are taken from."""
    sides: dict[str, tuple[str, Side]] = {}
    for contest in _grid().values():
        model, _, place = contest.row.partition(":")
        work = contest.peer.work
        if contest.ours.work.wire == "float32":
            sides.setdefault(contest.row, (contest.title, contest.ours))
        if contest.peer.program == PROGRAMS["keras_fit"]:
            sides.setdefault(f"{model}:keras_{work.batch_size}", (contest.title, contest.peer))
        if contest.peer.program == PROGRAMS["tf_keras_fit"] and place in ("ps_async", "mirrored"):
            sides.setdefault(f"{model}:tf_keras_{place}", (contest.title, contest.peer))
        if contest.peer.program == PROGRAMS["torch"] and place == "mirrored":
            sides.setdefault(f"{model}:{contest.name.rpartition(':')[2]}", (contest.title, contest.peer))
    contests = []
    for name, (title, side) in sides.items():
        work = side.work
        if side.roles:
            bound, free = replace(side, bound=True), replace(side, name=f"{side.name}, on any core", bound=False)
            contests.append(Contest(f"{name}_bound:free", title, bound, free))
        if side.program == PROGRAMS["torch"]:
            continue
        if side.program != PROGRAMS["tf_keras_fit"]:
            xla = replace(work, jit=True), replace(work, jit=False)
            contests.append(_with_and_without(f"{name}_xla:plain", title, side, "XLA", xla))
        kernels = replace(work, onednn=True), replace(work, onednn=False)
        contests.append(_with_and_without(f"{name}_onednn:eigen", title, side, "oneDNN", kernels))
    return {contest.name: contest for contest in contests}


def _with_and_without(name: str, title: str, side: Side, what: str, works: tuple[Workload, Workload]) -> Contest:
    ours, peer = works
    return Contest(name, title, replace(side, work=ours), replace(side, name=f"{side.name}, without {what}", work=peer))


def _limits() -> dict[str, Contest]:
    """Returns contests of one process for each worker, which exchange nothing, against one process of Keras.

    Workers that take the same steps on these cores cannot be faster. `limit_async` counts the batches of all processes,
    `limit_sync` the steps of one of them. Both are of Keras's own steps, those with `own_` of tfdist's. In these each
    process makes whole updates. In `part_limit_sync` it computes gradients, and updates its part of the weights.
    """
    contests = {}
    single = PLACEMENTS["single"]
    for key, size in SIZES.items():
        if size.kind == "table" or key in STAGED:
            continue
        for name, placement in PLACEMENTS.items():
            if not placement.workers or name == "mirrored":
                continue
            peer = _peer("keras", key, placement)
            batches = 1 if placement.together else placement.workers
            title = f"{size.title}: {placement.workers} processes that exchange nothing"
            for prefix, alone in (("", _peer("keras", key, single)), ("own_", _ours(key, "single", apart=True))):
                own = alone.name.removesuffix(", one process")
                ours = replace(alone, name=own, roles={"worker": placement.workers}, batches=batches)
                full = f"{key}:{prefix}limit_{name.removeprefix('ps_')}:keras"
                contests[full] = Contest(full, title, ours, peer)
            if placement.together and size.kind == "mlp":
                single_work = replace(_ours(key, "single").work, jit=False, apart=True)
                roles = {"worker": placement.workers}
                ours = Side("gradients and a part of an update", PROGRAMS["parts"], roles, single_work, bound=True)
                full = f"{key}:part_limit_sync:keras"
                contests[full] = Contest(full, title, ours, peer)
    return contests


GROUPS = {
    "grid": _grid(),
    "limits": _limits(),
    "tables": _tables(),
    "variants": _variants(),
    "stages": _stages(),
    "itself": _itself(),
    "tuning": _tuning(),
}
CONTESTS = {name: contest for group in GROUPS.values() for name, contest in group.items()}
FIGURES = (
    "mlp:ps_async:tf_keras",
    "mlp:ps_async:keras",
    "mlp_large:ps_async:tf_keras",
    "mlp_large:ps_async:keras",
    "two_tower:ps_async:tf_keras",
    "two_tower:ps_async:keras",
    "transformer:mirrored:torch",
    "transformer:mirrored:keras",
    "mlp:mirrored:torch",
    "mlp:mirrored:torch_fp16",
    "mlp:single:keras",
)
"""Those whose results README states or depends on."""


def chosen(patterns: Sequence[str]) -> list[Contest]:
    """Returns the contests whose name or group a pattern of the shell matches.

    Raises:
        ValueError: a pattern matches none.
    """
    found: dict[str, Contest] = {}
    for pattern in patterns:
        names = list(GROUPS[pattern]) if pattern in GROUPS else fnmatch.filter(CONTESTS, pattern)
        if not names:
            raise ValueError(f"{pattern!r} is no contest: --list prints them")
        found |= {name: CONTESTS[name] for name in names}
    return list(found.values())


def against(contests: Sequence[Contest], checkout: Path) -> list[Contest]:
    """Returns contests with another version of tfdist as the peer, one for each training of tfdist."""
    found: dict[str, Contest] = {}
    for contest in contests:
        peer = replace(contest.ours, name=f"the same, version in {checkout.name}", checkout=checkout.resolve())
        wire = contest.ours.work.wire
        name = f"{contest.row}:{checkout.name}" + (f"_{wire}" if wire != "float32" else "")
        found[name] = replace(contest, name=name, peer=peer)
    return list(found.values())
