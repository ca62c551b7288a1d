"""When a task can be profiled."""

import pytest

from tests.support.histories import CHIEF, PS, TERMINATED, W0, W1, History, beat, up
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.supervisor.events import Exited, Profile, ProfileAccepted, RecordReceived
from tfdist_cli.launch.supervisor.profiling import check_profile
from tfdist_cli.protocol.profile_order import ProfileOrder

ORDER = ProfileOrder("a", 2.0, "profile/x")


@pytest.fixture
def job():
    """A job whose tasks are up."""
    history = History(CHIEF, W0, PS)
    history.at(1, *up(CHIEF, W0, PS), *(beat(task) for task in (CHIEF, W0, PS)))
    return history


def code_of(history, task=W0):
    """The code of the refusal; None if the task can be profiled."""
    try:
        check_profile(history.state, task)
    except UsageError as error:
        return error.code
    return None


def test_an_order_goes_to_the_task_alone(job):
    job.at(2, ProfileAccepted(W0, ORDER))
    assert job.actions == (Profile(W0, ORDER),)


@pytest.mark.parametrize("kind", ["profiled", "profile_failed"])
def test_one_profile_of_a_task_at_a_time(kind, job):
    job.at(2, ProfileAccepted(W0, ORDER))
    assert (code_of(job), code_of(job, PS)) == ("profile-in-progress", None)
    job.at(4, RecordReceived(W0, {"kind": kind, "request": "a"}))
    assert code_of(job) is None


def test_a_profile_ends_with_its_process(job):
    job.at(2, ProfileAccepted(PS, ORDER))
    job.at(3, Exited(PS, -9))
    assert code_of(job, PS) == "task-not-running"


def test_only_a_task_that_listens_is_profiled(job):
    assert code_of(History(CHIEF, W0, PS)) == "task-not-ready"
    assert code_of(job, W1) == "unknown-task"
    job.at(2, TERMINATED)
    assert (code_of(job, CHIEF), code_of(job, PS)) == ("task-not-running", None)
