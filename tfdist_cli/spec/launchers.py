"""The launchers: one row for each, with the traits that the rest of tfdist asks for and the path of its class.

To add a launcher, write its class in a folder of `tfdist_cli/launch` and add a row here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import PydanticKnownError


@dataclass(frozen=True)
class LauncherTraits:
    """What is known of a launcher without importing it.

    Args:
        implementation: the launcher's class, `package.module:Class`. It is imported on first use.
        summary: what starts the tasks, for the reference of the cluster file.
        local_processes: whether tasks are processes of this machine, with its files and its Python modules.
        uses_hosts: whether the launcher chooses one of the cluster file's `hosts` for each task that has no address.
            The task's address is known only after that.
        scheduler: the name of the system that chooses each task's machine, and its GPUs there, after the plan is made;
            empty where the plan decides.
        scheduled_cpus: cores that the scheduler gives to a task whose role names none; None when that is not known.
        containers: whether each task runs in a container. It sees only its own GPUs, and CUDA counts them from 0.
            Containers that no scheduler places run on this machine.
        dns_suffixes: ends of the host names that tasks may have for each other. No proxy is used for them.
        jobs: the class of the scheduler's jobs that continue when the launcher is killed; see `SchedulerJobs` in
            `tfdist_cli/launch/registry.py`. Empty if there are no such jobs.
        restarts_tasks: whether one task can be started again while the others run. Otherwise all tasks start and end
            together, except for those that join and leave.
        tasks_join: whether a task that the launch did not have can be started, or one of its tasks ended, while the
            others run.
        profiles_tasks: whether the launcher can hand a running task the order to profile itself, a file in its folder.
        shares_run_dir: whether the tasks read files from the run directory, which all machines have to share.
        run_lasts: whether a run can go on with a plan that has other addresses, once all tasks have exited.
    """

    implementation: str
    summary: str
    local_processes: bool = False
    uses_hosts: bool = False
    scheduler: str = ""
    scheduled_cpus: int | None = None
    containers: bool = False
    dns_suffixes: tuple[str, ...] = ()
    jobs: str = ""
    restarts_tasks: bool = True
    tasks_join: bool = False
    profiles_tasks: bool = False
    shares_run_dir: bool = False
    run_lasts: bool = False


LAUNCHERS: dict[str, LauncherTraits] = {
    "local": LauncherTraits(
        "tfdist_cli.launch.local.launcher:LocalLauncher",
        summary="this machine",
        local_processes=True,
        tasks_join=True,
        profiles_tasks=True,
        run_lasts=True,
    ),
    "ssh": LauncherTraits(
        "tfdist_cli.launch.ssh.launcher:SshLauncher",
        summary="the machines that `hosts` names",
        uses_hosts=True,
        tasks_join=True,
        profiles_tasks=True,
    ),
    "slurm": LauncherTraits(
        "tfdist_cli.launch.slurm.launcher:SlurmLauncher",
        summary="Slurm's `srun`",
        scheduler="Slurm",
        scheduled_cpus=1,
        jobs="tfdist_cli.launch.slurm.jobs:SlurmJobs",
        shares_run_dir=True,
        restarts_tasks=False,
        tasks_join=True,
        profiles_tasks=True,
    ),
    "compose": LauncherTraits(
        "tfdist_cli.launch.compose.launcher:ComposeLauncher",
        summary="containers of this machine",
        containers=True,
        tasks_join=True,
        profiles_tasks=True,
        run_lasts=True,
    ),
    "kubernetes": LauncherTraits(
        "tfdist_cli.launch.kubernetes.launcher:KubernetesLauncher",
        summary="pods, which kubectl starts",
        scheduler="Kubernetes",
        containers=True,
        tasks_join=True,
        run_lasts=True,
        # A TFJob's operator writes names with these suffixes into TF_CONFIG.
        dns_suffixes=(".svc", ".cluster.local"),
    ),
    "spark": LauncherTraits(
        "tfdist_cli.launch.spark.launcher:SparkLauncher",
        summary="a barrier stage of Spark",
        profiles_tasks=True,
    ),
    "ray": LauncherTraits(
        "tfdist_cli.launch.ray.launcher:RayLauncher",
        summary="actors of Ray",
        profiles_tasks=True,
    ),
}
"""The launchers by the names that a cluster file and `--on` give them."""


def check_launcher(name: object) -> str:
    """Returns the name of a launcher.

    Raises:
        PydanticKnownError: `literal_error`, as for a value that is not in a `Literal`.
    """
    if isinstance(name, str) and name in LAUNCHERS:
        return name
    *most, last = map(repr, LAUNCHERS)
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})


def launcher_names() -> str:
    """Returns the names as they stand in a sentence: `local, ssh or slurm`."""
    *most, last = LAUNCHERS
    return f"{', '.join(most)} or {last}"
