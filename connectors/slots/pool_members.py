"""How processes of a host find a memory pool that has no name in any file system: every member hands out its descriptors.

Members listen on numbered abstract unix sockets. The kernel takes those away with their process, so that nothing is left
behind, and as every member can answer, none has to take over from one that died. Such names belong to a network namespace:
containers that share one (a pod does) share pools.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from connectors.file_lock import LOCK_TIMEOUT_S

logger = logging.getLogger(__name__)

MAX_MEMBERS = 64
ANSWER_TIMEOUT_S = 2.0  # a member that lives answers within milliseconds, even where cores are scarce
_PAUSE_S = 0.002  # between two looks at the join lock
_CLOSE_TIMEOUT_S = 2.0
_HAVE, _HAVE_NONE = b"+", b"-"
_CREDENTIALS = struct.Struct("iII")  # process id, user id, group id


@contextlib.contextmanager
def joining(pool: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Only one process at a time looks for the pool, creates it and becomes a member. Raises OSError (TimeoutError included)."""
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        while not _try_bind(lock, f"{pool}-join"):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"another process has been joining the pool {pool} for {timeout_s} s")
            time.sleep(_PAUSE_S)
        yield


def find_pool(pool: str, num_descriptors: int) -> list[int]:
    """The pool's descriptors, the caller's to close, from the member that answers first; [] when no member has it.

    The caller holds joining(). Raises TimeoutError when there are members, and none answers: with a pool of its own the caller
    would share with nobody once they go on.
    """
    with contextlib.ExitStack() as opened:
        is_silent = False
        asked: dict[socket.socket, int] = {}
        for number in range(MAX_MEMBERS):
            member = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            found = _try_connect(member, pool, number)
            if found and _user_at(member) == os.getuid():
                asked[member] = number
            is_silent |= found is None
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while asked and (remaining_s := deadline_s - time.monotonic()) > 0:
            for member in select.select(list(asked), [], [], remaining_s)[0]:
                descriptors = _receive(member, num_descriptors)
                if descriptors:
                    return descriptors
                number = asked.pop(member)
                if descriptors is None:  # it failed, or it has just left
                    again = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    is_silent |= _try_connect(again, pool, number) is not False
        if is_silent or any(_is_alive(member) for member in asked):
            raise TimeoutError(f"no process that has the pool {pool} open answers within {ANSWER_TIMEOUT_S} s")
        return []


def has_members(pool: str) -> bool:
    """Whether any process, stopped ones included, hands out this pool. The caller holds joining()."""
    for number in range(MAX_MEMBERS):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as member:
            found = _try_connect(member, pool, number)
            if found is None or (found and _is_alive(member)):
                return True
    return False


def pools_with_members(prefix: str) -> list[str]:
    """Pools of this network namespace whose names begin so and go on with 16 hexadecimal digits, sorted."""
    return [f"{prefix}{rest}" for rest in _ends_of_pools(prefix) if re.fullmatch("[0-9a-f]{16}", rest)]


def names_in_use(prefix: str) -> list[str]:
    """What stands between this prefix and the 16 digits in the names of all pools of this network namespace, sorted."""
    return sorted({rest[:-17] for rest in _ends_of_pools(prefix) if re.fullmatch(".+-[0-9a-f]{16}", rest)})


def _ends_of_pools(prefix: str) -> list[str]:
    names = (line.rpartition("@")[2] for line in Path("/proc/net/unix").read_text(errors="replace").splitlines())
    found = (re.fullmatch(rf"{re.escape(prefix)}(.+)-\d+", name) for name in names)
    return sorted({match[1] for match in found if match})


class PoolMember:
    """Answers processes that look for the pool, on a thread of its own. The caller holds joining()."""

    def __init__(self, pool: str, descriptors: Sequence[int], is_usable: Callable[[], bool]) -> None:
        """is_usable: asked before each answer, from that thread. Raises OSError, also when the pool has too many members."""
        self._is_usable = is_usable
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if not any(_try_bind(self._listener, f"{pool}-{number}") for number in range(MAX_MEMBERS)):
            self._listener.close()
            raise OSError(errno.EUSERS, f"the pool {pool} has {MAX_MEMBERS} members, which is the limit")
        self._listener.listen()
        self._is_closing = False
        self._descriptors = [os.dup(descriptor) for descriptor in descriptors]  # the thread's own
        self._thread = threading.Thread(target=self._run, name="kv-pool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Safe to repeat."""
        self._is_closing = True
        with contextlib.suppress(OSError):  # it has gone already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, and tells those who wait for an answer
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._answer()
                except ConnectionError:  # it has had its answer from another member
                    pass
                except OSError as error:
                    if not self._is_closing:
                        logger.warning("a process that looked for the pool got no answer: %s", str(error))
                        time.sleep(_PAUSE_S)  # no descriptor is free, say
        finally:
            self._listener.close()
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _answer(self) -> None:
        other, _ = self._listener.accept()
        with other:
            if _user_at(other) == os.getuid():
                if self._is_usable():
                    socket.send_fds(other, [_HAVE], self._descriptors, socket.MSG_DONTWAIT)
                else:
                    other.send(_HAVE_NONE, socket.MSG_DONTWAIT)


def _try_bind(bound: socket.socket, name: str) -> bool:
    """Give a socket an abstract name, unless somebody has it."""
    try:
        bound.bind(f"\0{name}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    process_id, user_id, group_id = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process_id, user_id, group_id


def _user_at(peer: socket.socket) -> int:
    return _credentials(peer)[1]


def _is_alive(member: socket.socket) -> bool:
    """False for a socket that only a forked child of a dead member keeps. A process of another namespace has no id here."""
    process_id = _credentials(member)[0]
    return process_id == 0 or Path(f"/proc/{process_id}").exists()


def _try_connect(member: socket.socket, pool: str, number: int) -> bool | None:
    """True: it listens, and may answer. False: there is no such member. None: so many wait for its answer that we cannot."""
    member.setblocking(False)
    try:
        member.connect(f"\0{pool}-{number}")
    except ConnectionRefusedError:
        return False
    except BlockingIOError:
        return None
    return True


def _receive(member: socket.socket, num_descriptors: int) -> list[int] | None:
    """The descriptors that a member has sent; [] where it has none to give, None where it did not say so."""
    try:
        message, descriptors, _, _ = socket.recv_fds(member, 1, num_descriptors, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    if message == _HAVE_NONE or len(descriptors) == num_descriptors:
        return descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None
