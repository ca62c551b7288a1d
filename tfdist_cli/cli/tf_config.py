"""`tfdist tf-config`: prints the TF_CONFIG of one task, for other schedulers."""

from __future__ import annotations

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import ClusterArgument, SetOption, TaskOption
from tfdist_cli.plan.plan import fixed_addresses
from tfdist_cli.plan.tf_config import tf_config_json
from tfdist_cli.spec.loading.load import load_cluster

EXAMPLES = (
    "tfdist tf-config cluster.yaml --task worker:1",
    'TF_CONFIG="$(tfdist tf-config cluster.yaml --task chief)" python train.py',
)


def tf_config(cluster: ClusterArgument, task: TaskOption, overrides: SetOption = None) -> None:
    """Print the TF_CONFIG of one task.

    Tasks without hosts get this machine's ports from 2222 on. The ports do not depend on --task.
    """
    spec = load_cluster(cluster, overrides or ())
    console.write(tf_config_json(fixed_addresses(spec), spec.task(task)))
