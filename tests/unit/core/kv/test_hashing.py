"""Names of blocks: the same for the same content, different for anything else."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from core.kv.hashing import Namespace, extend_block_hashes
from core.kv.layout import KVLayout

ROOT = Namespace(b"m" * 16, b"l" * 16, 4).root_hash()


def _hashes(token_ids: list[int], root: bytes = ROOT) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, 4, root)
    return hashes


def test_block_hashes_grow_alike_in_one_go_and_piece_by_piece() -> None:
    token_ids = list(range(21))
    pieces: list[bytes] = []
    for end in range(len(token_ids) + 1):
        extend_block_hashes(pieces, token_ids[:end], 4, ROOT)
    assert pieces == _hashes(token_ids)
    assert len(pieces) == 5


def test_block_hashes_depend_on_everything_before() -> None:
    a, b = _hashes([1, 2, 3, 4, 5, 6, 7, 8]), _hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]


def test_block_hashes_root_enters_the_first_alone_and_later_ones_by_their_parent() -> None:
    ours, theirs = _hashes([1, 2, 3, 4, 5, 6, 7, 8]), _hashes([1, 2, 3, 4, 5, 6, 7, 8], root=bytes(16))
    assert set(ours).isdisjoint(theirs)
    mixed = ours[:1]
    extend_block_hashes(mixed, [1, 2, 3, 4, 5, 6, 7, 8], 4, bytes(16))
    assert mixed == ours


def test_root_hash_differs_for_every_part_and_parts_cannot_run_together() -> None:
    layouts = [
        KVLayout(num_layers=layers, block_size=block, num_kv_heads=heads, head_dim=8, dtype=dtype).fingerprint
        for layers, block, heads, dtype in itertools.product((1, 2), (4, 16), (1, 2), ("float32", "bfloat16", "float16"))
    ]
    roots = {
        Namespace(model, layout, block_size).root_hash(salt, adapter)
        for model, layout, block_size, salt, adapter in itertools.product(
            (b"m1", b"m2"), layouts, (4, 16), ("", "a", "ab", "4:ab"), (b"", b"a", b"ab")
        )
    }
    assert len(roots) == 2 * 24 * 2 * 4 * 3
    assert Namespace(b"ab", b"c", 4).root_hash() != Namespace(b"a", b"bc", 4).root_hash()


def test_block_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from core.kv.hashing import *; h = []; "
        "extend_block_hashes(h, [1, 2, 3, 4], 4, Namespace(b'm' * 16, b'l' * 16, 4).root_hash()); print(h[0].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {_hashes([1, 2, 3, 4])[0].hex()}


def test_block_hashes_of_token_beyond_31_bits_raise() -> None:
    with pytest.raises(OverflowError):
        _hashes([1, 2, 3, 2**31])
