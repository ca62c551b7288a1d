"""What becomes of a request, and the plan that follows from it."""

import json
import resource
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from tests.support.histories import CHIEF, EVALUATOR, PS, W0, W1, W2, History, beat
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.run.directory import open_run_dir
from tfdist_cli.launch.run.planner import Planner, RequestHandler
from tfdist_cli.launch.run.requests import ProfileRequest, ScaleRequest
from tfdist_cli.launch.supervisor.events import (
    Exited,
    ProfileAccepted,
    ProfileRefused,
    RecordReceived,
    RequestAnswered,
    ResizeAccepted,
)
from tfdist_cli.plan.machine import Machine
from tfdist_cli.protocol.profile_order import ProfileOrder
from tfdist_cli.spec.launchers import LAUNCHERS
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import RoleSpec

RUNNING = History(CHIEF, W0, PS).state


@pytest.fixture
def make_handler(tmp_path, make_cluster):
    """The desk of a run of one worker and one ps, and its directory."""

    def make(checkpoint="yes", **roles):
        given = {"every_steps": 5} if checkpoint == "yes" else None
        recipe = Recipe.model_validate({"module": "x", "module_dir": "/", "checkpoint": given})
        cluster = make_cluster("parameter_server", **({"chief": 1, "worker": 1, "ps": 1} | roles))
        planner = Planner(LocalLauncher(), cluster, recipe if checkpoint else None, ("true",))
        now = datetime(2026, 1, 1, tzinfo=timezone.utc)
        opened.enter_context(planner.reserving())
        run_dir = opened.enter_context(open_run_dir(tmp_path / "run", tmp_path, "x", now))
        planner.plan(run_dir)
        return RequestHandler(planner, run_dir, lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))

    with ExitStack() as opened:
        yield make


def test_a_request_that_can_be_met_has_a_plan_with_addresses_of_its_own(make_handler, tmp_path):
    request_handler = make_handler()
    event = request_handler.answer(ScaleRequest("a", {"worker": 3, "ps": 1}), RUNNING)
    assert replace(event, because="") == ResizeAccepted("a", {"worker": (1, 3)}, (CHIEF, W0, W1, W2, PS))
    assert "worker:1" in event.because
    plan = request_handler.plan(event.tasks)
    assert [planned.task for planned in plan.tasks] == list(event.tasks)
    assert len({planned.address.port for planned in plan.tasks} - {0}) == 5
    written = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [task["task"] for task in written["tasks"]] == [str(task) for task in event.tasks]
    assert load_run(tmp_path / "run" / "cluster.yaml")[0].roles.count("worker") == 3
    larger = History(*event.tasks).state
    assert request_handler.answer(ScaleRequest("b", {"worker": 3}), larger) == RequestAnswered("b", "unchanged")


def test_a_port_that_is_given_is_let_go_and_taken_again(make_handler):
    request_handler = make_handler(chief=["127.0.0.1:23456"])
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), RUNNING)
    assert str(request_handler.plan(event.tasks)[CHIEF].address) == "127.0.0.1:23456"


def test_the_plan_from_before_is_made_again_if_the_other_one_has_failed(make_handler, tmp_path):
    request_handler = make_handler()
    before = (CHIEF, W0, PS)
    event = request_handler.answer(ScaleRequest("a", {"worker": 3, "ps": 1}), RUNNING)
    request_handler.plan(event.tasks)
    assert tuple(planned.task for planned in request_handler.plan(before).tasks) == before
    assert load_run(tmp_path / "run" / "cluster.yaml")[0].roles.count("worker") == 1
    assert request_handler.answer(ScaleRequest("b", {"worker": 1}), RUNNING) == RequestAnswered("b", "unchanged")


def test_whether_it_could_be_met_changes_nothing(make_handler):
    request_handler = make_handler()
    assert request_handler.answer(ScaleRequest("a", {"ps": 2}, dry_run=True), RUNNING) == RequestAnswered(
        "a", "possible", {"ps": (1, 2)}
    )
    with pytest.raises(RuntimeError, match="no request"):
        request_handler.plan(RUNNING.wanted)


@pytest.mark.parametrize(
    ("options", "replicas", "reason"),
    [
        ({"checkpoint": ""}, {"worker": 2}, "only a recipe"),
        ({"checkpoint": "no"}, {"worker": 2}, "no checkpoints"),
        ({}, {"worker": 0}, "parameter_server needs a worker to compute gradients: it has 0 replicas"),
        ({"ps": ["127.0.0.1:23457"]}, {"ps": 2}, "replicas is 2, but hosts lists 1"),
        ({}, {"data_worker": 1}, "a data_worker does nothing without a data_dispatcher"),
    ],
)
def test_what_is_refused(options, replicas, reason, make_handler):
    event = make_handler(**options).answer(ScaleRequest("a", replicas), RUNNING)
    assert (event.request, event.answer) == ("a", "refused")
    assert reason in event.reason


def test_more_gpus_than_the_machine_has_are_refused_before_anything_ends(make_handler, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: Machine(2, ("0",)))
    request_handler = make_handler()
    roles = request_handler._planner.cluster.roles
    one = roles.model_copy(update={"worker": RoleSpec(replicas=1, gpus=1)})
    request_handler._planner.cluster = request_handler._planner.cluster.model_copy(update={"roles": one})
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), RUNNING)
    assert event.answer == "refused"
    assert "GPUs" in event.reason


def test_more_open_files_than_the_launcher_may_have_are_refused_before_anything_ends(make_handler, monkeypatch):
    request_handler = make_handler()
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (300, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda limit, wanted: None)
    for dry_run in (True, False):
        event = request_handler.answer(ScaleRequest("a", {"worker": 30}, dry_run=dry_run), RUNNING)
        assert (event.answer, event.replicas) == ("refused", {})
        assert event.code == "too-few-open-files"
        assert all(number in event.reason for number in ("32", "320", "300"))
        assert "ulimit -n" in event.hint


def test_a_job_that_does_something_else_is_not_resized(make_handler):
    job = History(CHIEF, W0, PS)
    job.at(5, Exited(CHIEF, 0))
    event = make_handler().answer(ScaleRequest("a", {"worker": 2}), job.state)
    assert (event.answer, event.code) == ("refused", "job-not-resizable")


def elastic(*tasks, **record):
    """The state of a training whose chief has reported whether it takes workers."""
    job = History(*tasks)
    job.at(1, RecordReceived(CHIEF, {"kind": "elastic", "joins": True} | record))
    return job.state


MANY = {"replicas": 1, "max": 3}


def test_workers_join_with_the_addresses_that_the_launch_has_reserved(make_handler, tmp_path):
    request_handler = make_handler(checkpoint="", worker=MANY)
    before = request_handler._planner.plan(request_handler._run_dir)
    event = request_handler.answer(ScaleRequest("a", {"worker": 3}), elastic(CHIEF, W0, PS))
    assert event == ResizeAccepted("a", {"worker": (1, 3)}, (CHIEF, W0, W1, W2, PS), joins=(W1, W2))
    plan = request_handler.extended
    assert [planned.task for planned in plan.tasks] == list(event.tasks)
    assert {task: plan[task].address for task in (CHIEF, W0, PS)} == {
        task: before[task].address for task in (CHIEF, W0, PS)
    }
    assert plan.spare_ports == (before.spare_ports[-1],)  # the two before it have become tasks
    for name in ("TFDIST_JOIN_ADDRESS", "TFDIST_MAX_WORKERS"):
        assert plan[W2].env[name] == before[CHIEF].env[name]
    assert len(json.loads(plan[W2].env["TF_CONFIG"])["cluster"]["worker"]) == 3
    written = load_run(tmp_path / "run" / "cluster.yaml")[0]
    assert (written.roles.count("worker"), written.roles.capacity("worker")) == (3, 3)


def test_workers_leave_and_come_back_without_a_max(make_handler, tmp_path):
    request_handler = make_handler(worker=3)
    event = request_handler.answer(ScaleRequest("a", {"worker": 1}), elastic(CHIEF, W0, W1, W2, PS))
    assert event == ResizeAccepted("a", {"worker": (3, 1)}, (CHIEF, W0, PS), leaves=(W1, W2))
    written = load_run(tmp_path / "run" / "cluster.yaml")[0]
    assert (written.roles.count("worker"), written.roles.capacity("worker")) == (1, 3)
    event = request_handler.answer(ScaleRequest("b", {"worker": 2}), elastic(CHIEF, W0, PS))
    assert event.joins == (W1,)
    event = request_handler.answer(ScaleRequest("c", {"worker": 4}), elastic(CHIEF, W0, W1, PS))
    assert not event.is_live  # no address is reserved for a fourth
    assert "worker:3" in event.because


def test_the_plan_has_a_worker_that_may_have_to_stay(make_handler, tmp_path):
    request_handler = make_handler(worker=3)
    before = request_handler._planner.plan(request_handler._run_dir)
    request_handler.answer(ScaleRequest("a", {"worker": 1}), elastic(CHIEF, W1, W2, PS))
    assert [planned.task for planned in request_handler.extended.tasks] == [CHIEF, W0, PS, W1, W2]
    assert [request_handler.extended[task] for task in (W1, W2)] == [before[W1], before[W2]]
    written = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [task["task"] for task in written["tasks"]] == ["chief:0", "worker:0", "ps:0"]
    request_handler.answer(ScaleRequest("b", {"evaluator": 1}), elastic(CHIEF, W1, PS))
    assert request_handler.extended[W1] == before[W1]
    assert request_handler.extended[EVALUATOR]


def test_workers_with_hosts_leave(make_handler):
    request_handler = make_handler(worker=["127.0.0.1:23471", "127.0.0.1:23472"])
    event = request_handler.answer(ScaleRequest("a", {"worker": 1}), elastic(CHIEF, W0, W1, PS))
    assert event.leaves == (W1,)


def test_a_worker_that_has_left_by_itself_comes_back(make_handler):
    job = History(CHIEF, W0, W1, W2, PS)
    job.at(1, RecordReceived(CHIEF, {"kind": "elastic", "joins": True}))
    job.at(2, RecordReceived(W1, {"kind": "state", "state": "left"}), Exited(W1, 0))
    request_handler = make_handler(worker=3)
    assert request_handler.answer(ScaleRequest("a", {"worker": 2}), job.state).answer == "unchanged"
    event = request_handler.answer(ScaleRequest("b", {"worker": 3}), job.state)
    assert (event.replicas, event.joins, event.leaves) == ({"worker": (2, 3)}, (W1,), ())


@pytest.mark.parametrize(
    ("roles", "record", "replicas", "why"),
    [
        ({"worker": MANY}, {"joins": False, "reason": "each update needs all"}, {"worker": 2}, "each update needs all"),
        ({"worker": MANY}, {}, {"ps": 2}, ""),
        ({"worker": MANY}, {}, {"worker": 2, "ps": 2}, ""),
        ({"worker": {"replicas": 1}}, {}, {"worker": 2}, "worker:1"),
    ],
)
def test_what_needs_a_checkpoint(roles, record, replicas, why, make_handler):
    request_handler, state = make_handler(**roles), elastic(CHIEF, W0, PS, **record)
    answer = request_handler.answer(ScaleRequest("b", replicas, dry_run=True), state)
    assert (answer.answer, answer.live) == ("possible", False)
    event = request_handler.answer(ScaleRequest("a", replicas), state)
    assert answer.reason == event.because
    assert isinstance(event, ResizeAccepted)
    assert not event.is_live
    assert why in event.because
    assert bool(event.because) == bool(why)


@pytest.mark.parametrize("checkpoint", ["", "no"])
def test_workers_join_later_before_the_training_has_begun(checkpoint, make_handler):
    request_handler = make_handler(checkpoint=checkpoint, worker=MANY)
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), RUNNING)
    assert (event.answer, event.code) == ("refused", "training-not-begun")
    assert request_handler.answer(ScaleRequest("b", {"ps": 2}), RUNNING).code == "no-checkpoints"
    event = request_handler.answer(ScaleRequest("c", {"worker": 2}), elastic(CHIEF, W0, PS))
    assert isinstance(event, ResizeAccepted)


@pytest.mark.parametrize("checkpoint", ["", "no"])
def test_why_workers_cannot_join_is_said_where_nothing_could_resume(checkpoint, make_handler):
    request_handler = make_handler(checkpoint=checkpoint, worker=MANY)
    reason = "each update needs all"
    state = elastic(CHIEF, W0, PS, joins=False, reason=reason)
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), state)
    assert (event.code, reason in event.reason) == ("no-checkpoints", True)


def test_a_dry_run_of_a_join_changes_nothing(make_handler):
    request_handler = make_handler(worker=MANY)
    answer = request_handler.answer(ScaleRequest("a", {"worker": 2}, dry_run=True), elastic(CHIEF, W0, PS))
    assert answer == RequestAnswered("a", "possible", {"worker": (1, 2)}, live=True)
    assert request_handler.extended is None


def test_other_launchers_than_those_that_start_single_tasks_need_a_checkpoint(make_handler, monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "local", replace(LAUNCHERS["local"], tasks_join=False))
    request_handler = make_handler(worker=MANY)
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), elastic(CHIEF, W0, PS))
    assert not event.is_live
    assert "local" in event.because


def test_above_max_is_refused(make_handler):
    event = make_handler(worker=MANY).answer(ScaleRequest("a", {"worker": 4}), elastic(CHIEF, W0, PS))
    assert event.answer == "refused"
    assert "max is 3" in event.reason


def test_more_tasks_than_the_model_can_be_divided_among_are_refused_before_anything_ends(make_handler):
    job = History(CHIEF, W0, PS)
    job.at(1, RecordReceived(CHIEF, {"kind": "limit", "role": "worker", "most": 2, "reason": "too few layers"}))
    request_handler = make_handler()
    event = request_handler.answer(ScaleRequest("a", {"worker": 3}), job.state)
    assert (event.answer, event.code, event.hint) == ("refused", "too-many-tasks", "tfdist scale worker=2")
    assert "too few layers" in event.reason
    assert isinstance(request_handler.answer(ScaleRequest("b", {"worker": 2, "ps": 2}), job.state), ResizeAccepted)


def test_gpus_that_would_be_divided_anew_need_a_checkpoint(make_handler, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: Machine(2, ("0", "1", "2", "3")))
    request_handler = make_handler(worker=MANY)
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), elastic(CHIEF, W0, PS))
    assert not event.is_live
    assert "GPU" in event.because


def test_a_worker_with_gpus_of_its_own_joins(make_handler, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: Machine(2, ("0", "1")))
    request_handler = make_handler(worker=MANY | {"gpus": 1})
    event = request_handler.answer(ScaleRequest("a", {"worker": 2}), elastic(CHIEF, W0, PS))
    assert event.joins == (W1,)
    assert [request_handler.extended[task].resources.gpus for task in (W0, W1)] == [("0",), ("1",)]


def test_an_evaluator_joins_without_an_address(make_handler, tmp_path):
    request_handler = make_handler()
    event = request_handler.answer(ScaleRequest("a", {"evaluator": 1}), RUNNING)
    assert event.joins == (EVALUATOR,)
    assert "evaluator" in json.loads(request_handler.extended[EVALUATOR].env["TF_CONFIG"])["cluster"]
    assert load_run(tmp_path / "run" / "cluster.yaml")[0].roles.count("evaluator") == 1
    event = request_handler.answer(ScaleRequest("b", {"evaluator": 0}), History(*event.tasks).state)
    assert event.leaves == (EVALUATOR,)


def test_a_profile_is_stored_where_tensorboard_finds_it(make_handler):
    job = History(CHIEF, W0, PS)
    job.at(1, beat(W0))
    request_handler = make_handler()
    order = ProfileOrder("a", 2.0, "profile/plugins/profile/2026_01_02_03_04_05/worker-0.xplane.pb")
    assert request_handler.answer(ProfileRequest("a", "worker:0", 2.0), job.state) == ProfileAccepted(W0, order)
    answer = request_handler.answer(ProfileRequest("b", "ps", 2.0), job.state)
    assert (type(answer), answer.task, answer.code) == (ProfileRefused, PS, "task-not-ready")


def test_a_launcher_may_not_reach_running_tasks(make_handler, monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "local", replace(LAUNCHERS["local"], profiles_tasks=False))
    answer = make_handler().answer(ProfileRequest("a", "worker:0", 2.0), RUNNING)
    assert answer.code == "launcher-cannot-profile"
