"""`python -m core.model.rank_main FD PID`: the process of a rank other than 0, a child of the node's process PID.

FD: its end of the channel to rank 0, from which everything else comes. It ends with its parent, and when that says nothing more.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

import torch

from core.config import LOG_FORMAT
from core.errors import KVRelayError, RankLostError
from core.model.parallel import follow
from core.model.parallel_loading import load_rank
from core.ranks.channel import Channel
from core.ranks.messages import RankReady, RankSetup, ToRank

_logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """The process's exit code."""
    _end_with_parent(int(argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or a service manager: the node ends first, and in order
        signal.signal(number, signal.SIG_IGN)
    channel: Channel[ToRank] = Channel(socket.socket(fileno=int(argv[0])), ToRank, "rank 0")
    try:
        return _serve(channel)
    except RankLostError as error:
        _logger.error("%s", error)
        return 1


def _serve(channel: Channel[ToRank]) -> int:
    """Load what rank 0 says, and follow it to its end."""
    setup = channel.receive()
    assert isinstance(setup, RankSetup), setup
    logging.basicConfig(level=logging.INFO, format=f"rank {setup.rank}: {LOG_FORMAT}", stream=sys.stderr)
    try:
        runner, inbox = load_rank(setup, channel)
    except (KVRelayError, torch.OutOfMemoryError) as error:
        channel.send(RankReady(error=f"rank {setup.rank}: {error}"))
        return 1
    channel.send(RankReady())
    follow(runner, channel, inbox)
    return 0


def _end_with_parent(parent_pid: int) -> None:
    """Have Linux kill this process when its parent is gone, also in the middle of a step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
