"""Which LoRA adapters may run, and which are in memory. Requests whose adapter has no place in a step wait here.

The scheduler asks at admission and tells who starts and ends. Requests without an adapter never come here. Step thread only.
"""

from __future__ import annotations

from core.errors import InvalidInputError
from core.request import Request, RequestStatus
from core.step import AdapterLoad, AdapterStore

MAX_KNOWN = 1024  # adapters whose folders are known, in memory or not


class AdapterGate:
    """At most max_loras different adapters run at a time; at most max_cpu_loras are in memory, the least recently used go first.

    A request that may not start is parked. When an adapter's last running request ends, or a load has ended, those that can go on
    return to their place in the queue. Younger requests whose adapters run already may pass a parked one, but no more than
    max_passes of them: then none starts before the oldest parked one has, and the running adapters drain.
    """

    def __init__(self, store: AdapterStore | None, max_loras: int, max_cpu_loras: int, max_passes: int) -> None:
        """store None: the model takes no adapters."""
        self.max_loras = max_loras if store is not None else 0
        self.num_loads = 0
        self._store = store
        self._max_cpu_loras = max_cpu_loras
        self._max_passes = max_passes
        self._path_by_adapter: dict[str, str] = {}
        self._resident: dict[str, None] = {}  # least recently used first
        self._loading: set[str] = set()
        self._num_running: dict[str, int] = {}
        self._parked: dict[str, list[Request]] = {}
        self._first: Request | None = None  # of the parked ones, in order of service
        self._num_parked = 0
        self._num_passes = 0  # requests that were admitted while _first waited
        self._released: list[Request] = []
        self._lost: list[AdapterLoad] = []  # parked requests' adapters that cannot be had

    # -- which adapters there are --------------------------------------------------------------------------------------
    def is_known(self, adapter: str) -> bool:
        """Whether requests may ask for it."""
        return adapter in self._path_by_adapter

    def add(self, adapter: str, path: str) -> bool:
        """Make an adapter known and bring it into memory. True when it is there already, else poll() tells the outcome.

        Raises InvalidInputError when there is no place for it.
        """
        if not self.max_loras:
            raise InvalidInputError("engine.max_loras", 0, "1 or more, on a node that is to serve adapters")
        if len(self._path_by_adapter) >= MAX_KNOWN and adapter not in self._path_by_adapter:
            raise InvalidInputError("adapters", f"{MAX_KNOWN} already", f"at most {MAX_KNOWN} at a time")
        self._path_by_adapter[adapter] = path
        if adapter in self._resident:
            return True
        self._start_load(adapter)
        return False

    def forget(self, adapter: str) -> None:
        """No new request will name it. It stays in memory until its running requests have ended."""
        self._path_by_adapter.pop(adapter, None)
        if adapter not in self._num_running:
            self._drop(adapter)

    def forget_all(self) -> None:
        """Whoever knew the folders is gone."""
        for adapter in list(self._path_by_adapter):
            self.forget(adapter)

    def poll(self) -> list[AdapterLoad]:
        """Loads that have ended, and adapters that cannot be had although requests wait for them. Drops what has no room."""
        ended = self._store.poll_loads() if self._store is not None and self._loading else []
        for load in ended:
            self._loading.discard(load.adapter)
            if not load.error:
                self.num_loads += 1
                self._resident[load.adapter] = None
                if load.adapter not in self._path_by_adapter:  # forgotten meanwhile
                    self._drop(load.adapter)
                self._evict()
        if ended:
            self._release()
        lost, self._lost = self._lost, []
        return ended + lost

    # -- the scheduler's questions -------------------------------------------------------------------------------------
    def may_start(self, request: Request) -> bool:
        """Whether a waiting request with an adapter may be admitted now. False: it is to be parked."""
        adapter = request.adapter
        if self._num_passes >= self._max_passes and not self._is_first(request):
            return False
        if adapter not in self._num_running and len(self._num_running) >= self.max_loras:
            return False
        if adapter in self._resident:
            return True
        self._start_load(adapter)
        return False

    def park(self, request: Request) -> None:
        """Keep a request (its status is PARKED) until it may try again."""
        self._parked.setdefault(request.adapter, []).append(request)
        self._num_parked += 1
        if self._first is None or request.schedule_key < self._first.schedule_key:
            self._first, self._num_passes = request, 0

    def discard(self, request: Request) -> None:
        """A parked request has ended."""
        self._num_parked -= 1
        if request is self._first:
            self._release()

    def start(self, request: Request) -> None:
        """A request of an adapter runs from now on."""
        adapter = request.adapter
        self._num_running[adapter] = self._num_running.get(adapter, 0) + 1
        self._resident[adapter] = self._resident.pop(adapter)
        if not self._is_first(request):
            self._num_passes += 1

    def find(self, adapter: str) -> object:
        """What the runner is to be given for a request that starts; None without an adapter."""
        return self._store.find(adapter) if adapter and self._store is not None else None

    def end(self, request: Request) -> None:
        """It does not run any more: it ended, or was preempted."""
        adapter = request.adapter
        self._num_running[adapter] -= 1
        if self._num_running[adapter] == 0:
            del self._num_running[adapter]
            if adapter not in self._path_by_adapter:
                self._drop(adapter)
            self._release()

    def take_released(self) -> list[Request]:
        """Requests that may try again, each once."""
        released = [request for request in self._released if request.status is RequestStatus.PARKED]
        self._released = []
        self._num_parked -= len(released)
        return released

    @property
    def has_released(self) -> bool:
        """Whether take_released has something."""
        return bool(self._released)

    @property
    def num_parked(self) -> int:
        """Requests that wait here."""
        return self._num_parked

    @property
    def first_parked(self) -> Request | None:
        """The one of them whose turn comes first."""
        return self._first

    @property
    def num_resident(self) -> int:
        """Adapters in memory."""
        return len(self._resident)

    @property
    def has_news(self) -> bool:
        """Whether poll() has something, or will have without any request."""
        return bool(self._loading or self._lost)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _is_first(self, request: Request) -> bool:
        """Whether no parked request comes before this one."""
        return self._first is None or request.schedule_key <= self._first.schedule_key

    def _release(self) -> None:
        """Let go on whoever can: groups of running adapters, and the oldest others for which there are places."""
        groups: dict[str, list[Request]] = {}
        for adapter, group in self._parked.items():
            if alive := [request for request in group if request.status is RequestStatus.PARKED]:
                groups[adapter] = alive
        first_by_adapter = {adapter: min(group, key=_order) for adapter, group in groups.items()}
        num_places = self.max_loras - len(self._num_running)
        for adapter in sorted(groups, key=lambda adapter: first_by_adapter[adapter].schedule_key):
            is_running = adapter in self._num_running
            if adapter in self._loading or (not is_running and num_places <= 0):
                continue
            num_places -= not is_running
            self._released += groups.pop(adapter)
            del first_by_adapter[adapter]
        self._parked = groups
        first = min(first_by_adapter.values(), key=_order, default=None)
        if first is not self._first:
            self._first, self._num_passes = first, 0

    def _start_load(self, adapter: str) -> None:
        path = self._path_by_adapter.get(adapter)
        if path is None or self._store is None:
            self._lost.append(AdapterLoad(adapter, "the adapter is not loaded here"))
        elif adapter not in self._loading:
            self._loading.add(adapter)
            self._store.start_load(adapter, path)

    def _evict(self) -> None:
        while len(self._resident) > self._max_cpu_loras:
            self._drop(next(adapter for adapter in self._resident if adapter not in self._num_running))

    def _drop(self, adapter: str) -> None:
        if adapter in self._resident and self._store is not None:
            del self._resident[adapter]
            self._store.drop(adapter)


def _order(request: Request) -> tuple[float, int]:
    return request.schedule_key
