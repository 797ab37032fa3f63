"""Requests that are queued, in order of service. Requests that end while they wait are dropped when they are met.

Plain state of the scheduler's; step thread only.
"""

from __future__ import annotations

import heapq

from core.request import Request, RequestStatus

_MIN_GARBAGE = 64


class WaitingQueue:
    """A heap by (rank, arrival). Its length counts requests that still wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request) -> None:
        """Queue a WAITING request; a preempted or loaded one comes before all that arrived after it."""
        heapq.heappush(self._heap, (request.schedule_key, request))
        self._num_waiting += 1

    def pop(self) -> Request | None:
        """Take the head; None when nobody waits."""
        while self._heap:
            _key, request = heapq.heappop(self._heap)
            if request.status is RequestStatus.WAITING:
                self._num_waiting -= 1
                return request
        return None

    def drop_one(self) -> None:
        """A queued request is ending: its entry stays until it is met, or until such entries are the greater part."""
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + _MIN_GARBAGE:
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)

    def head_arrival_s(self) -> float | None:
        """Arrival of the head of the queue; None when nobody waits."""
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1].arrival_s if self._heap else None
