"""The containers of a run, with a stand-in for the engine: how their exits are reported, and how they are stopped."""

import signal

import pytest

from tests.support.codes import raises
from tests.support.outcome import OneJoin, Outcome
from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.compose.launcher import ComposeLauncher
from tfdist_cli.launch.supervisor.events import Exited, Output, RequestReceived, SignalReceived, Started
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

CHIEF, WORKER = TaskId("chief"), TaskId("worker")
ENGINE = """#!/bin/bash
cd "$(dirname "$0")"
echo "$@" >> calls
for last; do :; done
case $1 in
run) while [ "$1" != --name ]; do shift; done; name=$2
     case $name in
     *chief*) eval "$CHIEF";;
     *) eval "$WORKER";;
     esac;;
kill) [ -e "$last.up" ] || exit 1; kill -s "$3" "$(cat "$last.up")";;
network) [ "$2" != create ] || [ -z "$NO_NETWORK" ] || { echo "no network today" >&2; exit 125; };;
esac
"""
STAYS = 'sleep 0.3; echo $$ > "$name.up"; echo up; exec sleep 1000'


@pytest.fixture
def run(tmp_path, monkeypatch, plan_for):
    """Runs a chief, a ps and a worker, whose containers run these scripts."""
    (tmp_path / "podman").write_text(ENGINE)
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def plan_of(workers):
        roles = {"chief": {}, "worker": {"replicas": workers, "max": 2}, "ps": {}}
        cluster = Cluster.model_validate({"strategy": "parameter_server", "launcher": "compose", "roles": roles})
        return plan_for(cluster, "program", addresses=ComposeLauncher().preview_addresses(cluster))

    def run(chief, worker, react=lambda event, state: (), joins=None):
        monkeypatch.setenv("CHIEF", chief)
        monkeypatch.setenv("WORKER", worker)
        rules = JobPolicy("parameter_server", timeouts=Timeouts(shutdown=20.0))
        handler = OneJoin(joins, plan_of(2)) if joins else None
        outcome = Outcome(react).run(ComposeLauncher(), plan_of(1), rules, request_handler=handler)
        return outcome.state, outcome.of(Exited), (tmp_path / "calls").read_text().splitlines()

    return run


def test_an_exit_after_the_chiefs_is_not_a_failure(run):
    state, exits, calls = run("sleep 0.3", "exit 0")
    assert exits[0].task == CHIEF
    assert (state.exit_code, state.failures) == (0, ())
    assert sum(call.startswith("rm --force") for call in calls) == 3
    assert [call.split()[:2] for call in calls][-1] == ["network", "rm"]


def test_a_failure_is_reported_before_the_running_chief_exits(run, monkeypatch):
    monkeypatch.setattr("tfdist_cli.launch.compose.launcher._FIRST_EXIT_TIMEOUT", 0.05)
    state, exits, _ = run(STAYS, 'case $name in *worker*) exit 7;; esac; echo $$ > "$name.up"; exec sleep 1000')
    assert exits[0] == Exited(WORKER, 7)
    assert state.exit_code == 7


def test_a_container_that_is_not_running_yet_is_signalled_again(run):
    sent: list[int] = []

    def react(event, state):
        if isinstance(event, Output) and not sent:
            sent.append(signal.SIGTERM)
            return [SignalReceived(signal.SIGTERM)]
        return ()

    state, exits, calls = run("echo early; " + STAYS, "echo early; " + STAYS, react)
    assert state.exit_code == 143
    assert len(exits) == 3
    assert not any("--signal KILL" in call for call in calls)


def test_a_failure_to_create_the_network(run, monkeypatch):
    monkeypatch.setenv("NO_NETWORK", "1")
    with raises(TfdistError, "container-network-failed") as caught:
        run("exit 0", "exit 0")
    assert caught.value.message.endswith(": no network today")


def test_a_container_joins_while_the_others_run(run):
    second = TaskId("worker", 1)

    def react(event, state):
        match event:
            case Started(task) if task == WORKER:
                yield RequestReceived()
            case Started(task) if task == second:
                yield SignalReceived(signal.SIGTERM)

    state, _, calls = run(STAYS, STAYS, react, second)
    assert (state.exit_code, state.attempt) == (143, 1)
    [started] = [call for call in calls if call.startswith("run") and '"index":1}' in call]
    assert "worker-0:2222" in started
    assert "TFDIST_JOIN_ADDRESS=chief-0:2223" in started
