"""Where and when a training saves checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.train.checkpoint.bucket import open_checkpoints, scratch_folder
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.writer import Asynchronous
from tfdist_cli.train.trainer.arguments import check_counts


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and when a training saves checkpoints.

    Args:
        folder: the folder of the checkpoints.
        every_steps: save a checkpoint every so many global steps.
        every_seconds: save a checkpoint every so many seconds.
        asynchronous: whether training continues while a checkpoint is written; see `CheckpointWriter`.
        full_every: each so many-th checkpoint is full; see `CheckpointWriter`.
        push_tables: where the rows of dynamic tables are pushed after each checkpoint; None for nowhere.
    """

    folder: CheckpointFolder
    every_steps: int | None = None
    every_seconds: float | None = None
    asynchronous: Asynchronous = "auto"
    full_every: int = 1
    push_tables: Location | None = None


@dataclass(frozen=True)
class Checkpoints:
    """Where and when `fit` saves checkpoints. Training resumes from the newest checkpoint in the folder.

    Args:
        dir: the folder of the checkpoints, on this machine or in a storage service: `s3://bucket/run`.
        every_steps: save a checkpoint every so many global steps.
        every_seconds: save a checkpoint every so many seconds.
        keep: how many of the newest checkpoints to keep.
        asynchronous: whether training continues while a checkpoint is written. `auto`: if no task needs more than 1 GiB
            of memory for a second copy of its variables.
        full_every: each so many-th checkpoint is full. The others write only the rows of `DynamicEmbedding` tables that
            have changed since the checkpoint before, and all other variables. 1: all are full.
        push_tables: a folder, on this machine or in a storage service, to which the rows of `DynamicEmbedding` tables
            are pushed after each checkpoint, for servers that follow the training with `tfdist.TableReader`.
    """

    dir: str | Path
    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    asynchronous: Asynchronous = "auto"
    full_every: int = 1
    push_tables: str | Path | None = None

    def __post_init__(self) -> None:
        check_counts(1, every_steps=self.every_steps, keep=self.keep, full_every=self.full_every)
        checked_location(self.dir)
        if self.push_tables is not None:
            checked_location(self.push_tables)

    def config(self, run_dir: Path | None = None, *, reads: bool = False) -> CheckpointConfig:
        """Returns the configuration of one training's checkpoints.

        Args:
            run_dir: the run's directory, where checkpoints are until they are uploaded.
            reads: whether this process only reads them.

        Raises:
            UsageError: the library for the storage service is not installed.
        """
        at = checked_location(self.dir)
        scratch = scratch_folder(at, run_dir) if isinstance(at, Url) and not reads else None
        folder = open_checkpoints(at, self.keep, scratch)
        push = None if self.push_tables is None else checked_location(self.push_tables)
        return CheckpointConfig(folder, self.every_steps, self.every_seconds, self.asynchronous, self.full_every, push)
