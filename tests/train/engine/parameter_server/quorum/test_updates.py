"""Updates with a quorum while a backup worker is lost."""

from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tests.support.compare import batches, classifier
from tests.support.local_coordinator import LocalResult, NoPause, local_engine
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.tf_compat.coordinator import wait_for


def aborted():
    """The result of a function on a worker that is lost."""
    result = LocalResult(list)
    result.fetch()
    result._status = RemoteValueStatus.ABORTED
    return result


def test_a_function_that_starts_after_its_run_ends_at_once(monkeypatch, servers):
    """It starts when its worker is back, for example in an evaluation, which then waits for it."""
    rules = Rules(Updates(mode="sync", aggregate=1))
    engine, _ = local_engine(monkeypatch, servers(1), classifier, batches(), rules)
    lost = engine._workers[1]
    start, missed = lost.create_resource, []

    def create_resource(function, args=()):
        missed.append((function, args))
        return aborted()

    monkeypatch.setattr(lost, "create_resource", create_resource)
    losses = [loss for each in engine.run(4, first=0, size=2, adapts=False, pause=NoPause()) for loss in each.losses]
    assert len(losses) == 4
    assert missed
    assert all(wait_for(start(*each), 20) for each in missed)
    monkeypatch.setattr(lost, "create_resource", start)
    assert sum(len(each.losses) for each in engine.run(4, first=4, size=2, adapts=False, pause=NoPause())) == 4
