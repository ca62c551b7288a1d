"""The plans of a launch: of its first attempt, and of one with other numbers of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import RunDir
from tfdist_cli.launch.run.requests import Request, taken
from tfdist_cli.launch.supervisor.events import Answered, Resized
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.plan.plan import Plan, make_plan
from tfdist_cli.plan.resources import Machine, share_out
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import resized
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId


class Planner:
    """Reserves addresses for a cluster's tasks, and makes their plan.

    Args:
        launcher: what is to start them.
        cluster: the cluster, as it was asked for.
        recipe: what they train.
        program: what they run instead.
    """

    def __init__(
        self, launcher: Launcher, cluster: Cluster, recipe: Recipe | None, program: tuple[str, ...] = ()
    ) -> None:
        self._launcher = launcher
        self._recipe = recipe
        self._program = program
        self._held = ExitStack()
        self.cluster = cluster
        self._addresses: Mapping[TaskId, Address] = {}

    @contextmanager
    def reserving(self) -> Iterator[Planner]:
        """Keeps the tasks' addresses for them until the context is left.

        Raises:
            UsageError: a task cannot run where the cluster wants it.
        """
        with self._held:
            self._reserve()
            yield self

    def plan(self, run_dir: RunDir) -> Plan:
        """Makes the plan, and writes it into the run's directory."""
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

    def changed(self, request: Request) -> Cluster:
        """The cluster as a request wants it.

        Raises:
            UsageError: it cannot be had, or could not go on from where it is.
        """
        if self._recipe is None:
            raise UsageError(
                "the run's tasks run a program of its own, and only a recipe is known to go on from a checkpoint",
                hint="stop it, and launch it anew with --set roles.ROLE.replicas=N",
            )
        if self._recipe.checkpoint is None:
            raise UsageError(
                "the recipe keeps no checkpoints: all that has been learned would be lost",
                hint="give the recipe 'checkpoint: {every_seconds: 60}', and stop and launch the run once",
            )
        wanted = resized(self.cluster, self._recipe, request.replicas)
        self._launcher.check(wanted, self._program)
        share_out(wanted, self._launcher.preview_addresses(wanted), Machine.here(), self._launcher.machines())
        return wanted

    def adopt(self, cluster: Cluster) -> None:
        """Lets the addresses go, and reserves those of another cluster.

        Raises:
            UsageError: a task cannot run where the cluster wants it.
        """
        self.cluster = cluster
        self._held.close()
        self._reserve()

    def _reserve(self) -> None:
        self._addresses = self._held.enter_context(self._launcher.reserve(self.cluster))


class Desk:
    """Answers the requests that are left in a run's directory.

    Args:
        planner: knows the cluster.
        run_dir: the directory.
    """

    def __init__(self, planner: Planner, run_dir: RunDir) -> None:
        self._planner = planner
        self._run_dir = run_dir
        self._wanted: Cluster | None = None

    def requests(self) -> Iterator[Request]:
        """Takes the requests that are there."""
        return taken(self._run_dir.path)

    def answer(self, request: Request, state: JobState) -> Resized | Answered:
        """Says what becomes of a request, as an event."""
        now = self._planner.cluster
        try:
            wanted = self._planner.changed(request)
        except UsageError as error:
            return Answered(request.number, "refused", {}, error.message, error.hint or "")
        changes = {
            role: (now.roles.count(role), wanted.roles.count(role))
            for role in request.replicas
            if now.roles.count(role) != wanted.roles.count(role)
        }
        if not changes:
            return Answered(request.number, "unchanged")
        if state.unready:
            hint = "ask again when it trains: `tfdist status` says what it does"
            return Answered(request.number, "refused", changes, f"the job cannot be resized now: {state.unready}", hint)
        if request.dry_run:
            return Answered(request.number, "possible", changes)
        self._wanted = wanted
        return Resized(request.number, changes, wanted.tasks)

    def plan(self) -> Plan:
        """The plan of the job that was resized last; none of the tasks of the one before is there any more.

        Raises:
            UsageError: somebody has taken an address meanwhile.
        """
        if self._wanted is None:
            raise RuntimeError("no request has been accepted")
        self._planner.adopt(self._wanted)
        return self._planner.plan(self._run_dir)
