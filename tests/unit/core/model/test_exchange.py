"""Sums and logits of ranks: the same bits on all, in the order of ranks, over either transport; and ranks that are gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from core.errors import RankLostError
from core.kv.pool_memory import open_memory_file
from core.model.exchange import Exchange, SharedMemoryExchange, exchange_bytes, open_process_group
from core.model.parallel_loading import connect_pairwise

SMALL_SLOT_BYTES = 4096  # so that a few rows come in several pieces
DEADLINE_S = 60.0


class Ranks:
    """Exchanges of one memory, each driven by a thread, as processes would."""

    def __init__(self, num_ranks: int, timeout_s: float = DEADLINE_S) -> None:
        self.descriptor = open_memory_file("test-exchange", exchange_bytes(num_ranks, SMALL_SLOT_BYTES))
        self.sockets = connect_pairwise(num_ranks)
        self.exchanges: list[Exchange] = [
            SharedMemoryExchange(rank, self.descriptor, self.sockets[rank], timeout_s, SMALL_SLOT_BYTES)
            for rank in range(num_ranks)
        ]

    def close(self) -> None:
        for peer in (peer for row in self.sockets for peer in row if peer is not None):
            peer.close()
        os.close(self.descriptor)


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*arguments: Any) -> Ranks:
        made.append(Ranks(*arguments))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def on_all(exchanges: Sequence[Exchange], call: Callable[[Exchange], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(exchanges)) as threads:
        return list(threads.map(call, exchanges, timeout=DEADLINE_S))


def sums(exchanges: Sequence[Exchange], parts: Sequence[Tensor]) -> list[Tensor]:
    return on_all(exchanges, lambda exchange: exchange.sum(parts[exchange.rank], parts[0].dtype))


def partials(num_ranks: int, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Of sizes that make the order of additions show in the last bits."""
    torch.manual_seed(1)
    return [(torch.randn(num_rows, 96) * 10.0**rank).to(dtype) for rank in range(num_ranks)]


def added_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_exchange_sum_is_of_float32_in_the_order_of_ranks_on_all(
    make_ranks: Callable[..., Ranks], num_ranks: int, dtype: torch.dtype
) -> None:
    ranks = make_ranks(num_ranks)
    for num_rows in (8, 16, 64, 8):  # 64 rows are several pieces
        parts = partials(num_ranks, num_rows, dtype)
        expected = added_in_order(parts)
        for found in sums(ranks.exchanges, parts):
            assert found.dtype == dtype and torch.equal(found, expected)
    reverse = added_in_order(parts[::-1])
    assert num_ranks == 2 or dtype != torch.float32 or not torch.equal(reverse, expected)  # the order is visible at all


def test_exchange_sum_of_a_row_is_the_same_in_any_batch(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(3)
    parts = partials(3, 64, torch.bfloat16)
    whole = sums(ranks.exchanges, parts)[0]
    some = sums(ranks.exchanges, [part[24:32] for part in parts])[0]
    assert torch.equal(some, whole[24:32])


def test_exchange_gather_puts_uneven_parts_side_by_side_on_rank_0(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(3)
    widths = [40, 32, 29]
    parts = [torch.randn(24, width) for width in widths]
    first, *others = on_all(ranks.exchanges, lambda exchange: exchange.gather(parts[exchange.rank], widths))
    assert torch.equal(first, torch.cat(parts, dim=1))
    assert all(other.shape == first.shape and not other.any() for other in others)


def test_exchange_over_gloo_has_the_same_bits_as_over_shared_memory() -> None:
    parts = partials(2, 16, torch.bfloat16)
    descriptor = open_memory_file("test-rendezvous", 0)
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(2) as threads:
        opened = list(threads.map(lambda rank: open_process_group(cpu, descriptor, rank, 2, DEADLINE_S), range(2)))
        exchanges: list[Exchange] = list(opened)
    os.close(descriptor)
    for found in sums(exchanges, parts):
        assert torch.equal(found, added_in_order(parts))
    gathered = on_all(exchanges, lambda exchange: exchange.gather(parts[exchange.rank][:, : 96 - exchange.rank], [96, 95]))
    assert torch.equal(gathered[0], torch.cat((parts[0], parts[1][:, :95]), dim=1))


def test_exchange_peer_that_is_gone_is_noticed_at_once(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(2)
    end = ranks.sockets[1][0]
    assert end is not None
    end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        ranks.exchanges[0].sum(torch.zeros(8, 96), torch.float32)


def test_exchange_peer_that_does_not_come_is_lost_after_the_timeout(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(2, 0.1)
    with pytest.raises(RankLostError, match="rank 1 has not answered"):
        ranks.exchanges[0].sum(torch.zeros(8, 96), torch.float32)


def test_exchange_ranks_that_do_different_things_assert(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(2)
    with pytest.raises(AssertionError, match="rank"):
        on_all(ranks.exchanges, lambda exchange: exchange.sum(torch.zeros(8 + 8 * exchange.rank, 32), torch.float32))
