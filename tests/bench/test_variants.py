"""Which clusters are measured, and what each trains."""

import pytest

from tests.support.codes import raises
from tfdist_cli.bench.variants import (
    can_measure_phases,
    measured_cluster,
    measured_recipe,
    variants_of,
    whole_executions,
    with_phases,
    workers_of,
)
from tfdist_cli.errors import UsageError
from tfdist_cli.plan.machine import Machine
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

HOSTS = ["127.0.0.1:2301", "127.0.0.1:2302", "127.0.0.1:2303"]


def cluster(strategy="parameter_server", **roles):
    return Cluster.model_validate({"strategy": strategy, "roles": roles})


def ps(workers, **more):
    return cluster(chief={}, ps={"replicas": 2}, worker={"replicas": workers, **more}, evaluator={})


def recipe(**keys):
    return Recipe.model_validate({"module": "digits", **keys})


def tasks(variant):
    return [str(task) for task in variant.cluster.tasks]


@pytest.mark.parametrize(
    ("workers", "counts"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_by_default_the_number_of_workers_doubles_up_to_the_clusters_own(workers, counts):
    *sized, alone = variants_of(ps(workers), recipe())
    assert [variant.workers for variant in sized] == counts
    assert (alone.name, alone.workers, tasks(alone)) == ("one process", 1, ["chief:0"])
    assert alone.cluster.strategy == "single"
    names = ["1 worker", *(f"{count} workers" for count in counts[1:])]
    assert [variant.name for variant in sized] == names
    for variant in sized:
        assert tasks(variant) == ["chief:0", *(f"worker:{n}" for n in range(variant.workers)), "ps:0", "ps:1"]


def test_as_many_workers_as_are_wanted_each_number_once():
    assert [variant.workers for variant in variants_of(ps(2), recipe(), [5, 2, 5])] == [2, 5, 1]


@pytest.mark.parametrize("roles", [{"worker": {"replicas": 4}}, {"chief": {}, "worker": {"replicas": 3}}])
def test_a_mirrored_chief_is_one_of_the_workers(roles):
    variants = variants_of(cluster("multi_worker_mirrored", **roles), recipe())
    assert [len(variant.cluster.tasks) for variant in variants] == [1, 2, 4, 1]
    for variant in variants:
        Cluster.model_validate(variant.cluster.model_dump())


@pytest.mark.parametrize(("strategy", "names"), [("single", ["1 worker"]), ("mirrored", ["1 worker", "one process"])])
def test_one_process_is_what_it_is(strategy, names):
    variants = variants_of(cluster(strategy, chief={}), recipe())
    assert [variant.name for variant in variants] == names
    assert variants[0].cluster.strategy == strategy


def test_workers_keep_their_hosts_and_the_one_process_has_none():
    two, three, alone = variants_of(ps(None, hosts=HOSTS), recipe(), [2, 3])
    assert [str(address) for address in two.cluster.roles.worker.hosts] == HOSTS[:2]
    assert [str(address) for address in three.cluster.roles.worker.hosts] == HOSTS
    assert alone.cluster.roles.chief.hosts is None


def test_what_prepares_data_stays():
    served = cluster(chief={}, ps={}, worker={"env": {"A": "b"}}, data_dispatcher={}, data_worker={})
    one, alone = variants_of(served, recipe())
    assert tasks(one)[-2:] == tasks(alone)[-2:] == ["data_dispatcher:0", "data_worker:0"]
    assert alone.cluster.roles.chief.env == {"A": "b"}


def test_one_process_has_what_chief_and_workers_are_given():
    secret = {"file": "token"}
    chief = {"env": {"A": "chief", "B": "c"}, "secrets": {"TOKEN": secret}}
    _, alone = variants_of(cluster(chief=chief, ps={}, worker={"env": {"A": "worker", "C": "d"}}), recipe())
    given = alone.cluster.roles.chief
    assert given.env == {"A": "chief", "B": "c", "C": "d"}
    assert {name: spec.model_dump(exclude_none=True) for name, spec in given.secrets.items()} == {"TOKEN": secret}


def test_one_mirrored_worker_is_the_chief_where_there_is_one():
    mirrored = cluster("multi_worker_mirrored", chief={"env": {"A": "b"}}, worker={"env": {"A": "c"}})
    one, two, _ = variants_of(mirrored, recipe())
    assert (tasks(one), one.cluster.roles.worker.env) == (["worker:0"], {"A": "b"})
    assert tasks(two) == ["chief:0", "worker:0"]


@pytest.mark.parametrize(
    ("spec", "updates", "wanted", "code"),
    [
        (cluster("single", chief={}), {}, [2], "too-many-workers"),
        (cluster("mirrored", chief={}), {}, [1, 4], "too-many-workers"),
        (ps(3), {"mode": "sync", "aggregate": 2}, [1, 3], "too-few-workers"),
        (ps(None, hosts=HOSTS), {}, [4], "too-many-workers"),
    ],
)
def test_what_cannot_be_measured_is_refused(spec, updates, wanted, code):
    with raises(UsageError, code) as error:
        variants_of(spec, recipe(updates=updates), wanted)
    assert error.value.hint


def test_numbers_below_what_an_update_needs_are_left_out():
    chosen = variants_of(ps(8), recipe(updates={"mode": "sync", "aggregate": 3}))
    assert [variant.workers for variant in chosen] == [4, 8, 1]


def test_numbers_of_workers_are_read():
    assert workers_of("1,2, 4") == [1, 2, 4]


@pytest.mark.parametrize("text", ["", "0", "1,", "two", "-1", "1.5", "²"])
def test_other_numbers_of_workers_are_refused(text):
    with raises(UsageError, "invalid-workers"):
        workers_of(text)


@pytest.mark.parametrize(
    ("updates", "total"), [({"mode": "async"}, 80), ({"mode": "sync"}, 40), ({"mode": "bounded", "staleness": 2}, 40)]
)
def test_each_worker_takes_as_many_steps_and_nothing_else_is_done(updates, total):
    asked = recipe(
        updates=updates,
        train={"epochs": 9, "max_steps": 7, "repeat": False, "batch_size": 5},
        checkpoint={"every_steps": 1},
        export={},
    )
    _, two, alone = variants_of(ps(2), asked)
    measured = measured_recipe(asked, two, 40)
    assert (measured.train.steps_per_epoch, measured.train.epochs, measured.train.max_steps) == (total, 2, None)
    assert (measured.train.batch_size, measured.train.repeat) == (5, True)
    assert measured.checkpoint is measured.evaluate is measured.export is None
    assert measured_recipe(asked, alone, 40).train.steps_per_epoch == 40


@pytest.mark.parametrize(
    ("train", "updates", "steps", "rounded"),
    [
        ({}, {}, 200, 200),
        ({}, {}, 201, 220),
        ({}, {}, 1, 20),
        ({"steps_per_execution": 7}, {}, 20, 21),
        ({"steps_per_execution": 10}, {"push_every": 4}, 100, 120),
    ],
)
def test_executions_are_whole(train, updates, steps, rounded):
    assert whole_executions(recipe(train=train, updates=updates), steps) == rounded


def test_every_task_takes_the_time():
    spec = with_phases(ps(2, env={"A": "b"}))
    for task in spec.tasks:
        assert spec.role(task).env["TFDIST_PHASES"] == "1"
    assert spec.roles.worker.env["A"] == "b"


def test_every_task_builds_the_functions_that_are_measured_first():
    spec = measured_cluster(ps(2, env={"A": "b"}))
    for task in spec.tasks:
        assert spec.role(task).env["TFDIST_BUILD_FIRST"] == "1"


@pytest.mark.parametrize(("gpus", "can"), [((), True), (("0", "1"), False)])
def test_the_time_on_gpus_is_not_told(monkeypatch, gpus, can):
    monkeypatch.setattr(Machine, "here", lambda: Machine(2, gpus))
    assert can_measure_phases(ps(2)) is can


def staged(workers):
    return cluster("model_parallel", chief={}, worker={"replicas": workers})


def test_the_workers_of_stages_are_a_multiple_of_them():
    *sized, alone = variants_of(staged(8), recipe(stages=2))
    assert [variant.workers for variant in sized] == [2, 4, 8]
    assert alone.name == "one process"
    assert [variant.workers for variant in variants_of(staged(6), recipe(stages=3))] == [6, 1]
    assert [variant.workers for variant in variants_of(staged(2), recipe())] == [1, 2, 1]
    with raises(UsageError, "stages-do-not-fit"):
        variants_of(staged(4), recipe(stages=2), [2, 3])


def test_stages_compute_at_the_same_time():
    assert can_measure_phases(staged(2)) is False
