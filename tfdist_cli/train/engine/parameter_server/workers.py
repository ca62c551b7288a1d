"""The workers that an engine trains with: others may join while it trains, and some may leave.

A worker that joins is added to TensorFlow's cluster, and opens its data, in a thread beside the training. Between two
executions the update rule takes those that are ready (`Workers.take_changes`), and lets go of those that leave: a
worker finishes what it has begun, all of which counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.protocol.records import emit
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster import keep_alive
from tfdist_cli.train.cluster.membership import LEAVE, Membership, Refusal, Request, Requests, last_worker, next_request
from tfdist_cli.train.cluster.shared_memory.tensors import meeting
from tfdist_cli.train.engine.base import Pause, WorkersLost
from tfdist_cli.train.tf_compat.coordinator import (
    admit_worker,
    create_worker,
    failure_of,
    is_dead,
    retire_worker,
    set_iterator,
    wait_for,
    workers_of,
)
from tfdist_cli.train.tf_compat.eager_context import running_cluster
from tfdist_cli.train.tf_compat.op_errors import shortened

_CHECK_SECONDS = 0.2
_COMPANION_SECONDS = 0.3
"""How long workers that change together may be apart."""
_ATTEMPTS = 5
"""How often a worker is added to the cluster if tasks do not answer: one may be lost, and not noticed yet."""
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class WorkerData:
    """The data of all workers at one division.

    Args:
        open: creates an iterator on a worker, by its place among all of them and their number → its `RemoteValue`.
        iterators: the iterators of all workers, an argument of functions that are scheduled.
    """

    open: Callable[[Any, int, int], Any]
    iterators: Any


Prepare = Callable[[Sequence[Any], Any], None]
"""Prepares a training with some workers; also receives what `WorkerData.iterators` is."""


@dataclass
class _Newcomer:
    """A worker that is ready to train.

    Args:
        request: its request.
        worker: TensorFlow's worker.
        data: the division of the data that its iterator belongs to; None if the training has ended meanwhile.
        opened: its iterator.
    """

    request: Request
    worker: Any
    data: WorkerData | None
    opened: Any


class Workers(Sequence[Any]):
    """The workers that take part now, TensorFlow's objects, in the order of their indices.

    Args:
        coordinator: TensorFlow's.
        membership: which workers may join and leave; None if they stay as they are.
    """

    def __init__(self, coordinator: Any, membership: Membership | None = None) -> None:
        self._coordinator = coordinator
        self._elastic = membership is not None
        self._membership = membership or Membership({}, 0)
        for role in {task.role for task in self._membership.members}:
            running_cluster(role)  # before a worker is lost, for which the coordinator would wait in its own way
        self._active: list[Any] = sorted(workers_of(coordinator), key=lambda worker: worker.worker_index)
        self._data: WorkerData | None = None
        self._leaving: deque[Request] = deque()
        self._ready: deque[_Newcomer] = deque()
        self._prepared: set[Request] = set()
        """The requests of those that are ready, or will be."""
        self._changes = threading.Lock()
        """Held while a worker is added to TensorFlow's cluster, or removed."""
        self._added: dict[int, Any] = {}
        """The worker that was added last, by index: a task may have restarted before its first worker is dropped."""
        self._joined: dict[str, Request] = {}
        """Workers that have joined, and have not finished an execution yet."""
        self._apart: set[int] = set()
        """The indices of workers that share no memory with the ps, those included that are about to join."""
        self._begun = False
        self._drop_gone()
        self._why_not: Callable[[int], Refusal | None] = lambda _: None
        self._prepare: Prepare | None = None
        self._ps: Sequence[str] = ()
        """The ps that shared memory with all workers at the start."""
        self._met: dict[int, Any] = {}
        """The answer of each worker that was asked whether it does; a worker that is started again is asked again."""
        self._goes_on = threading.Event()
        """Set while the training goes on with the workers as they are."""
        self._steps = 0
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._active)

    def __getitem__(self, place: Any) -> Any:
        return self._active[place]

    @property
    def most(self) -> int:
        """How many workers there may be."""
        return max(self._membership.most, len(self))

    @property
    def indices(self) -> tuple[int, ...]:
        """The workers' indices."""
        return tuple(worker.worker_index for worker in self._active)

    def share_memory(self, ps: Sequence[str]) -> bool:
        """Lets workers and ps open each other's memory; returns whether all of them can.

        Args:
            ps: the devices of the ps.
        """
        self._ps = ps
        for worker in self._active:
            self._meet(worker)
        try:
            shared = False not in [bool(answer.fetch()) for answer in self._met.values()]
        except tf.errors.OpError as error:  # a worker was lost, or a task is no tfdist's
            log.debug("workers and ps share no memory: %s", error)
            shared = False
        if not shared:
            self._ps = ()
            self._met.clear()
        return shared

    def share_memory_among(self, workers: Sequence[Any]) -> bool:
        """Whether some workers share memory with all ps."""
        return bool(self._ps) and self._apart.isdisjoint(worker.worker_index for worker in workers)

    @property
    def share_memory_now(self) -> bool:
        """Whether all workers share memory with all ps, those included that are about to join."""
        return bool(self._ps) and not self._apart

    def _meet(self, worker: Any) -> None:
        self._met[worker.worker_index] = worker.create_resource(meeting(worker.worker_index, self._ps))

    def resume(self, taken: Mapping[str, int]) -> None:
        """Continues to count the steps of each worker, if a checkpoint has those of the same workers."""
        self._taken = Counter(taken) if set(taken) == set(self.names) else Counter()

    def taken(self, worker: Any) -> int:
        """Returns the steps that a worker has taken; one that has joined begins with the mean of the others."""
        return self._taken[f"worker:{worker.worker_index}"]

    @property
    def steps_taken(self) -> dict[str, int]:
        """The same by the workers' names."""
        return {name: self._taken[name] for name in self.names}

    def divide(self, data: WorkerData) -> None:
        """The data is divided among the workers as they are now."""
        self._data = data

    @property
    def names(self) -> list[str]:
        """The workers' names."""
        return [f"worker:{index}" for index in self.indices]

    @property
    def are_current(self) -> bool:
        """Whether they are those of the cluster: while they did not train, none has left, and none has joined."""
        return not self._gone() and set(map(id, workers_of(self._coordinator))) == set(map(id, self._active))

    def _gone(self) -> list[Any]:
        members = {task.index for task in self._membership.members}
        return [worker for worker in self._active if self._elastic and worker.worker_index not in members]

    def start(self) -> None:
        """A training is about to begin: workers that have left while none ran are let go of."""
        if self._elastic:
            self._membership.start()
            self._drop_gone()

    def _drop_gone(self) -> None:
        """Lets go of them in this thread: a function that is traced meanwhile would be sent to them, too."""
        for worker in self._gone():
            self._active.remove(worker)
            finished = retire_worker(self._coordinator, worker, None)
            _await_last_function(worker, finished)
            self._drop(worker, TaskId(next(iter(self._membership.members)).role, worker.worker_index))

    def begin(self, why_not: Callable[[int], Refusal | None], prepare: Prepare | None = None) -> None:
        """The training has begun; from now on other workers may join it.

        Args:
            why_not: returns why it cannot continue with a number of workers.
            prepare: called in another thread, before workers are taken or let go, with the workers after that.
        """
        if self._begun or not self._elastic:
            return
        self._begun, self._why_not, self._prepare = True, why_not, prepare
        refusal = why_not(self.most)
        why = {"reason": refusal.reason, "code": refusal.code} if refusal else {}
        emit("elastic", joins=refusal is None, **why)
        self._membership.begin(refusal)
        if refusal is None:
            threading.Thread(
                target=self._handle_requests, args=(self._membership.requests,), name="tfdist-membership", daemon=True
            ).start()

    def end(self) -> None:
        """The training has ended; the workers stay as they are."""
        self._begun = False
        if self._elastic:
            self._membership.end()
        self._data = None  # the data may be large, and a worker that is started again has nothing to open

    @property
    def change(self) -> bool:
        """Whether workers wait to be taken, or let go."""
        return bool(self._leaving or self._ready)

    def take_changes(self) -> list[Any]:
        """Lets go of workers that leave, and takes those that have joined, between two executions.

        Returns:
            Those that have joined. Each runs functions of its own only until it is admitted, see `admit`.
        """
        self._goes_on.clear()
        while self._leaving:
            request = self._leaving.popleft()
            if self._membership.is_pending(request):
                self._let_go(request)
        taken = []
        while self._ready:
            newcomer = self._ready.popleft()
            self._prepared.discard(newcomer.request)
            if self._membership.is_pending(newcomer.request):
                taken.append(self._take(newcomer))
            else:
                threading.Thread(target=self._drop, args=(newcomer.worker, newcomer.request.task)).start()
        return taken

    def admit(self, worker: Any) -> None:
        """Lets a worker that has joined take what any worker may take."""
        admit_worker(self._coordinator, worker)

    def add_execution(self, steps: Mapping[str, int], done: int) -> None:
        """Counts an execution.

        Args:
            steps: the steps of each worker in it.
            done: global steps done by then.
        """
        self._steps = done
        self._taken.update(steps)
        self._goes_on.set()
        for name in steps.keys() & self._joined.keys():
            request = self._joined.pop(name)
            took = round(time.monotonic() - request.at, 3)
            log.info("%s has joined the training at step %d", name, done)
            emit("joined", worker=name, step=done, took=took)

    def _take(self, newcomer: _Newcomer) -> Any:
        worker, index = newcomer.worker, newcomer.worker.worker_index
        self._taken[f"worker:{index}"] = sum(self.steps_taken.values()) // max(1, len(self))
        self._active = sorted([*self._active, worker], key=lambda each: each.worker_index)
        self._added[index] = worker
        if self._data and newcomer.data is not self._data:
            newcomer.opened = self._data.open(worker, *self._place(worker))
        if self._data and newcomer.opened is not None:
            set_iterator(self._data.iterators, index, newcomer.opened)
        self._joined[str(newcomer.request.task)] = newcomer.request
        self._membership.grant(newcomer.request)
        return worker

    def _place(self, worker: Any) -> tuple[int, int]:
        """The place of a worker among all of them, and their number; it may still have to be taken."""
        indices = sorted({*self.indices, worker.worker_index})
        return indices.index(worker.worker_index), len(indices)

    def _let_go(self, request: Request) -> None:
        index = request.task.index
        worker = next((worker for worker in self._active if worker.worker_index == index), None)
        others = [each for each in self._active if each is not worker and not is_dead(each)]
        if worker is None:
            self._membership.grant(request)
        elif refusal := self._why_not(len(self) - 1) if others else last_worker(request.task):
            self._membership.refuse(request, refusal)
        else:
            self._active = [each for each in self._active if each is not worker]
            self._apart.discard(index)
            self._joined.pop(str(request.task), None)
            finished = retire_worker(self._coordinator, worker, self._data and self._data.iterators)
            threading.Thread(target=self._finish, args=(request, worker, finished), daemon=True).start()

    def _finish(self, request: Request, worker: Any, finished: threading.Event) -> None:
        """Waits for the last function of a worker that leaves, in a thread of its own."""
        _await_last_function(worker, finished)
        # An update of TensorFlow's cluster makes the ps compile again what they do not run just then.
        while self._prepare and self._begun and not self._goes_on.wait(_CHECK_SECONDS):
            pass
        self._drop(worker, request.task)
        log.info("%s has left the training", request.task)
        emit("left", worker=str(request.task), step=self._steps)
        self._membership.grant(request)

    def _drop(self, worker: Any, task: TaskId) -> None:
        """Removes a worker from TensorFlow's cluster, unless its task has joined anew since it was added."""
        worker.stop()
        with self._changes:
            if self._added.get(task.index, worker) is not worker:
                return
            self._added.pop(task.index, None)
            self._apart.discard(task.index)
            try:
                running_cluster(task.role).remove(task.index, self._lost())
            except tf.errors.OpError as error:
                log.debug("the cluster is updated later: %s", error)

    def _handle_requests(self, requests: Requests) -> None:
        """Runs in a thread as long as the training."""
        while (request := requests.get()) is not None:
            self._handle(request, requests)  # while the thread waits, it refers to no data that may be closed

    def _handle(self, request: Request | None, requests: Requests) -> None:
        """Prepares for the worker that asks, and for those that ask meanwhile."""
        newcomers: list[_Newcomer] = []
        leaving: list[Request] = []
        while request is not None:
            if request.asks == LEAVE:
                leaving.append(request)
            elif newcomer := self._newcomer(request):
                newcomers.append(newcomer)
            request = next_request(requests, _COMPANION_SECONDS if self._prepare else 0)  # one preparation is enough
            if request is None:
                self._prepare_for(newcomers, leaving)
                request = next_request(requests, 0)  # asked meanwhile
        self._ready.extend(newcomers)
        self._leaving.extend(leaving)

    def _prepare_for(self, newcomers: Sequence[_Newcomer], leaving: Sequence[Request]) -> None:
        gone = {request.task.index for request in [*self._leaving, *leaving]}
        waiting = [each for each in [*self._ready, *newcomers] if self._membership.is_pending(each.request)]
        after = [*self._active, *(newcomer.worker for newcomer in waiting)]
        after = sorted((each for each in after if each.worker_index not in gone), key=lambda each: each.worker_index)
        if self._prepare and self._data and after:
            self._prepare(after, self._data.iterators)

    def _newcomer(self, request: Request) -> _Newcomer | None:
        """Lets a worker open its data; None if it does not ask any more, or cannot join."""
        if request in self._prepared or not self._membership.is_pending(request):
            return None
        self._prepared.add(request)
        joined = self._join(request)
        if isinstance(joined, Refusal):
            self._prepared.discard(request)
            log.warning("%s cannot join: %s", request.task, joined.reason)
            emit("join_refused", worker=str(request.task), reason=joined.reason, code=joined.code)
            self._membership.refuse(request, joined)
            return None
        return joined

    def _join(self, request: Request) -> _Newcomer | Refusal:
        """Adds a worker to TensorFlow's cluster, and opens its data."""
        task = request.task
        with self._changes:
            error = self._add(task, str(request.address))
            if error:
                return _not_reached(task, error)
            worker = self._added[task.index] = create_worker(self._coordinator, task.index)
        if self._ps:
            self._meet(worker)  # before it opens its data
            if _is_true(self._met[task.index], worker):
                self._apart.discard(task.index)
            else:
                self._apart.add(task.index)
        keep_alive.watch([request.address])
        data = self._data
        opened = data.open(worker, *self._place(worker)) if data else None
        while opened is not None and not wait_for(opened, _CHECK_SECONDS):
            if is_dead(worker):
                self._drop(worker, task)
                return _not_reached(task, "it exited")
        failure = failure_of(opened) if opened is not None else None
        if failure is not None:
            self._drop(worker, task)
            return Refusal(
                f"the data of {task} cannot be opened: {failure}",
                code="data-not-opened",
                hint="let the data function work for any number of shards",
            )
        if data and opened is not None:
            set_iterator(data.iterators, task.index, opened)
        return _Newcomer(request, worker, data, opened)

    def _add(self, task: TaskId, address: str) -> str:
        """Adds a task to TensorFlow's cluster; returns why that is not possible."""
        pause, reason = threading.Event(), ""
        for _ in range(_ATTEMPTS):
            try:
                running_cluster(task.role).add(task.index, address, self._lost())
            except (ConnectionError, tf.errors.OpError) as error:
                reason = shortened(error).message if isinstance(error, tf.errors.OpError) else str(error)
                pause.wait(_CHECK_SECONDS)  # the coordinator notices a lost worker by the functions that it runs there
            else:
                return ""
        return reason

    @property
    def all_lost(self) -> bool:
        """Whether each worker has failed, and none is back yet."""
        return len(self._lost()) == len(self._active)

    def end_if_lost(self, pause: Pause) -> None:
        """Ends a run of synchronous workers whose process is to end, and that waits for workers that are lost.

        Raises:
            WorkersLost: it is so.
        """
        if pause.ends() and (lost := self._lost()):
            raise WorkersLost([f"worker:{index}" for index in lost])

    def _lost(self) -> list[int]:
        return [worker.worker_index for worker in self._active if is_dead(worker)]


def _await_last_function(worker: Any, finished: threading.Event) -> None:
    while not finished.wait(_CHECK_SECONDS) and not is_dead(worker):
        pass


def _is_true(answer: Any, worker: Any) -> bool:
    """Waits for a function's answer; False if its worker is lost, or the function fails."""
    while not wait_for(answer, _CHECK_SECONDS):
        if is_dead(worker):
            return False
    return failure_of(answer) is None and bool(answer.fetch())


def _not_reached(task: TaskId, reason: str) -> Refusal:
    return Refusal(
        f"{task} cannot be reached: {reason}",
        code="worker-not-reached",
        hint="let the chief and the ps reach the address of the new worker",
    )


def places(workers: Workers) -> Iterator[tuple[Any, int, int]]:
    """Yields each worker, its place among all of them, and their number."""
    yield from ((worker, place, len(workers)) for place, worker in enumerate(workers))
