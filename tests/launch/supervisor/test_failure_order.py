"""The order of failures, by the tasks that their errors name."""

import pytest

from tests.support.histories import W0, W1
from tests.support.messages import messages
from tfdist_cli.launch.supervisor.failure_order import TASK_LOST, ReportedError, causes_first


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (ReportedError("UnavailableError: Connection reset by /job:worker/task:1"), W1),
        (ReportedError("CoordinationServiceError: The tasks have crashed: /job:worker/replica:0/task:1"), W1),
        (ReportedError("TrainingError: data_worker:0 at 127.0.0.1:5, and worker:1", "task-lost"), W1),
        (ReportedError("TrainingError: data_worker:0 at 127.0.0.1:5, and worker:1", "no-full-batch"), W0),
        (
            ReportedError("InvalidArgumentError: indices[0] = 9 is not in [0, 5) on /job:worker/task:1"),
            W0,
        ),
        (ReportedError("UnavailableError: /job:worker/replica:0/task:0 itself"), W0),
        (ReportedError("UnavailableError: nobody:1 and worker:99999999999"), W0),
        (ReportedError(), W0),
    ],
)
def test_only_the_error_of_a_lost_task_comes_after_that_task(error, first):
    assert causes_first((W0, W1), {W0: error})[0] == first
    lost = ReportedError("UnavailableError: worker:0")
    assert set(causes_first((W0, W1), {W0: error, W1: lost})) == {W0, W1}


def test_the_codes_of_lost_tasks_are_those_that_tasks_report():
    assert set(TASK_LOST) <= {message.code for message in messages() if "/train/" in message.place}
