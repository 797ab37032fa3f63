"""How one step's attention is cut into passes over tiles of KV: which query rows read which blocks, and who reads them together.

Host code without arithmetic on the model's numbers; attention_torch.py carries the plan out, once per layer. Tiles lie at fixed
absolute positions and each row meets its tiles in position order, whoever else reads them: sharing a tile changes no row's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.model.attention import AttentionBatch
from core.model.shared_tiles import CascadeRule, IntArray, Sharing, TileGroup, find_sharing

QUERY_TILE_TOKENS = 128  # query tokens that share a pass over a KV tile
TILES_PER_PASS = 8  # on the CPU: what is read, converted and multiplied together stays in the cache
TILES_PER_PASS_ON_DEVICE = 256  # untried: a device wants much at a time
ROW_TILES_PER_PASS = 32  # the same for scores: tiles times query tokens


@dataclass(frozen=True, slots=True)
class SharedRun:
    """num_tiles consecutive KV tiles that num_tokens query tokens, from first_token of SharedPlan.rows on, see whole.

    block_ids: [num_tiles * blocks_per_tile].
    """

    first_token: int
    num_tokens: int
    num_tiles: int
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Leading tiles that several requests have in common. rows: [num_tokens], where the tokens lie in the flat batch.

    Of each token the tiles come in position order, and all of them before its request's own tiles.
    """

    rows: Tensor
    runs: list[SharedRun]


@dataclass(frozen=True, slots=True)
class DecodePass:
    """num_tiles consecutive KV tiles of each of num_requests requests, from first_request of the DecodePlan on.

    block_ids: [num_tiles * num_requests * blocks_per_tile], tile by tile. Several tiles are full ones. In a single one requests
    may end, those from first_partial on (counted from first_request): is_hidden, [num_requests - first_partial,
    tile_tokens], is then True beyond the request's end; else None.
    """

    first_request: int
    num_requests: int
    num_tiles: int
    block_ids: Tensor
    first_partial: int
    is_hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Requests that compute one token. rows: [num_requests], their rows in the flat batch.

    continued: [n], requests (places in `rows`) that began with shared tiles, and continued_tokens: [n], their places in
    SharedPlan.rows.
    """

    rows: Tensor
    continued: Tensor
    continued_tokens: Tensor
    passes: list[DecodePass]


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Some consecutive query tokens of one request, as rows first_row to first_row + num_rows of the flat batch.

    num_tiles: KV tiles from the request's first own one to the last that its last token reaches; those before first_tile lie
    before the window of all rows. is_hidden_by_tile: for those on the causal diagonal or the window's edge, [num_rows * group,
    tile_tokens], True where the key lies after the query or before its window. first_shared_token: the rows' place in
    SharedPlan.rows, or None.
    """

    first_row: int
    num_rows: int
    num_tiles: int
    is_hidden_by_tile: dict[int, Tensor]
    first_shared_token: int | None
    first_tile: int = 0


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One request that computes several tokens. block_ids: [num_tiles * blocks_per_tile], of its own tiles, of which num_tokens
    positions belong to the sequence."""

    block_ids: Tensor
    num_tokens: int
    query_tiles: list[QueryTile]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step, for all layers. num_tile_reads: KV tiles that a layer gathers and converts."""

    shared: SharedPlan | None
    decode: DecodePlan | None
    prefills: list[PrefillPlan]
    num_tile_reads: int


@dataclass(frozen=True, slots=True)
class _Share:
    """A request in the flat batch: num_tokens rows from first_row on, for positions first_position to seq_len."""

    first_row: int
    num_tokens: int
    seq_len: int

    @property
    def first_position(self) -> int:
        return self.seq_len - self.num_tokens


class AttentionPlanner:
    """Makes plans for a pool of one block size. group: query heads per KV head; tile_tokens: a multiple of block_size."""

    def __init__(self, block_size: int, tile_tokens: int, group: int, device: torch.device | str, rule: CascadeRule) -> None:
        self._tile_tokens = tile_tokens
        self._blocks_per_tile = tile_tokens // block_size
        self._group = group
        self._device = torch.device(device)
        self._tiles_per_pass = TILES_PER_PASS if self._device.type == "cpu" else TILES_PER_PASS_ON_DEVICE
        self._rule = rule

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """The step's passes. Tensors on the planner's device."""
        shares, tables = self._shares_and_tables(batch)
        # A tile can be shared by requests whose first row sees all of it; the step's own K and V are written before.
        num_full_tiles = [(share.first_position + 1) // self._tile_tokens for share in shares]
        num_tokens = [share.num_tokens for share in shares]
        sharing = find_sharing(tables, num_full_tiles, num_tokens, self._blocks_per_tile, self._rule, batch.num_common_blocks)
        decoding = [r for r, share in enumerate(shares) if share.num_tokens == 1]
        decode = self._plan_decode(decoding, shares, tables, sharing) if decoding else None
        prefills = [
            self._plan_prefill(share, sharing.num_tiles[r], sharing.first_token[r] if sharing.num_tiles[r] else None, tables[r])
            for r, share in enumerate(shares)
            if share.num_tokens > 1
        ]
        num_reads = len(sharing.groups)
        num_reads += sum(part.num_requests * part.num_tiles for part in decode.passes) if decode else 0
        num_reads += sum(len(prefill.block_ids) // self._blocks_per_tile for prefill in prefills)
        return AttentionPlan(self._plan_shared(shares, tables, sharing), decode, prefills, num_reads)

    def plan_window(self, batch: AttentionBatch, sliding_window: int) -> list[PrefillPlan]:
        """The step's passes in layers whose tokens see sliding_window positions: every request by itself, decoding ones too."""
        shares, tables = self._shares_and_tables(batch)
        plans = []
        for share, table in zip(shares, tables, strict=True):
            first_tile = max(share.first_position - sliding_window + 1, 0) // self._tile_tokens
            plans.append(self._plan_prefill(share, first_tile, None, table, sliding_window))
        return plans

    def _shares_and_tables(self, batch: AttentionBatch) -> tuple[list[_Share], IntArray]:
        """Requests, and their block tables filled up to whole tiles."""
        starts: list[int] = batch.query_start.tolist()
        shares = [
            _Share(start, end - start, seq_len)
            for start, end, seq_len in zip(starts, starts[1:], batch.seq_lens.tolist(), strict=False)
        ]
        max_tiles = -(-max((share.seq_len for share in shares), default=0) // self._tile_tokens)
        return shares, _with_columns(batch.block_tables.numpy(), max_tiles * self._blocks_per_tile)

    def _plan_shared(self, shares: list[_Share], tables: IntArray, sharing: Sharing) -> SharedPlan | None:
        if not sharing.groups:
            return None
        rows = np.empty(sharing.num_tokens, dtype=np.int64)
        for share, num_tiles, first in zip(shares, sharing.num_tiles, sharing.first_token, strict=True):
            if num_tiles:
                rows[first : first + share.num_tokens] = np.arange(share.first_row, share.first_row + share.num_tokens)
        runs = []
        for chain in _chains(sharing.groups):
            group = chain[0]
            per_run = max(min(self._tiles_per_pass, ROW_TILES_PER_PASS // group.num_tokens), 1)
            for tile in range(group.tile, group.tile + len(chain), per_run):
                num_tiles = min(per_run, group.tile + len(chain) - tile)
                block_ids = tables[group.members[0], self._columns(tile, num_tiles)]
                runs.append(SharedRun(group.first_token, group.num_tokens, num_tiles, self._on_device(block_ids)))
        return SharedPlan(self._on_device(rows), runs)

    def _plan_decode(self, decoding: list[int], shares: list[_Share], tables: IntArray, sharing: Sharing) -> DecodePlan:
        """Requests with many own tiles first, so that those that have a k-th one come first; their last is masked."""
        tile_tokens, blocks_per_tile = self._tile_tokens, self._blocks_per_tile
        lengths = {r: shares[r].seq_len - sharing.num_tiles[r] * tile_tokens for r in decoding}  # in own tiles
        order = sorted(decoding, key=lambda r: (lengths[r] // -tile_tokens, lengths[r] % tile_tokens > 0))
        own_lengths = np.array([lengths[r] for r in order])
        first_tiles = np.array([sharing.num_tiles[r] for r in order])
        members = np.array(order)
        passes = []
        for begin in range(0, len(order), self._tiles_per_pass):
            left = own_lengths[begin : begin + self._tiles_per_pass]  # tokens that are still to be read
            tile = 0
            while left[0] > 0:
                num_requests = int(np.count_nonzero(left > 0))
                left = left[:num_requests]
                num_tiles = max(min(int(left[-1]) // tile_tokens, self._tiles_per_pass // num_requests), 1)
                first_partial = int(np.count_nonzero(left >= tile_tokens))
                these = slice(begin, begin + num_requests)
                columns = (first_tiles[these] + np.arange(tile, tile + num_tiles)[:, None])[..., None] * blocks_per_tile
                block_ids = tables[members[these, None], columns + np.arange(blocks_per_tile)].reshape(-1)
                is_hidden = np.arange(tile_tokens) >= left[first_partial:, None]
                passes.append(
                    DecodePass(
                        first_request=begin,
                        num_requests=num_requests,
                        num_tiles=num_tiles,
                        block_ids=self._on_device(block_ids),
                        first_partial=first_partial,
                        is_hidden=self._on_device(is_hidden) if first_partial < num_requests else None,
                    )
                )
                tile += num_tiles
                left = left - num_tiles * tile_tokens
        continued = [place for place, r in enumerate(order) if sharing.num_tiles[r]]
        return DecodePlan(
            rows=self._on_device(np.array([shares[r].first_row for r in order])),
            continued=self._on_device(np.array(continued, dtype=np.int64)),
            continued_tokens=self._on_device(
                np.array([sharing.first_token[order[place]] for place in continued], dtype=np.int64)
            ),
            passes=passes,
        )

    def _plan_prefill(
        self, share: _Share, first_tile: int, first_shared_token: int | None, block_table: IntArray, sliding_window: int = 0
    ) -> PrefillPlan:
        skipped = first_tile * self._tile_tokens
        window = sliding_window or share.seq_len
        query_tiles = []
        for offset in range(0, share.num_tokens, QUERY_TILE_TOKENS):
            num_rows = min(QUERY_TILE_TOKENS, share.num_tokens - offset)
            first = share.first_position + offset - skipped  # positions from here on count from the first own tile
            last = first + num_rows - 1
            tiles = range(max(first - window + 1, 0) // self._tile_tokens, last // self._tile_tokens + 1)
            query_tiles.append(
                QueryTile(
                    first_row=share.first_row + offset,
                    num_rows=num_rows,
                    num_tiles=tiles.stop,
                    is_hidden_by_tile={
                        tile: self._is_hidden(tile, first, num_rows, window)
                        for tile in tiles
                        if (tile + 1) * self._tile_tokens > first + 1 or tile * self._tile_tokens <= last - window
                    },
                    first_shared_token=None if first_shared_token is None else first_shared_token + offset,
                    first_tile=tiles.start,
                )
            )
        end_tile = first_tile + query_tiles[-1].num_tiles
        block_ids = block_table[first_tile * self._blocks_per_tile : end_tile * self._blocks_per_tile]
        return PrefillPlan(self._on_device(block_ids), share.seq_len - skipped, query_tiles)

    def _is_hidden(self, tile: int, first_position: int, num_rows: int, window: int) -> Tensor:
        """[num_rows * group, tile_tokens]: what rows at first_position on do not see of a tile."""
        rows = torch.arange(first_position, first_position + num_rows, device=self._device)
        rows = rows.repeat_interleave(self._group)[:, None]
        keys = torch.arange(tile * self._tile_tokens, (tile + 1) * self._tile_tokens, device=self._device)
        return (keys > rows) | (keys <= rows - window)

    def _columns(self, first_tile: int, num_tiles: int) -> slice:
        return slice(first_tile * self._blocks_per_tile, (first_tile + num_tiles) * self._blocks_per_tile)

    def _on_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _chains(groups: list[TileGroup]) -> list[list[TileGroup]]:
    """Groups of consecutive tiles with the same members, one after the other; chains by their first tile."""
    chains: list[list[TileGroup]] = []
    last_chain: dict[tuple[int, int], list[TileGroup]] = {}
    for group in groups:
        place = (group.first_token, group.num_tokens)
        chain = last_chain.get(place)
        if chain is None:
            chain = last_chain[place] = []
            chains.append(chain)
        chain.append(group)
    return chains


def _with_columns(block_tables: IntArray, num_columns: int) -> IntArray:
    """At least num_columns columns; new ones name block 0, whose content is masked."""
    num_requests, width = block_tables.shape
    if width >= num_columns:
        return block_tables
    padded = np.zeros((num_requests, num_columns), dtype=np.int64)
    padded[:, :width] = block_tables
    return padded
