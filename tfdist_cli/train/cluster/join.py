"""Joins the cluster that the environment describes, once per process, and creates TensorFlow's strategy."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, get_args

import keras
import tensorflow as tf

import tfdist_cli
from tfdist_cli.errors import ChiefLost, TrainingError, UsageError
from tfdist_cli.protocol import heartbeat, task_events
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.protocol.records import emit, records_enabled
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.updates import Balance, PlacementRule, ShardRule
from tfdist_cli.spec.strategies import Strategy, may_leave
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import keep_alive, membership, profiler
from tfdist_cli.train.cluster.all_reduce.sums import AllReduce
from tfdist_cli.train.cluster.data_service import server as data_server
from tfdist_cli.train.cluster.data_service.members import DataWorkers, Lost, end_process
from tfdist_cli.train.cluster.membership import JoinListener, Membership
from tfdist_cli.train.cluster.reachability import await_names, unreachable, wait_until_closed
from tfdist_cli.train.cluster.rendezvous import (
    NO_GROUP,
    RendezvousResult,
    announce_done,
    gather_tasks,
    report_to_chief,
    wait_until_exited,
)
from tfdist_cli.train.cluster.shared_memory import parameter_operations, tensors
from tfdist_cli.train.cluster.shared_memory.lockstep import round_operations, step_operations
from tfdist_cli.train.cluster.signals import interruptible_waits, sigterm_kept
from tfdist_cli.train.cluster.tensorflow_setup import (
    check_gpus,
    configure,
    mirrored_strategy,
    multi_worker_strategy,
    tensorflow_cluster,
    tensorflow_server,
)
from tfdist_cli.train.data.parquet import register as register_readers
from tfdist_cli.train.data.sharding.existing_dataset import make_older_datasets_again
from tfdist_cli.train.tf_compat import eager_context, exit_hooks, keras_model
from tfdist_cli.train.tf_compat.coordinator import stop_workers
from tfdist_cli.train.tf_compat.distribute import use_tables_in_conditions
from tfdist_cli.train.tf_compat.op_errors import is_of_older_resource
from tfdist_cli.train.variables import replicas
from tfdist_cli.train.variables.placement import DEFAULT_PLACEMENT, Placement, PlacementRules
from tfdist_cli.train.variables.stages import CHIEF_DEVICE, Stages

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Joins:
    """The workers of a cluster that may change, and who listens to them."""

    membership: Membership
    listener: JoinListener


@dataclass(frozen=True)
class ClusterContext:
    """This process in its cluster.

    Args:
        environment: the task's environment.
        strategy: TensorFlow's strategy.
        lifelines: file descriptors of the connections by which other tasks detect that this one exits; they stay open
            until then.
        placement: places variables on ps, on the chief of a parameter server cluster.
        stages: places layers on workers, on the chief of a model-parallel cluster.
        all_reduce: the direct all-reduce of mirrored workers; None if TensorFlow's collectives are used.
        joins: takes workers that join and leave; None if the cluster keeps its workers.
        data_workers: the data workers, on a chief that lets them leave.
    """

    environment: Environment
    strategy: tf.distribute.Strategy
    lifelines: tuple[int, ...] = ()
    placement: Placement | None = None
    stages: Stages | None = None
    all_reduce: AllReduce | None = None
    joins: Joins | None = None
    data_workers: DataWorkers | None = None

    @property
    def replicas(self) -> int:
        """How many replicas of the model the tasks of a synchronous strategy train together."""
        return self.stages.replicas if self.stages else int(self.strategy.num_replicas_in_sync)

    def computing(self) -> AbstractContextManager[None]:
        """Within it, a model's operations run where its layers are, if they are on several workers."""
        return self.stages.computing() if self.stages else nullcontext()

    def scope(self, rules: PlacementRules) -> AbstractContextManager[Any]:
        """Returns the scope to build and compile a model in.

        Args:
            rules: place variables on ps, or layers on workers; without these they have no effect.

        Raises:
            TrainingError: variables were placed by other rules.
        """
        if self.placement:
            self.placement.set_rules(rules)
        if self.stages:
            self.stages.set_rules(rules)
        elif self.environment.is_chief:
            given = {"stages": rules.stages, "place": rules.place, "balance": rules.balance != "bytes"}
            for key in (key for key, value in given.items() if value):
                log.info("%s is ignored: it applies to model_parallel, not to %s", key, self.environment.strategy)
        return self.strategy.scope()


_BARRIER = "tfdist/met"
_LEAVE_SECONDS = 10.0
_ANSWER_SECONDS = 0.5

_joined: ClusterContext | None = None
_left = False


def join(environment: Environment | None = None, lost: Lost = end_process) -> ClusterContext:
    """Joins the cluster that the environment describes; later calls return the same context.

    A ps, a worker of a parameter server cluster, or a task of `tf.data`'s service serves its chief here until the chief
    exits, and then exits.

    Args:
        environment: the task's environment; by default it is read from the environment variables.
        lost: called on a thread when a task of `tf.data`'s service exits before this one; it has to end the process.
    """
    global _joined  # noqa: PLW0603 a process joins one cluster, once
    if _joined is None:
        heartbeat.start(profiler.look_for_order)
        _send_versions()
        register_readers()
        environment = environment or Environment.read()
        if environment.serves:
            try:
                serve(environment)
            except ChiefLost as error:
                log.error("%s: %s", error.message, error.hint)  # noqa: TRY400 the traceback is of no interest
                _end_server(environment, error.exit_code)
            _end_server(environment)
        configure(environment)
        keep_alive.watch(environment.addresses.values())
        _joined = _create_context(environment, lost)
        make_older_datasets_again()
        exit_hooks.hint_at_errors(_hint_of)
    return _joined


def _hint_of(error: BaseException) -> str | None:
    if not is_of_older_resource(error):
        return None
    return (
        "a table or a variable, such as a StringLookup's, was made before this task joined its cluster: make it under "
        "`with tfdist.scope():`, or call tfdist.is_chief() first"
    )


def scope(
    *,
    placement: PlacementRule = DEFAULT_PLACEMENT.placement,
    shard: ShardRule | None = DEFAULT_PLACEMENT.shard,
    stages: int | None = None,
    place: Mapping[str, str] | None = None,
    balance: Balance = DEFAULT_PLACEMENT.balance,
) -> AbstractContextManager[Any]:
    """Returns the scope to build and compile a model in, on every task of a cluster and in a single process.

    In a ps, a worker of `parameter_server` or `model_parallel`, or a task of `tf.data`'s service, it serves the chief
    and does not return: the code after it runs on the chief only. An evaluator runs the program up to `tfdist.fit`.

    Args:
        placement: the ps for each variable: the one with the fewest bytes (`greedy`), or the next one in turn
            (`round_robin`). It has no effect without ps.
        shard: the variables that are sharded over several ps; by default those of at least 64 MiB; None for none.
        stages: the number of parts into which `model_parallel` splits the layers; by default one for each worker.
        place: the worker of each layer, for `model_parallel`: `{"encoder/*": "worker:0", "*": "worker:1"}`.
        balance: what the stages have about equal amounts of: `bytes` of weights; or `time`, that of their layers, which
            is measured when the training starts.

    Returns:
        `tf.distribute.Strategy.scope()` of the strategy that `TF_CONFIG` describes.

    Raises:
        UsageError: there is no such placement or balance, or `place` is given with `stages` or `balance`.
        TrainingError: variables were created with another placement or shard.
    """
    for name, value, choices in (("placement", placement, PlacementRule), ("balance", balance, Balance)):
        if value not in get_args(choices):
            raise UsageError(
                f"{value!r} is not a {name}", code=f"unknown-{name}", hint=f"use {' or '.join(get_args(choices))}"
            )
    if place and (stages or balance != "bytes"):
        raise UsageError(
            "place names the worker of each layer, so stages and balance have no effect",
            code="stages-and-place",
            hint="remove place, or stages and balance",
        )
    return join().scope(PlacementRules(placement, shard, stages, place, balance))


def _send_versions() -> None:
    versions = {"python": platform.python_version(), "tensorflow": tf.__version__, "keras": keras.__version__}
    emit("versions", **versions, tfdist=tfdist_cli.__version__)


def is_chief() -> bool:
    """Whether this process is the chief: the one that saves files and prints results."""
    return join().environment.is_chief


def serve(environment: Environment) -> None:
    """Runs the server of a ps, a worker or a task of `tf.data`'s service until the chief has started and exited.

    Raises:
        TrainingError: the port is in use.
        TimeoutExceeded: the chief, or a data worker's dispatcher, did not start in time.
        ChiefLost: the chief exited before its work was done, and there is no launcher to report it.
    """
    task = environment.task
    heartbeat.start(profiler.look_for_order)
    register_readers()  # pipelines that the chief makes run here
    for shared in (tensors, round_operations, step_operations, parameter_operations):
        shared.register()
    server = None
    keep_alive.watch(environment.addresses.values())
    if task.traits.server:
        module, _, function = task.traits.server.partition(":")
        server = getattr(import_module(module), function)(environment)
    else:
        await_names(_peers(environment), environment.start_timeout)
        server = tensorflow_server(environment)
    emit("state", state="serving")
    if not records_enabled():
        chief = f"{environment.chief} at {environment.addresses[environment.chief]}"
        log.info("%s serves at %s, from the start of %s to its exit", task, environment.addresses[task], chief)
    done = _wait_for_chief(environment)
    del server
    if not done and not records_enabled():  # a launcher that reads records knows about the chief itself
        raise ChiefLost(
            f"{environment.chief} exited before its work was done",
            code="chief-lost",
            hint=f"see the output of {environment.chief} for the reason; then start all tasks again: a recipe "
            "continues from its last checkpoint",
        )


def _wait_for_chief(environment: Environment) -> bool:
    """Waits until the chief has exited; on SIGTERM, a task leaves if it may. See `wait_until_exited`."""
    with interruptible_waits():
        return _wait_or_leave(environment)


def _wait_or_leave(environment: Environment) -> bool:
    task, join_address = environment.task, environment.join_address
    chief, timeout = environment.addresses[environment.chief], environment.start_timeout
    if join_address is None or not may_leave(environment.strategy, task.role):
        return wait_until_exited(task, chief, timeout)
    own = environment.addresses[task]
    try:
        with membership.interrupted_by_sigterm():
            return wait_until_exited(task, chief, timeout, partial(membership.hold, task, own, join_address))
    except membership.SigtermReceived as received:
        if unreachable(chief) is None:  # otherwise the launcher ends all tasks, since the chief has exited
            emit("state", state="leaving")
            leave = partial(data_server.leave, chief=chief) if task.traits.prepares_data else membership.leave
            if leave(task, own, join_address):
                emit("state", state="left")
                _end_server(environment, environment.leave_code)
        membership.end_by_sigterm(received.number)
        raise


def _peers(environment: Environment) -> dict[TaskId, Address]:
    """Returns the tasks that TensorFlow's server communicates with."""
    return {task: address for task, address in environment.addresses.items() if task.traits.in_tf_cluster}


def _end_server(environment: Environment, code: int = 0) -> NoReturn:
    if environment.task.traits.server:
        task_events.exited(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    exit_hooks.exit_without_destructors(code)
    sys.exit(code)


def _create_context(environment: Environment, lost: Lost) -> ClusterContext:
    if environment.task.traits.evaluates:
        return ClusterContext(environment, tf.distribute.get_strategy())
    data_workers = DataWorkers(environment.task, environment.data_service, lost)
    joins = _listen_for_joins(environment, data_workers)
    met = _rendezvous(environment)
    data_workers.watch()
    lifelines = tuple(lifeline.detach() for lifeline in met.lifelines)
    context = _CONTEXTS[environment.strategy](environment, met.links, lifelines)
    leaving = data_workers if joins and environment.data_service else None
    return replace(context, joins=joins, data_workers=leaving)


def _listen_for_joins(environment: Environment, data_workers: DataWorkers) -> Joins | None:
    """Starts to listen at the join address; a port that is in use does not prevent the training."""
    if environment.join_address is None or not environment.is_chief or not environment.traits.coordinated:
        return None
    workers = {task: environment.addresses[task] for task in _workers(environment)}
    members = Membership(workers, max(environment.max_workers, len(workers)))
    try:
        return Joins(members, JoinListener(environment.task, environment.join_address, members, data_workers))
    except TrainingError as error:
        log.warning("no worker can join: %s", error.message)
        emit("elastic", joins=False, reason=error.message, code=error.code)
        return None


def _workers(environment: Environment) -> list[TaskId]:
    """Returns the tasks that take steps for the chief."""
    return [task for task in environment.members if task.traits.trains and task != environment.chief]


_Links = Mapping[TaskId, socket.socket]


def _single(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    return ClusterContext(environment, tf.distribute.get_strategy(), lifelines)


def _mirrored(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    strategy = mirrored_strategy()
    keras_model.adapt_batches(strategy)
    return ClusterContext(environment, strategy, lifelines)


def _parameter_server(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    eager_context.keep_remote_functions()
    use_tables_in_conditions()
    keras_model.adapt(strategy, compiles=False)
    exit_hooks.stop_at_exit(partial(stop_workers, strategy))
    atexit.register(_leave_at_exit)
    return ClusterContext(environment, strategy, lifelines, Placement(strategy))


def _model_parallel(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    chief = environment.chief
    tf.config.experimental_connect_to_cluster(
        tensorflow_cluster(environment), job_name=chief.role, task_index=chief.index, protocol="grpc"
    )
    strategy = tf.distribute.OneDeviceStrategy(CHIEF_DEVICE)
    eager_context.keep_remote_functions()
    stages = Stages(strategy, len(_workers(environment)))
    keras_model.adapt(strategy, stages.computing, compiles=False)
    atexit.register(_leave_at_exit)
    return ClusterContext(environment, strategy, lifelines, stages=stages)


def _multi_worker_mirrored(environment: Environment, links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    with sigterm_kept(eager_context.await_sigterm_notice):
        strategy = multi_worker_strategy(environment)
    replicas.record_assignments(strategy, len(environment.members))
    keras_model.adapt(strategy)
    all_reduce = _make_all_reduce(environment, links)
    if all_reduce is None and len(environment.members) > 1:
        check_gpus(environment)
    atexit.register(_leave_at_exit)
    return ClusterContext(environment, strategy, lifelines, all_reduce=all_reduce)


_CONTEXTS: Mapping[Strategy, Callable[[Environment, _Links, tuple[int, ...]], ClusterContext]] = {
    "parameter_server": _parameter_server,
    "multi_worker_mirrored": _multi_worker_mirrored,
    "model_parallel": _model_parallel,
    "mirrored": _mirrored,
    "single": _single,
}
"""Creates the context for each strategy, after the rendezvous."""


def _rendezvous(environment: Environment) -> RendezvousResult:
    """Waits until every other task has started; in a single process, only those of `tf.data`'s service."""
    alone = environment.traits.one_process
    others = {
        task: address
        for task, address in environment.addresses.items()
        if task != environment.task and (task.traits.auxiliary or (task.traits.in_tf_cluster and not alone))
    }
    if alone and not others:
        return RendezvousResult()
    own, group = environment.addresses[environment.task], _all_reduce_group(environment)
    emit("state", state="waiting")
    if environment.is_chief:
        later = _later_workers(environment)
        return gather_tasks(environment.task, own, others, environment.start_timeout, group, later)
    chief = environment.chief, environment.addresses[environment.chief]
    await_names(_peers(environment), environment.start_timeout)
    return report_to_chief(environment.task, own, chief, environment.start_timeout, group)


def _later_workers(environment: Environment) -> list[TaskId]:
    """Returns the workers that may join later."""
    workers = _workers(environment) if environment.join_address else []
    missing = range(len(workers), environment.max_workers)
    return [TaskId(workers[0].role, index) for index in missing] if workers else []


def _all_reduce_group(environment: Environment) -> Mapping[TaskId, Address]:
    """Returns the tasks of the direct all-reduce; none if there are GPUs, which use NCCL, or another one is wanted."""
    several = environment.traits.together and len(environment.members) > 1
    if not several or environment.communication != "auto" or tf.config.list_physical_devices("GPU"):
        return NO_GROUP
    return {task: environment.addresses[task] for task in environment.members}


def _make_all_reduce(environment: Environment, links: Mapping[TaskId, socket.socket]) -> AllReduce | None:
    members = environment.members
    if not links:
        return None

    def answers(place: int) -> bool:
        name = f"/job:{members[place].role}/replica:0/task:{members[place].index}"
        return eager_context.answers(name, _ANSWER_SECONDS)

    places = {members.index(task): link for task, link in links.items()}
    all_reduce = AllReduce(members.index(environment.task), [str(task) for task in members], places, answers)
    all_reduce.share_memory()
    return all_reduce


def _leave_at_exit() -> None:
    """Leaves the cluster in order; not after an error, which has to fail the other tasks, too."""
    exit_hooks.end_threads()  # while the other tasks still answer
    if _joined and getattr(sys, "last_value", None) is None:
        leave_together(_joined)


def leave_together(joined: ClusterContext, *, done: bool = True) -> None:
    """Leaves the cluster: announces to serving tasks that the work is done, and waits for the other mirrored workers.

    If a task of a `MultiWorkerMirroredStrategy` exits while another one still computes, the other one fails. So all
    tasks meet in a last sum. TensorFlow's collectives may complete on one task before another one: then the chief
    announces that it has completed, and the others wait for that. The chief, which runs TensorFlow's coordination
    service, exits last.

    Args:
        joined: this task in its cluster.
        done: whether its work is done; False if it was asked to exit before.
    """
    global _left  # noqa: PLW0603 a process leaves its cluster once
    environment = joined.environment
    if _left:
        return
    _left = True
    if environment.is_chief and done:
        announce_done(joined.lifelines)
        if joined.joins:
            joined.joins.listener.announce_done()
    if not environment.traits.together or environment.task not in environment.members:
        return

    if joined.all_reduce:
        joined.all_reduce.sum(tf.ones([]))
    else:
        _barrier_by_collectives(joined)
    if environment.is_chief:
        others = {task: environment.addresses[task] for task in environment.members if task != environment.task}
        wait_until_closed(others, _LEAVE_SECONDS)


def _barrier_by_collectives(joined: ClusterContext) -> None:
    """Waits for all tasks in a sum of TensorFlow's collectives, which may complete on one task before another one."""

    @tf.function(autograph=False)
    def meet() -> Any:
        def add() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]))

        return joined.strategy.run(add)

    meet()
    if joined.environment.is_chief:
        eager_context.set_shared_value(_BARRIER, "yes")
    else:
        eager_context.shared_value(_BARRIER, _LEAVE_SECONDS)
