"""TensorFlow in a task: how it is configured, its server, and the strategies of mirrored workers."""

from __future__ import annotations

import logging
from collections import Counter

import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.strategies import Communication
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.gpus import has_library, log_missing_gpus
from tfdist_cli.train.cluster.rendezvous import port_in_use
from tfdist_cli.train.cluster.runtime import configure_runtime
from tfdist_cli.train.tf_compat import eager_context
from tfdist_cli.train.tf_compat.distribute import convert_variables_to_numbers

_GPUS = "tfdist/gpus"
log = logging.getLogger("tfdist")


def configure(environment: Environment) -> tf.compat.v1.ConfigProto:
    """Configures TensorFlow for this task before it is initialized."""
    config = configure_runtime(environment.gpu_memory, exchanges=environment.traits.coordinated)
    log_missing_gpus(environment.task, environment.gpus)
    if environment.communication == "nccl":
        _check_nccl(environment.task)
    return config


def _check_nccl(task: TaskId) -> None:
    """Checks that this task can sum by NCCL.

    Raises:
        UsageError: it has no GPU, or NCCL is not installed.
    """
    hint = "use communication: ring, or auto"
    if not tf.config.list_physical_devices("GPU"):
        raise UsageError(f"{task} has no GPU, which communication: nccl needs", code="nccl-without-gpu", hint=hint)
    if not has_library("nccl"):
        raise UsageError(
            f"NCCL is not installed where {task} runs",
            code="nccl-not-installed",
            hint=f"pip install 'tensorflow[and-cuda]', or {hint}",
        )


def tensorflow_cluster(environment: Environment) -> tf.train.ClusterSpec:
    """Returns the tasks that TensorFlow connects, for its servers."""
    cluster: dict[str, list[str]] = {}
    for task, address in environment.addresses.items():
        if task.traits.in_tf_cluster:
            cluster.setdefault(task.role, []).append(str(address))
    return tf.train.ClusterSpec(cluster)


def tensorflow_server(environment: Environment) -> tf.distribute.Server:
    """Configures TensorFlow, and starts the server of a task that a chief gives work.

    Raises:
        TrainingError: the port is in use.
    """
    cluster = tensorflow_cluster(environment)
    own, task = environment.addresses[environment.task], environment.task
    config = configure(environment)
    try:
        return tf.distribute.Server(cluster, job_name=task.role, task_index=task.index, protocol="grpc", config=config)
    except tf.errors.OpError as error:
        raise port_in_use(task, own, error.message) from error


def communication_options(wanted: Communication = "auto") -> tf.distribute.experimental.CommunicationOptions:
    """Returns how TensorFlow sums over replicas: by default between GPUs by NCCL, or by its ring without NCCL.

    Args:
        wanted: `ring`, `nccl`, or `auto` for the default.
    """
    implementations = tf.distribute.experimental.CommunicationImplementation
    chosen = implementations[wanted.upper()]
    if wanted == "auto" and tf.config.list_physical_devices("GPU") and not has_library("nccl"):
        log.warning(
            "NCCL is not installed: sums between GPUs pass through the CPU, which is slower; "
            "`pip install 'tensorflow[and-cuda]'` installs it"
        )
        chosen = implementations.RING
    return tf.distribute.experimental.CommunicationOptions(implementation=chosen)


def mirrored_strategy() -> tf.distribute.Strategy:
    """Returns the strategy of one task on all its GPUs. `MirroredStrategy` always uses NCCL for several GPUs."""
    convert_variables_to_numbers()
    gpus = len(tf.config.list_physical_devices("GPU"))
    options = communication_options() if gpus > 1 else None
    if options is None or options.implementation is tf.distribute.experimental.CommunicationImplementation.AUTO:
        return tf.distribute.MirroredStrategy()
    alone = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({}), num_accelerators={"GPU": gpus}
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=alone, communication_options=options)


def multi_worker_strategy(environment: Environment) -> tf.distribute.Strategy:
    """Returns the strategy of several tasks, which TensorFlow's coordination service connects."""
    members = Counter(str(task.role) for task in environment.members)
    convert_variables_to_numbers()
    leader = f"/job:{environment.chief.role}/replica:0/task:0"
    eager_context.configure_late_collectives(f"/job:{environment.task.role}/task:{environment.task.index}", leader)
    eager_context.configure_coordination_service(leader, dict(members), environment.start_timeout)
    options = communication_options(environment.communication)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def check_gpus(environment: Environment) -> None:
    """Checks that all tasks see the same number of GPUs. TensorFlow assumes that all have as many as this one.

    Raises:
        TrainingError: another task sees another number of GPUs.
    """
    own = len(tf.config.list_physical_devices("GPU"))
    eager_context.set_shared_value(f"{_GPUS}/{environment.task}", str(own))
    for task in environment.members:
        theirs = int(eager_context.shared_value(f"{_GPUS}/{task}", environment.start_timeout))
        if theirs != own:
            raise TrainingError(
                f"{environment.task} sees {own} GPU{'s' * (own != 1)}, and {task} sees {theirs}",
                code="gpu-counts-differ",
                hint="give each task that trains the same number of GPUs: roles.worker.gpus, and roles.chief.gpus",
            )
