"""The programs that can track a run: a table of their traits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrackerName = Literal["tensorboard", "mlflow", "wandb", "csv"]


@dataclass(frozen=True)
class TrackerTraits:
    """What a tracker needs.

    Args:
        title: its name for people.
        module: the Python module that has to be installed; empty for none.
        extra: the extra of tfdist-cli that installs it.
        server: the environment variable with the address of its server.
        local_needs: a module without which it writes to a server only; empty if there is none.
    """

    title: str
    module: str = ""
    extra: str = ""
    server: str = ""
    local_needs: str = ""


TRACKERS: dict[str, TrackerTraits] = {
    "tensorboard": TrackerTraits("TensorBoard", "tensorboard", "cpu"),
    "mlflow": TrackerTraits("MLflow", "mlflow", "mlflow", "MLFLOW_TRACKING_URI", "sqlalchemy"),
    "wandb": TrackerTraits("Weights & Biases", "wandb", "wandb"),
    "csv": TrackerTraits("CSV files"),
}
