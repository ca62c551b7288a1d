"""Fetching the results of executions, if a worker fails at the worst moment."""

import pytest
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.update_rules.asynchronous import _fetched


class Remote:
    """A remote value; each entry of the script is raised or returned by a fetch."""

    def __init__(self, *script, error=None):
        self.script, self._error = list(script), error

    def fetch(self):
        event = self.script.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


LOST = tf.errors.UnavailableError(None, None, "Socket closed")


def test_a_result_that_was_lost_with_its_worker_is_fetched_from_the_next_one():
    assert _fetched(Remote(LOST, LOST, "result")) == "result"


def test_an_execution_that_has_failed_is_raised():
    failed = tf.errors.InvalidArgumentError(None, None, "no")
    with pytest.raises(tf.errors.InvalidArgumentError):
        _fetched(Remote(failed, error=failed))


def test_an_execution_that_fails_while_it_is_fetched_is_raised():
    with pytest.raises(tf.errors.UnavailableError):
        _fetched(Remote(None, LOST, error=LOST))
