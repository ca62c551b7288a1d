"""The roles of tasks, one row each. A new role is a row here, and a module with what its server does if it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["chief", "worker", "ps", "evaluator", "data_dispatcher", "data_worker"]
CLUSTER_KEY = "cluster"
"""The key of `TF_CONFIG` with the tasks that TensorFlow's own cluster consists of."""
DATA_KEY = "data_service"
"""The key of `TF_CONFIG` with the tasks of tf.data's service, which TensorFlow does not read."""


@dataclass(frozen=True)
class RoleTraits:
    """What a role's tasks do, under every strategy.

    What depends on the strategy too is a function of `tfdist_cli.spec.strategies`.

    Args:
        description: what a task of the role does; the documentation of the role's key in cluster files.
        colour: the colour of the task's name on the terminal, as rich names it.
        tf_config_key: the key of `TF_CONFIG` that lists the tasks. None: no other task's `TF_CONFIG` lists them, since
            nothing connects to them, and their own one does so in `cluster`.
        trains: takes part in each training step, by driving it or by computing gradients.
        drives: drives the steps where the strategy is coordinated.
        holds_variables: holds variables and applies the updates to them.
        prepares_data: prepares batches for the tasks that train.
        evaluates: scores the checkpoints that the training saves.
        optional: the training neither needs nor awaits the task, and continues when it fails.
        outlives_training: the task has work left when the training is done.
        sees_gpus: may be given GPUs.
        joins: more tasks of the role may start while the training runs: they register themselves.
        singleton: a cluster has at most one task of the role.
        needs: another role that it is of no use without.
        server: what its tasks run while they serve, `module:function`, which is called with the task's `Environment`.
            Empty for the server of TensorFlow.
    """

    description: str
    colour: str
    tf_config_key: str | None = CLUSTER_KEY
    trains: bool = False
    drives: bool = False
    holds_variables: bool = False
    prepares_data: bool = False
    evaluates: bool = False
    optional: bool = False
    outlives_training: bool = False
    sees_gpus: bool = True
    joins: bool = False
    singleton: bool = False
    needs: Role | None = None
    server: str = ""

    @property
    def listens(self) -> bool:
        """Whether the other tasks connect to it."""
        return self.tf_config_key is not None

    @property
    def in_tf_cluster(self) -> bool:
        """Whether it is part of TensorFlow's own cluster."""
        return self.tf_config_key == CLUSTER_KEY

    @property
    def auxiliary(self) -> bool:
        """Whether it serves the tasks that train under every strategy, outside of TensorFlow's own cluster."""
        return self.listens and not self.in_tf_cluster


_DATA_SERVER = "tfdist_cli.train.cluster.data_service.server:start_server"

ROLES: Mapping[Role, RoleTraits] = {
    "chief": RoleTraits(
        "Drives the training, saves checkpoints and reports. It is the one process of `single` and `mirrored`.",
        colour="magenta",
        trains=True,
        drives=True,
        singleton=True,
    ),
    "worker": RoleTraits("Computes gradients.", colour="cyan", trains=True),
    "ps": RoleTraits(
        "Parameter server: holds variables and applies updates to them.",
        colour="yellow",
        holds_variables=True,
        sees_gpus=False,
    ),
    "evaluator": RoleTraits(
        "Scores each checkpoint while the training runs.",
        colour="green",
        tf_config_key=None,
        evaluates=True,
        optional=True,
        outlives_training=True,
        singleton=True,
    ),
    "data_dispatcher": RoleTraits(
        "Distributes the examples over the data workers, each example to one of them (tf.data service).",
        colour="blue",
        tf_config_key=DATA_KEY,
        sees_gpus=False,
        singleton=True,
        needs="data_worker",
        server=_DATA_SERVER,
    ),
    "data_worker": RoleTraits(
        "Prepares batches for the tasks that train, where the recipe has `train.share: service`.",
        colour="bright_blue",
        tf_config_key=DATA_KEY,
        prepares_data=True,
        sees_gpus=False,
        joins=True,
        needs="data_dispatcher",
        server=_DATA_SERVER,
    ),
}
"""Every role, in the order in which clusters list their tasks."""
