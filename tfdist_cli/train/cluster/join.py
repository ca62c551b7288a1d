"""Environment → strategy: joining the cluster, once for each process."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn, get_args

import keras
import tensorflow as tf

from tfdist_cli.errors import ChiefLost, TrainingError, UsageError
from tfdist_cli.protocol import heartbeat
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.protocol.records import emit, records_enabled
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.updates import PlacementRule, ShardRule
from tfdist_cli.spec.strategies import Strategy
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import data_service, keep_alive
from tfdist_cli.train.cluster.all_reduce import AllReduce
from tfdist_cli.train.cluster.gpus import has_library, tell_missing_gpus
from tfdist_cli.train.cluster.reachability import await_names, wait_until_gone
from tfdist_cli.train.cluster.rendezvous import (
    NOBODY,
    RendezvousResult,
    gather,
    outlast,
    port_taken,
    report_in,
    say_done,
)
from tfdist_cli.train.cluster.runtime import configure_runtime
from tfdist_cli.train.tf_compat import eager_context, keras_model
from tfdist_cli.train.variables import replicas
from tfdist_cli.train.variables.placement import DEFAULT_PLACEMENT, Placement, PlacementRules

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class ClusterContext:
    """This process in its cluster.

    Args:
        environment: what it was told.
        strategy: TensorFlow's strategy.
        lifelines: the connections by which the other tasks see that this one lives: open files that nobody closes
            before the process is gone.
        placement: what deals variables out to ps, on their chief.
        mesh: what sums up over the tasks that train with equal rights; None where TensorFlow's collectives do.
    """

    environment: Environment
    strategy: tf.distribute.Strategy
    lifelines: tuple[int, ...] = ()
    placement: Placement | None = None
    mesh: AllReduce | None = None

    def scope(self, rules: PlacementRules) -> AbstractContextManager[Any]:
        """The scope to build and compile a model in.

        Args:
            rules: which ps its variables live on, where there are any.

        Raises:
            TrainingError: variables have been made by other rules, or are to be of a type that cannot be broadcast.
        """
        if self.placement:
            self.placement.set_rules(rules)
        mirrored = isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if mirrored and keras.config.dtype_policy().variable_dtype == "bfloat16":
            raise TrainingError(
                "mirrored workers cannot have weights of bfloat16, which TensorFlow does not broadcast",
                code="bfloat16-weights",
                hint="take the mixed_bfloat16 policy, whose weights are float32",
            )
        return self.strategy.scope()


_MET = "tfdist/met"
_GPUS = "tfdist/gpus"
_LEAVE_SECONDS = 10.0
_ANSWER_SECONDS = 0.5

_joined: ClusterContext | None = None
_left = False


def join(
    environment: Environment | None = None, lost: Callable[[TrainingError], Any] = data_service.end_process
) -> ClusterContext:
    """Joins the cluster that the environment describes; the second call returns what the first one did.

    A ps, a worker of parameter servers, or a task of tf.data's service serves its chief here until the chief has ended,
    and then ends the process.

    Args:
        environment: what the process was told; by default its environment variables say it.
        lost: called on a thread when a task of tf.data's service has ended before this one; to end the process.
    """
    global _joined  # noqa: PLW0603 a process joins one cluster, once
    if _joined is None:
        heartbeat.start()
        environment = environment or Environment.read()
        if environment.serves:
            try:
                serve(environment)
            except ChiefLost as error:
                log.error("%s: %s", error.message, error.hint)  # noqa: TRY400 where it came from is of no interest
                _end_server(environment, error.exit_code)
            _end_server(environment)
        _configure(environment)
        keep_alive.watch(environment.addresses.values())
        _joined = _meet(environment)
        if not environment.task.traits.evaluates:
            data_service.watch(environment, lost)
    return _joined


def scope(
    *, placement: PlacementRule = DEFAULT_PLACEMENT.placement, shard: ShardRule | None = DEFAULT_PLACEMENT.shard
) -> AbstractContextManager[Any]:
    """The scope to build and compile a model in, on every task of the cluster and in one process alike.

    In a ps, a worker of parameter servers, or a task of tf.data's service it serves the chief and does not return: what
    follows runs on the chief.

    Args:
        placement: the ps that a variable is put on: the one with the fewest bytes (`greedy`), or the next in turn
            (`round_robin`). It has no meaning where there are no ps.
        shard: which variables are spread over several ps, by default those of at least 64 MiB; None for none.

    Returns:
        `tf.distribute.Strategy.scope()` of the strategy that `TF_CONFIG` asks for.

    Raises:
        UsageError: there is no such placement.
        TrainingError: variables have been made with another placement or shard.
    """
    if placement not in get_args(PlacementRule):
        raise UsageError(f"{placement!r} is no placement", hint=f"use {' or '.join(get_args(PlacementRule))}")
    return join().scope(PlacementRules(placement, shard))


def is_chief() -> bool:
    """Whether this process is the one to save files and print results."""
    return join().environment.is_chief


def serve(environment: Environment) -> None:
    """Runs the server of a ps, a worker or a task of tf.data's service until the chief has come and gone.

    Raises:
        TrainingError: the port is taken.
        TimeoutExceeded: the chief, or a data worker's dispatcher, has not come up in time.
        ChiefLost: the chief has gone before its work was done, and no launcher sees to that.
    """
    task = environment.task
    heartbeat.start()
    server = None
    keep_alive.watch(environment.addresses.values())
    if task.traits.server:
        module, _, function = task.traits.server.partition(":")
        server = getattr(import_module(module), function)(environment)
    else:
        await_names(_peers(environment), environment.start_timeout)
        server = _tensorflow_server(environment)
    emit("state", state="serving")
    done = outlast(task, environment.addresses[environment.chief], environment.start_timeout)
    del server
    if not done and not records_enabled():  # a launcher that listens knows of the chief itself
        raise ChiefLost(
            f"{environment.chief} has ended before its work was done",
            code="chief-lost",
            hint=f"{environment.chief}'s own output says why; start all tasks again, and a recipe goes on from its "
            "last checkpoint",
        )


def _peers(environment: Environment) -> dict[TaskId, Address]:
    """The tasks that a server of TensorFlow's speaks to."""
    return {task: address for task, address in environment.addresses.items() if task.traits.in_tf_cluster}


def _end_server(environment: Environment, code: int = 0) -> NoReturn:
    if environment.task.traits.server:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _configure(environment: Environment) -> tf.compat.v1.ConfigProto:
    """Prepares TensorFlow for this task, before it is used."""
    config = configure_runtime(environment.gpu_memory, exchanges=environment.traits.coordinated)
    tell_missing_gpus(environment.task, environment.gpus)
    return config


def _tensorflow_server(environment: Environment) -> tf.distribute.Server:
    cluster: dict[str, list[str]] = {}
    for task, address in environment.addresses.items():
        if task.traits.in_tf_cluster:
            cluster.setdefault(task.role, []).append(str(address))
    own, task = environment.addresses[environment.task], environment.task
    config = _configure(environment)
    try:
        return tf.distribute.Server(cluster, job_name=task.role, task_index=task.index, protocol="grpc", config=config)
    except tf.errors.OpError as error:
        raise port_taken(task, own, error.message) from error


def _meet(environment: Environment) -> ClusterContext:
    if environment.task.traits.evaluates:
        return ClusterContext(environment, tf.distribute.get_strategy())
    met = _come_together(environment)
    lifelines = tuple(lifeline.detach() for lifeline in met.lifelines)
    return _CONTEXTS[environment.strategy](environment, met.links, lifelines)


_Links = Mapping[TaskId, socket.socket]


def _single(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    return ClusterContext(environment, tf.distribute.get_strategy(), lifelines)


def _mirrored(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    strategy = _mirrored_strategy()
    keras_model.adapt_batches(strategy)
    return ClusterContext(environment, strategy, lifelines)


def _parameter_server(environment: Environment, _links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    eager_context.keep_remote_functions()
    keras_model.adapt(strategy)
    atexit.register(_leave_at_exit)
    return ClusterContext(environment, strategy, lifelines, Placement(strategy))


def _multi_worker_mirrored(environment: Environment, links: _Links, lifelines: tuple[int, ...]) -> ClusterContext:
    strategy = _mirrored_workers(environment)
    replicas.record_assignments(strategy)
    keras_model.adapt(strategy)
    mesh = _mesh(environment, links)
    if mesh is None and len(environment.members) > 1:
        _check_gpus(environment)
    atexit.register(_leave_at_exit)
    return ClusterContext(environment, strategy, lifelines, mesh=mesh)


_CONTEXTS: Mapping[Strategy, Callable[[Environment, _Links, tuple[int, ...]], ClusterContext]] = {
    "parameter_server": _parameter_server,
    "multi_worker_mirrored": _multi_worker_mirrored,
    "mirrored": _mirrored,
    "single": _single,
}
"""What makes TensorFlow's strategy, once the tasks have met."""


def _come_together(environment: Environment) -> RendezvousResult:
    """Waits until every other task that listens is there: in one process, those of tf.data's service alone."""
    alone = environment.traits.one_process
    others = {
        task: address
        for task, address in environment.addresses.items()
        if task != environment.task and (task.traits.auxiliary or (task.traits.in_tf_cluster and not alone))
    }
    if alone and not others:
        return RendezvousResult()
    own, circle = environment.addresses[environment.task], _circle(environment)
    emit("state", state="waiting")
    if environment.is_chief:
        return gather(environment.task, own, others, environment.start_timeout, circle)
    chief = environment.chief, environment.addresses[environment.chief]
    await_names(_peers(environment), environment.start_timeout)
    return report_in(environment.task, own, chief, environment.start_timeout, circle)


def _circle(environment: Environment) -> Mapping[TaskId, Address]:
    """The tasks that sum up over connections of their own; none where there are GPUs, which have NCCL."""
    several = environment.traits.together and len(environment.members) > 1
    if not several or tf.config.list_physical_devices("GPU"):
        return NOBODY
    return {task: environment.addresses[task] for task in environment.members}


def _mesh(environment: Environment, links: Mapping[TaskId, socket.socket]) -> AllReduce | None:
    members = environment.members
    if not links:
        return None

    def answers(place: int) -> bool:
        name = f"/job:{members[place].role}/replica:0/task:{members[place].index}"
        return eager_context.answers(name, _ANSWER_SECONDS)

    places = {members.index(task): link for task, link in links.items()}
    return AllReduce(members.index(environment.task), [str(task) for task in members], places, answers)


def sums_by() -> tf.distribute.experimental.CommunicationOptions:
    """How TensorFlow sums over replicas: between GPUs by NCCL, or by its own ring where NCCL is not installed."""
    ways = tf.distribute.experimental.CommunicationImplementation
    way = ways.AUTO
    if tf.config.list_physical_devices("GPU") and not has_library("nccl"):
        log.warning(
            "NCCL is not installed: sums between GPUs pass through the CPU, which is slower; "
            "`pip install 'tensorflow[and-cuda]'` installs it"
        )
        way = ways.RING
    return tf.distribute.experimental.CommunicationOptions(implementation=way)


def _mirrored_strategy() -> tf.distribute.Strategy:
    """One task on all GPUs that it sees. `MirroredStrategy` always takes NCCL for several."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    options = sums_by() if gpus > 1 else None
    if options is None or options.implementation is tf.distribute.experimental.CommunicationImplementation.AUTO:
        return tf.distribute.MirroredStrategy()
    alone = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({}), num_accelerators={"GPU": gpus}
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=alone, communication_options=options)


def _mirrored_workers(environment: Environment) -> tf.distribute.Strategy:
    members = Counter(str(task.role) for task in environment.members)
    leader = f"/job:{environment.chief.role}/replica:0/task:0"
    eager_context.configure_coordination_service(leader, dict(members), environment.start_timeout)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=sums_by())
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise TrainingError(
            "TensorFlow was in use before the cluster was joined",
            hint="enter tfdist.scope(), or call tfdist.is_chief(), before anything makes a tensor, dataset or variable",
        ) from error


def _check_gpus(environment: Environment) -> None:
    """Compares the numbers of GPUs: TensorFlow takes all tasks to have as many replicas as this one.

    Raises:
        TrainingError: another task sees more GPUs, or fewer, than this one.
    """
    own = len(tf.config.list_physical_devices("GPU"))
    eager_context.set_shared_value(f"{_GPUS}/{environment.task}", str(own))
    for task in environment.members:
        theirs = int(eager_context.shared_value(f"{_GPUS}/{task}", environment.start_timeout))
        if theirs != own:
            raise TrainingError(
                f"{environment.task} sees {own} GPU{'s' * (own != 1)}, and {task} sees {theirs}",
                hint="give each task that trains the same number of GPUs: roles.worker.gpus, and roles.chief.gpus",
            )


def _leave_at_exit() -> None:
    """Leaves the others in order, unless the program is ending with an error: the others then end of that."""
    if _joined and getattr(sys, "last_value", None) is None:
        leave_together(_joined)


def leave_together(joined: ClusterContext, *, done: bool = True) -> None:
    """Tells those that serve this task that it is done; waits until the others of its strategy can do without it.

    A task of a `MultiWorkerMirroredStrategy` that is gone while another still computes makes that one fail. So they
    meet in a sum; with TensorFlow's collectives the chief then says that its part of it is over, which the others wait
    for. The chief stays, with TensorFlow's coordination service, until they are gone.

    Args:
        joined: this task in its cluster.
        done: whether its work is done; it may have been told to end before.
    """
    global _left  # noqa: PLW0603 a process leaves its cluster once
    environment = joined.environment
    if _left:
        return
    _left = True
    if environment.is_chief and done:
        say_done(joined.lifelines)
    if not environment.traits.together or environment.task not in environment.members:
        return

    if joined.mesh:
        joined.mesh.sum(tf.ones([]))
    else:
        _meet_by_collectives(joined)
    if environment.is_chief:
        others = {task: environment.addresses[task] for task in environment.members if task != environment.task}
        wait_until_gone(others, _LEAVE_SECONDS)


def _meet_by_collectives(joined: ClusterContext) -> None:
    """Meets the others in a sum of TensorFlow's, which is over on one task before it is on another."""

    @tf.function(autograph=False)
    def meet() -> Any:
        def add() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]))

        return joined.strategy.run(add)

    meet()
    if joined.environment.is_chief:
        eager_context.set_shared_value(_MET, "yes")
    else:
        eager_context.shared_value(_MET, _LEAVE_SECONDS)
