"""Which leading KV tiles of a step's requests lie in the same blocks, so that their rows can read them together. Plain integers.

Cascade attention (https://flashinfer.ai/2024/02/02/cascade-inference.html) over a tree: all may share a system prompt, some of
them a conversation behind it. attention_plan.py asks once per step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CascadeRule:
    """When requests with the same blocks read them together. Both numbers were measured: python -m bench.cascade.

    min_requests: fewer read a tile each by itself. min_saved_reads: a group that would save fewer reads of tiles is not formed,
    since a pass of its own must be paid.
    """

    min_requests: int = 2
    min_saved_reads: int = 2

    def __post_init__(self) -> None:
        assert self.min_requests >= 2, f"min_requests {self.min_requests}: one request shares with nobody"


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Requests whose tables name the same blocks in `tile` and all before; their rows are num_tokens, from first_token on."""

    tile: int
    first_token: int
    num_tokens: int
    members: list[int]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Groups by tile, first tiles first. The tokens of all members are numbered so that those of a group lie side by side.

    By request: num_tiles, how many leading tiles it reads with others, and first_token, the number of its first token (without
    meaning where it shares nothing). num_tokens: of all requests that share.
    """

    groups: list[TileGroup]
    num_tiles: list[int]
    first_token: list[int]
    num_tokens: int


def find_sharing(
    tables: IntArray,
    num_full_tiles: Sequence[int],
    num_tokens: Sequence[int],
    blocks_per_tile: int,
    rule: CascadeRule,
    num_common_blocks: int = 0,
) -> Sharing:
    """Group requests by the blocks of their leading tiles.

    tables: [num_requests, at least the blocks of all full tiles], block_ids. num_full_tiles: leading tiles that all of a
    request's rows see whole; only these can be shared. num_tokens: rows by request. num_common_blocks: leading blocks
    known to be the same in all tables, which need no comparison. Takes under a microsecond per request and shared tile.
    """

    def saves_enough(members: list[int], tile: int) -> bool:
        """Whether they have so many tiles in common, from this one on."""
        num_needed = -(-rule.min_saved_reads // (len(members) - 1))
        if num_needed <= 1:
            return True
        if any(num_full_tiles[r] < tile + num_needed for r in members):
            return False
        columns = slice(tile * blocks_per_tile, (tile + num_needed) * blocks_per_tile)
        return bool((tables[members, columns] == tables[members[0], columns]).all())

    num_requests = len(num_full_tiles)
    num_tiles, first_token = [0] * num_requests, [0] * num_requests
    groups: list[TileGroup] = []
    level = [TileGroup(-1, 0, 0, list(range(num_requests)))]
    tile = 0
    while level:
        columns = slice(tile * blocks_per_tile, (tile + 1) * blocks_per_tile)
        is_common = columns.stop <= num_common_blocks
        parents, level = level, []
        for parent in parents:
            by_blocks: defaultdict[bytes, list[int]] = defaultdict(list)
            for r in parent.members:
                if num_full_tiles[r] > tile:
                    by_blocks[b"" if is_common else tables[r, columns].tobytes()].append(r)
            token = parent.first_token
            for members in by_blocks.values():
                is_new = tile == 0 or len(members) < len(parent.members)
                if len(members) >= rule.min_requests and (not is_new or saves_enough(members, tile)):
                    level.append(TileGroup(tile, token, sum(num_tokens[r] for r in members), members))
                    token += level[-1].num_tokens
                    for r in members:
                        num_tiles[r] = tile + 1
            for r in parent.members:
                if num_tiles[r] == tile:  # goes on alone
                    first_token[r] = token
                    token += num_tokens[r]
        groups += level
        tile += 1
    return Sharing(groups, num_tiles, first_token, sum(group.num_tokens for group in groups if group.tile == 0))
