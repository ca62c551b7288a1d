"""`python -m tfdist_cli.task.check FOLDER [TASK]`: see `tfdist_cli.check.process`, which starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from tfdist_cli.protocol.check_report import CLUSTER, RECIPE, REPORT, ReportWriter
from tfdist_cli.spec.loading.load import load_cluster, load_recipe
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.task.launcher_exit import exit_with_launcher

if __name__ == "__main__":
    exit_with_launcher()
    folder, tasks = Path(sys.argv[1]), [TaskId.parse(text) for text in sys.argv[2:]]
    writer = ReportWriter(folder / REPORT)
    writer.stage("importing TensorFlow")
    from tfdist_cli.task.check.stages import RecipeCheck

    RecipeCheck(load_cluster(folder / CLUSTER), load_recipe(folder / RECIPE), folder, writer, tasks).run()
