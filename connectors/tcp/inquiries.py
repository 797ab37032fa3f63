"""What is known of each request's chain: which of its blocks are here, and which at a source that has been asked.

The step thread asks for one answer per request and step; sources answer on threads of their own. Answers age: after a while the
sources are asked again, in the background.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Collection, Sequence

from connectors.tcp.frames import NO_LEASE
from connectors.tcp.source import Inquiry, Session, Source

_REFRESH_S = 1.0
_MAX_REQUESTS = 4096


class Inquiries:
    """The latest inquiry of each request, at most _MAX_REQUESTS of them."""

    def __init__(self, stored: Callable[[], Collection[bytes]], lookup_wait_s: float) -> None:
        """stored: the hashes that this node holds itself."""
        self._stored = stored
        self._lookup_wait_s = lookup_wait_s
        self._inquiry_by_request: dict[str, Inquiry] = {}
        self._next_lease_name = itertools.count(1)
        self._mutex = threading.Lock()  # of changes to the dict

    # -- step thread ---------------------------------------------------------------------------------------------------
    def count_prefix(self, request_id: str, block_hashes: Sequence[bytes], first: int, sources: tuple[Source, ...]) -> int | None:
        """How many blocks from the first-th on can be had without a hole; None: a source may still answer, within a moment."""
        inquiry = self._inquiry_by_request.get(request_id)
        if inquiry is None and not sources:
            return self._count(block_hashes, first, None)
        now_s = time.monotonic()
        must_wait = False
        if inquiry is not None:
            inquiry.last_asked_s = now_s
            must_wait = inquiry.must_wait  # before the count, which then has whatever was answered by now
        count = self._count(block_hashes, first, inquiry)
        end = first + count
        if end >= len(block_hashes):
            return count
        if inquiry is not None and _has_asked(inquiry, block_hashes, end):
            if not inquiry.pending and now_s - inquiry.started_s > _REFRESH_S:
                self._ask(request_id, block_hashes, min(first, inquiry.first), sources, inquiry, 0.0)
            return None if must_wait else count
        inquiry = self._ask(request_id, block_hashes, end, sources, inquiry, self._lookup_wait_s)
        return None if inquiry.must_wait else self._count(block_hashes, first, inquiry)

    def _count(self, block_hashes: Sequence[bytes], first: int, inquiry: Inquiry | None) -> int:
        holders: list[Collection[bytes]] = [self._stored()]
        if inquiry is not None:
            holders += [held for session, held in list(inquiry.answers.values()) if session.is_open and held]
        end = first
        is_growing = True
        while is_growing and end < len(block_hashes):
            is_growing = False
            for held in holders:
                rest = itertools.islice(block_hashes, end, None)
                run = sum(itertools.takewhile(operator.truth, map(held.__contains__, rest)))
                end += run
                is_growing |= run > 0
            is_growing &= len(holders) > 1
        return end - first

    def _ask(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        first: int,
        sources: tuple[Source, ...],
        old: Inquiry | None,
        wait_s: float,
    ) -> Inquiry:
        now_s = time.monotonic()
        name = old.lease_name if old is not None else next(self._next_lease_name).to_bytes(16, "little")
        inquiry = Inquiry(request_id, name, block_hashes, first, sources, now_s, now_s + wait_s, now_s)
        if old is not None:
            inquiry.answers.update(old.answers)
        with self._mutex:
            self._inquiry_by_request.pop(request_id, None)
            self._inquiry_by_request[request_id] = inquiry
            if len(self._inquiry_by_request) > _MAX_REQUESTS:
                del self._inquiry_by_request[next(iter(self._inquiry_by_request))]
        for source in sources:
            source.ask(inquiry)
        return inquiry

    # -- worker threads ------------------------------------------------------------------------------------------------
    def find_holders(
        self, request_id: str, block_hashes: Sequence[bytes], others: Callable[[tuple[Source, ...]], tuple[Source, ...]]
    ) -> list[Session | None]:
        """A source for each of these blocks; None: none is known to have it, after those that may have it were asked.

        others: adds to a request's sources those that may be asked about anything.
        """
        inquiry = self._inquiry_by_request.get(request_id)
        found = _holders(inquiry, block_hashes)
        stored = self._stored()
        is_missing = [session is None and name not in stored for session, name in zip(found, block_hashes, strict=True)]
        if True not in is_missing:
            return found
        sources = others(inquiry.sources if inquiry is not None else ())
        if len(sources) == 1 and (session := sources[0].session) is not None:
            return [known or session for known in found]  # it will say so itself if it has them not
        now_s = time.monotonic()
        first, until_s = is_missing.index(True), now_s + self._lookup_wait_s
        question = Inquiry(request_id, NO_LEASE, block_hashes, first, sources, now_s, until_s, now_s)
        question.is_settled = threading.Event()
        num_asked = sum(source.ask(question) for source in sources)
        if num_asked:
            question.is_settled.wait(self._lookup_wait_s)
        return [known or new for known, new in zip(found, _holders(question, block_hashes), strict=True)]

    def begin_load(self, request_id: str) -> None:
        """Its leases are needed until end_load."""
        if (inquiry := self._inquiry_by_request.get(request_id)) is not None:
            inquiry.is_loading = True

    def end_load(self, request_id: str) -> None:
        """The request has what it came for. What was found out about it is not believed by another load."""
        with self._mutex:
            inquiry = self._inquiry_by_request.pop(request_id, None)
        if inquiry is not None:
            for source in inquiry.sources:
                source.release(inquiry.lease_name)


def _has_asked(inquiry: Inquiry, block_hashes: Sequence[bytes], position: int) -> bool:
    """Whether an inquiry was about this chain's block, which names all before it."""
    asked = inquiry.block_hashes
    return inquiry.first <= position < len(asked) and asked[position] == block_hashes[position]


def _holders(inquiry: Inquiry | None, block_hashes: Sequence[bytes]) -> list[Session | None]:
    found: list[Session | None] = [None] * len(block_hashes)
    if inquiry is not None:
        for session, held in list(inquiry.answers.values()):
            if session.is_open:
                found = [known or (session if name in held else None) for known, name in zip(found, block_hashes, strict=True)]
    return found
