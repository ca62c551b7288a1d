"""Advice: which settings help, by how much, and what they change."""

from pathlib import Path

import pytest

from tests.bench.test_results import row
from tfdist_cli.bench import candidates
from tfdist_cli.bench.advice import Advice
from tfdist_cli.bench.candidates import Candidate, candidates_of
from tfdist_cli.bench.machine import ONEDNN, describe, onednn_by_default
from tfdist_cli.bench.measure import Rate
from tfdist_cli.bench.trials import AS_IT_IS, Trial, trials_of
from tfdist_cli.bench.variants import Variant
from tfdist_cli.plan.machine import Machine
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

PS = {"chief": {}, "ps": {}, "worker": {"replicas": 2}}
BOUNDED = Candidate(("updates.mode=bounded", "updates.staleness=2"), "gradients are up to 2 updates old")
MORE_PS = Candidate(("roles.ps.replicas=2",), "none")
WIRE = Candidate(("wire=bfloat16",), "they are rounded")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 4 cores, and by default without what TensorFlow knows about its processor."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(4))
    monkeypatch.setattr(candidates, "onednn_by_default", lambda: None)
    monkeypatch.delenv(ONEDNN, raising=False)


def cluster(strategy="parameter_server", **roles):
    return Cluster.model_validate({"name": "small", "strategy": strategy, "roles": {**PS, **roles}})


def recipe(**given):
    return Recipe.model_validate({"module": "digits", **given})


def names(strategy=None, updates=None, **given):
    tasks = cluster() if strategy is None else Cluster.model_validate(strategy)
    return [each.name for each in candidates_of(tasks, recipe(updates=updates or {}, **given))]


COMMON = ["roles.ps.replicas=2", "wire=bfloat16", "roles.worker.threads.intra=4", "roles.worker.threads.intra=1"]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ({}, ["updates.local_steps=20", "updates.push_every=4", "updates.prefetch=true"]),
        ({"prefetch": True}, []),
        ({"delay_compensation": 0.1}, ["updates.push_every=4", "updates.prefetch=true"]),
        ({"push_every": 2}, []),
        ({"mode": "sync"}, ["updates.batch=proportional", "updates.mode=bounded updates.staleness=2"]),
        ({"mode": "sync", "batch": "proportional"}, []),
        ({"mode": "sync", "aggregate": 1}, []),
        ({"mode": "bounded", "staleness": 3}, []),
    ],
)
def test_what_is_set_already_or_cannot_be_combined_is_no_candidate(updates, expected):
    assert names(updates=updates) == [*expected, *COMMON, "train.jit=true"]


def test_what_the_recipe_has_already():
    assert names(updates={"prefetch": True}, wire="float16", train={"jit": "auto"}) == [COMMON[0], *COMMON[2:]]


def test_one_process_has_threads_and_xla():
    assert names({"strategy": "single", "roles": {"chief": {}}}) == ["roles.chief.threads.intra=1", "train.jit=true"]


def test_all_tasks_that_train_get_the_threads():
    mirrored = {"strategy": "multi_worker_mirrored", "roles": {"chief": {}, "worker": {}}}
    assert names(mirrored)[1] == "roles.chief.threads.intra=4 roles.worker.threads.intra=4"


@pytest.mark.parametrize(("default", "other"), [(True, "0"), (False, "1")])
def test_the_other_library_for_products_is_tried(default, other, monkeypatch):
    monkeypatch.setattr(candidates, "onednn_by_default", lambda: default)
    single = {"strategy": "single", "roles": {"chief": {}}}
    change = f"roles.chief.env.TF_ENABLE_ONEDNN_OPTS='{other}'"
    assert names(single)[1] == change
    (found,) = (each for each in candidates_of(Cluster.model_validate(single), recipe()) if each.name == change)
    assert found.yaml == f"roles: {{chief: {{env: {{TF_ENABLE_ONEDNN_OPTS: '{other}'}}}}}}"
    assert found.is_in_cluster
    assert f"roles.worker.env.TF_ENABLE_ONEDNN_OPTS='{other}'" in names()


def test_a_library_that_is_chosen_already_stays(monkeypatch):
    monkeypatch.setattr(candidates, "onednn_by_default", lambda: False)
    chosen = {"strategy": "single", "roles": {"chief": {"env": {ONEDNN: "0"}}}}
    assert not any(ONEDNN in name for name in names(chosen))
    assert any(ONEDNN in name for name in names())
    monkeypatch.setenv(ONEDNN, "1")
    assert not any(ONEDNN in name for name in names())


def test_gpus_compute_without_it(monkeypatch):
    monkeypatch.setattr(candidates, "onednn_by_default", lambda: False)
    monkeypatch.setattr(Machine, "here", lambda: Machine(4, gpus=("0",)))
    assert not any(ONEDNN in name for name in names())


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx2 fma\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", None),
    ],
)
def test_the_processor_tells_what_tensorflow_uses(text, default, tmp_path):
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert onednn_by_default(tmp_path / "cpuinfo") is default
    assert onednn_by_default(tmp_path / "none") is None


def test_a_description_has_the_library_that_was_chosen(monkeypatch):
    assert ONEDNN not in describe()
    monkeypatch.setenv(ONEDNN, "1")
    assert describe().endswith(", TF_ENABLE_ONEDNN_OPTS=1")


def test_the_lines_to_write():
    assert BOUNDED.yaml == "updates: {mode: bounded, staleness: 2}"
    assert MORE_PS.yaml == "roles: {ps: {replicas: 2}}"
    assert (BOUNDED.is_in_cluster, MORE_PS.is_in_cluster, WIRE.is_in_cluster) == (False, True, False)


def test_trials_are_what_would_be_set():
    loaded = []

    def load(changes):
        loaded.append(changes)
        return cluster(worker={"replicas": 3}), recipe(wire="bfloat16")

    base, alone, *others = trials_of(cluster(), recipe(updates={"prefetch": True}), load)
    assert (base.name, base.variant.workers, alone.variant.alone) == (AS_IT_IS, 2, True)
    assert [each.candidate.changes for each in others] == loaded
    assert {(each.variant.workers, each.recipe.wire) for each in others} == {(3, "bfloat16")}


def trial(candidate, *rates, error=""):
    variant = Variant(cluster(), 2)
    return Trial(candidate.name, variant, recipe(), candidate, [Rate(rate, 32 * rate) for rate in rates], error)


def advice(*tried, base=(100.0, 105.0, 95.0), alone=(80.0, 81.0, 82.0)):
    one = row(1, *alone, alone=True) if alone else None
    files = Path("cluster.yaml"), Path("recipe.yaml")
    return Advice("small: digits", "2 cores", 200, 0.04, *files, row(2, *base), one, tried)


HELPS, HELPS_MORE = trial(WIRE, 120.0, 130.0, 125.0), trial(MORE_PS, 150.0, 149.0, 200.0)
WITHIN, SLOWER = trial(BOUNDED, 109.0, 120.0, 104.0), trial(BOUNDED, 50.0, 50.0, 50.0)


def test_the_largest_gain_comes_first_with_the_lines_to_write():
    lines = list(advice(HELPS, WITHIN, HELPS_MORE).lines())
    assert [lines[1].strip(), lines[4].strip()] == ["roles: {ps: {replicas: 2}}", "wire: bfloat16"]
    assert lines[0].startswith("1. +50%")
    assert "cluster.yaml" in lines[0]
    assert lines[3].startswith("2. +25%")
    assert "recipe.yaml" in lines[3]
    assert "they are rounded" in lines[5]
    assert len(lines) == 7


@pytest.mark.parametrize("tried", [(WITHIN,), (SLOWER,), (), (trial(WIRE, error="ValueError: no"),)])
def test_a_gain_within_the_spread_of_the_base_is_none(tried):
    (line,) = advice(*tried).lines()
    assert line.startswith("No change helps")
    assert "10%" in line


def test_a_gain_within_the_spread_of_its_own_runs_is_none():
    scattered = advice(trial(WIRE, 120.0, 100.0, 190.0))
    assert next(scattered.lines()).startswith("No change helps")
    assert scattered.as_json()["candidates"][0]["helps"] is False


def test_a_cluster_that_is_slower_than_one_process():
    assert advice(alone=(200.0, 250.0, 210.0)).warning().split()[3] == "2.1"
    assert advice(alone=(100.0, 108.0, 109.0)).warning() is None
    assert advice(alone=(90.0, 120.0, 200.0)).warning() is None  # its own runs differ more
    assert advice(alone=None).warning() is None


def test_the_table_has_all_that_was_measured():
    table = advice(SLOWER, HELPS, trial(MORE_PS, error="no room")).table()
    assert [(cells[0], cells[2]) for cells in table] == [
        ("settings", "gain"),
        ("2 workers", ""),
        (WIRE.name, "+25%"),
        (BOUNDED.name, "-50%"),
        ("one process", "-19%"),
        (MORE_PS.name, ""),
    ]


def test_json_has_every_candidate():
    read = advice(HELPS, SLOWER, trial(MORE_PS, 90.0, error="no room"), alone=(400.0, 400.0)).as_json()
    assert read["slower_than_one_process"]
    assert read["base"]["median"] == 3200
    assert [(each["set"], each["gain"], each["helps"], each["error"]) for each in read["candidates"]] == [
        (["wire=bfloat16"], 0.25, True, None),
        (["updates.mode=bounded", "updates.staleness=2"], -0.5, False, None),
        (["roles.ps.replicas=2"], None, False, "no room"),
    ]
    assert read["candidates"][0]["yaml"] == "wire: bfloat16"


def test_markdown_warns_first():
    page = advice(HELPS, alone=(400.0, 400.0, 410.0)).as_markdown()
    assert page.splitlines()[2].startswith("**Warning:**")
    assert "4 times" in page.splitlines()[2]
    assert "| wire=bfloat16 | 4,000 (3,840 to 4,160) | +25% |" in page
