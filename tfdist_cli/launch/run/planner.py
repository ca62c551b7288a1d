"""The plans of a launch: for its first attempt, and after each change of the numbers of its tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import RunDir
from tfdist_cli.launch.run.requests import ProfileRequest, Request, ScaleRequest, take_requests
from tfdist_cli.launch.supervisor.events import ProfileAccepted, ProfileRefused, RequestAnswered, ResizeAccepted
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.profiling import check_profile
from tfdist_cli.launch.supervisor.state import NOT_TRAINING_YET, JobState
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, PlannedTask, make_plan
from tfdist_cli.plan.resources import Resources, allocate
from tfdist_cli.protocol.profile_order import PROFILE_SUFFIX, PROFILES, ProfileOrder
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.loading.load import resized
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.strategies import joins_cluster, may_join, may_leave
from tfdist_cli.spec.task_id import TaskId

Answer = ResizeAccepted | RequestAnswered | ProfileAccepted | ProfileRefused


@dataclass(frozen=True)
class Change:
    """How the running tasks become those of another cluster.

    Args:
        joins: the tasks that have to start.
        leaves: the tasks that have to end.
        needs_checkpoint: why all tasks have to start anew; None if the others can continue. It is empty where the tasks
            of a role never join or leave.
    """

    joins: tuple[TaskId, ...]
    leaves: tuple[TaskId, ...]
    needs_checkpoint: str | None = None


class Planner:
    """Reserves addresses for a cluster's tasks, and makes their plan.

    Args:
        launcher: starts the tasks.
        cluster: the cluster.
        recipe: the recipe that the tasks train; None if they run a program.
        program: the program that they run instead.
    """

    def __init__(
        self, launcher: Launcher, cluster: Cluster, recipe: Recipe | None, program: tuple[str, ...] = ()
    ) -> None:
        self._launcher = launcher
        self._recipe = recipe
        self._program = program
        self._reservation = ExitStack()
        self.cluster = cluster
        self._addresses: Mapping[TaskId, Address] = {}
        self._planned: Mapping[TaskId, PlannedTask] = {}
        """The tasks of this attempt, also those that are in none of its later plans."""

    @contextmanager
    def reserving(self) -> Iterator[Planner]:
        """Reserves the tasks' addresses until the context is left.

        Raises:
            UsageError: a task cannot run at its configured address.
        """
        with self._reservation:
            self._reserve()
            yield self

    def plan(self, run_dir: RunDir) -> Plan:
        """Makes the plan, and writes it to the run's directory."""
        cluster, recipe = run_dir.resolve(self.cluster, self._recipe, self._addresses)
        plan = make_plan(
            cluster,
            recipe,
            addresses=self._addresses,
            run_dir=run_dir.path,
            machine=Machine.here(),
            machines=self._launcher.machines(),
            command=self._program,
        )
        run_dir.save(plan)
        self._planned = {**self._planned, **{planned.task: planned for planned in plan.tasks}}
        return plan

    def extended_plan(self, run_dir: RunDir, cluster: Cluster, present: Iterable[TaskId]) -> Plan:
        """Plans for another cluster from now on, with the addresses that are reserved already.

        Args:
            run_dir: the run's directory, in which the plan of that cluster is written.
            cluster: the cluster.
            present: the tasks that run.

        Returns:
            The plan, which also has the tasks that run and are not in the cluster: they leave, or stay if nobody can
            replace them.
        """
        self.cluster = cluster
        unlisted = {task: Address(LOOPBACK) for task in cluster.tasks if task not in self._addresses}
        self._addresses = {**self._addresses, **unlisted}
        plan = self.plan(run_dir)
        others = (self._planned[task] for task in present if task not in cluster.tasks)
        return replace(plan, tasks=(*plan.tasks, *others))

    def resized(self, request: ScaleRequest) -> Cluster:
        """The cluster with the numbers of tasks that a request asks for.

        Raises:
            UsageError: that cluster cannot run here.
        """
        return resized(self.cluster, self._recipe, request.replicas)

    def change(self, wanted: Cluster, roles: Container[Role], state: JobState) -> Change:
        """How the running tasks of some roles become those of another cluster.

        Raises:
            UsageError: that cluster cannot run here, or the training could not resume from a checkpoint, which it would
                need.
        """
        self._launcher.check(wanted, self._program)
        joins = tuple(task for task in wanted.tasks if task.role in roles and task not in state.present)
        leaves = tuple(task for task in state.present if task.role in roles and task not in wanted.tasks)
        previewed = self._launcher.preview_addresses(wanted)
        addresses = {task: self._addresses.get(task, previewed[task]) for task in wanted.tasks}
        share = allocate(wanted, addresses, Machine.here(), self._launcher.machines())
        change = Change(joins, leaves)
        change = replace(change, needs_checkpoint=next(self._obstacles(change, share, state), None))
        if change.needs_checkpoint is not None:
            self._check_resumable(change.needs_checkpoint)
        return change

    def _obstacles(self, change: Change, share: Mapping[TaskId, Resources], state: JobState) -> Iterator[str]:
        """Why a change needs a checkpoint; empty where tasks of a role never join or leave."""
        strategy, traits = self.cluster.strategy, self.cluster.launcher_traits
        if not all(may_join(strategy, task.role) for task in change.joins):
            yield ""
        if not all(may_leave(strategy, task.role) for task in change.leaves):
            yield ""
        if not traits.tasks_join:
            yield f"{self.cluster.launcher} starts and ends all tasks together"
        for task in change.joins:
            if task.traits.listens and task not in self._addresses:
                yield f"the launch has reserved no address for {task}: 'max' in the cluster file reserves more"
        if change.joins and any(
            share[task].gpus != self._planned[task].resources.gpus for task in share if task in state.present
        ):
            yield "the GPUs are divided anew"
        registered = any(joins_cluster(strategy, task.role) for task in (*change.joins, *change.leaves))
        registered = registered or any(task.traits.listens for task in change.leaves)
        if registered and state.takes_no_workers_because:
            yield state.takes_no_workers_because

    def _check_resumable(self, obstacle: str) -> None:
        """Checks that the training can resume from a checkpoint.

        Args:
            obstacle: why it would have to; empty where it always does.

        Raises:
            UsageError: it cannot.
        """
        if self._recipe is not None and self._recipe.checkpoint is not None:
            return
        if obstacle == NOT_TRAINING_YET:
            raise UsageError(
                f"workers cannot join or leave yet: {obstacle}",
                code="training-not-begun",
                hint="try again when the training takes steps",
            )
        because = f"{obstacle}; " if obstacle else ""
        if self._recipe is None:
            raise UsageError(
                f"{because}the run's tasks run a program: only a recipe can resume from a checkpoint",
                code="no-checkpoints",
                hint="stop the run, and launch it again with --set roles.ROLE.replicas=N",
            )
        raise UsageError(
            f"{because}the recipe saves no checkpoints: the training would start from the beginning",
            code="no-checkpoints",
            hint="add 'checkpoint: {every_seconds: 60}' to the recipe, then stop and launch the run once",
        )

    def switch_to(self, cluster: Cluster) -> None:
        """Releases the reserved addresses, and reserves those of another cluster.

        Raises:
            UsageError: a task cannot run at its configured address.
        """
        self.cluster, self._planned = cluster, {}
        self._reservation.close()
        self._reserve()

    def _reserve(self) -> None:
        self._addresses = self._reservation.enter_context(self._launcher.reserve(self.cluster))


def _local_time() -> datetime:
    return datetime.now(timezone.utc).astimezone()


def _check_launcher(cluster: Cluster) -> None:
    """Checks that the launcher of a cluster can profile tasks.

    Raises:
        UsageError: it cannot.
    """
    if not cluster.launcher_traits.profiles_tasks:
        raise UsageError(
            f"the launcher {cluster.launcher} cannot profile a running task",
            code="launcher-cannot-profile",
            hint="launch the same cluster with another launcher, such as --on local",
        )


def _check_limits(changes: Mapping[Role, tuple[int, int]], state: JobState) -> None:
    """Checks that the model can be trained with so many tasks: otherwise all of them would end.

    Raises:
        UsageError: it cannot.
    """
    for role, (_, wanted) in changes.items():
        most, reason = state.limits.get(role, (wanted, ""))
        if wanted > most:
            raise UsageError(
                f"{role}={wanted} is too many, this training can have {most} at most: {reason}",
                code="too-many-tasks",
                hint=f"tfdist scale {role}={most}",
            )


class RequestHandler:
    """Answers the requests in a run's directory.

    Args:
        planner: has the cluster.
        run_dir: the directory.
        clock: the time of day.
    """

    def __init__(self, planner: Planner, run_dir: RunDir, clock: Callable[[], datetime] = _local_time) -> None:
        self._planner = planner
        self._run_dir = run_dir
        self._clock = clock
        self._wanted: Cluster | None = None
        self._before: Cluster | None = None
        self.extended: Plan | None = None
        """The plan after the last accepted change of a running job."""

    def requests(self) -> Iterator[Request]:
        """Takes the current requests out of the directory."""
        return take_requests(self._run_dir.path)

    def answer(self, request: Request, state: JobState) -> Answer:
        """Answers a request with an event."""
        if isinstance(request, ProfileRequest):
            return self._answer_profile(request, state)
        try:
            return self._answer_scale(request, state)
        except UsageError as error:
            return RequestAnswered(request.request, "refused", {}, error.message, error.hint or "", error.code)

    def _answer_profile(self, request: ProfileRequest, state: JobState) -> ProfileAccepted | ProfileRefused:
        task = TaskId.parse(request.task)
        try:
            _check_launcher(self._planner.cluster)
            check_profile(state, task)
        except UsageError as error:
            return ProfileRefused(request.request, task, error.message, error.hint or "", error.code)
        path = PROFILES / f"{self._clock():%Y_%m_%d_%H_%M_%S}" / f"{task.slug}{PROFILE_SUFFIX}"
        return ProfileAccepted(task, ProfileOrder(request.request, request.seconds, path.as_posix()))

    def _answer_scale(self, request: ScaleRequest, state: JobState) -> ResizeAccepted | RequestAnswered:
        wanted, now = self._planner.resized(request), Counter(task.role for task in state.present)
        changes = {
            role: (now[role], wanted.roles.count(role))
            for role in request.replicas
            if now[role] != wanted.roles.count(role)
        }
        if not changes:
            return RequestAnswered(request.request, "unchanged")
        if state.not_resizable_because:
            reason = f"the job cannot be resized now: {state.not_resizable_because}"
            hint = "try again while it trains; `tfdist status` shows its state"
            return RequestAnswered(request.request, "refused", changes, reason, hint, "job-not-resizable")
        _check_limits(changes, state)
        change = self._planner.change(wanted, changes, state)
        because, is_live = change.needs_checkpoint or "", change.needs_checkpoint is None
        if request.dry_run:
            return RequestAnswered(request.request, "possible", changes, because, live=is_live)
        self._wanted, self._before = wanted, self._planner.cluster
        if not is_live:
            return ResizeAccepted(request.request, changes, wanted.tasks, because=because)
        self.extended = self._planner.extended_plan(self._run_dir, wanted, state.present)
        return ResizeAccepted(request.request, changes, wanted.tasks, change.joins, change.leaves)

    def plan(self, tasks: Iterable[TaskId]) -> Plan:
        """The plan of the last accepted resize, or of before it if that has failed; all earlier tasks have exited.

        Args:
            tasks: every task of it.

        Raises:
            UsageError: another program has taken an address in the meantime.
        """
        if self._wanted is None or self._before is None:
            raise RuntimeError("no request has been accepted")
        self._planner.switch_to(self._wanted if set(tasks) == set(self._wanted.tasks) else self._before)
        return self._planner.plan(self._run_dir)
