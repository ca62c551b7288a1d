"""The plans of a launch: for its first attempt, and for the attempts after a resize."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import RunDir
from tfdist_cli.launch.run.requests import Request, take_requests
from tfdist_cli.launch.supervisor.events import RequestAnswered, ResizeAccepted
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, make_plan
from tfdist_cli.plan.resources import allocate
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import resized
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId


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
        return plan

    def resized(self, request: Request) -> Cluster:
        """The cluster with the numbers of tasks that a request asks for.

        Raises:
            UsageError: that cluster cannot run here, or the training could not resume from a checkpoint.
        """
        if self._recipe is None:
            raise UsageError(
                "the run's tasks run a program: only a recipe can resume from a checkpoint",
                code="no-checkpoints",
                hint="stop the run, and launch it again with --set roles.ROLE.replicas=N",
            )
        if self._recipe.checkpoint is None:
            raise UsageError(
                "the recipe saves no checkpoints: the training would start from the beginning",
                code="no-checkpoints",
                hint="add 'checkpoint: {every_seconds: 60}' to the recipe, then stop and launch the run once",
            )
        wanted = resized(self.cluster, self._recipe, request.replicas)
        self._launcher.check(wanted, self._program)
        allocate(wanted, self._launcher.preview_addresses(wanted), Machine.here(), self._launcher.machines())
        return wanted

    def switch_to(self, cluster: Cluster) -> None:
        """Releases the reserved addresses, and reserves those of another cluster.

        Raises:
            UsageError: a task cannot run at its configured address.
        """
        self.cluster = cluster
        self._reservation.close()
        self._reserve()

    def _reserve(self) -> None:
        self._addresses = self._reservation.enter_context(self._launcher.reserve(self.cluster))


class RequestHandler:
    """Answers the requests in a run's directory.

    Args:
        planner: has the cluster.
        run_dir: the directory.
    """

    def __init__(self, planner: Planner, run_dir: RunDir) -> None:
        self._planner = planner
        self._run_dir = run_dir
        self._wanted: Cluster | None = None

    def requests(self) -> Iterator[Request]:
        """Takes the current requests out of the directory."""
        return take_requests(self._run_dir.path)

    def answer(self, request: Request, state: JobState) -> ResizeAccepted | RequestAnswered:
        """Answers a request with an event."""
        now = self._planner.cluster
        try:
            wanted = self._planner.resized(request)
        except UsageError as error:
            return RequestAnswered(request.number, "refused", {}, error.message, error.hint or "", error.code)
        changes = {
            role: (now.roles.count(role), wanted.roles.count(role))
            for role in request.replicas
            if now.roles.count(role) != wanted.roles.count(role)
        }
        if not changes:
            return RequestAnswered(request.number, "unchanged")
        if state.not_resizable_because:
            reason = f"the job cannot be resized now: {state.not_resizable_because}"
            hint = "try again while it trains; `tfdist status` shows its state"
            return RequestAnswered(request.number, "refused", changes, reason, hint, "job-not-resizable")
        if request.dry_run:
            return RequestAnswered(request.number, "possible", changes)
        self._wanted = wanted
        return ResizeAccepted(request.number, changes, wanted.tasks)

    def plan(self) -> Plan:
        """The plan of the last accepted resize; all earlier tasks have exited.

        Raises:
            UsageError: another program has taken an address in the meantime.
        """
        if self._wanted is None:
            raise RuntimeError("no request has been accepted")
        self._planner.switch_to(self._wanted)
        return self._planner.plan(self._run_dir)
