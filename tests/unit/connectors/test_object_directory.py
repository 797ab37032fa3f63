"""Objects of several blocks whose names are the index: over a real folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from connectors.lmcache.object_directory import ObjectDirectory, StoredObject

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def parse(text: str) -> bytes | None:
    return bytes.fromhex(text.removesuffix(".data")) if text.endswith(".data") else None


def open_directory(folder: Path) -> ObjectDirectory:
    return ObjectDirectory(folder, lambda name: f"{name.hex()}.data", parse)


def write(folder: Path, *blocks: bytes) -> bytes:
    name = b"".join(blocks)
    (folder / f"{name.hex()}.data").write_bytes(b"")
    return name


def test_refresh_sees_what_others_add_and_remove(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    assert directory.refresh() == ([], [])
    name = write(tmp_path, A, B)
    (tmp_path / "something else").write_bytes(b"")
    assert directory.refresh() == ([A, B], [])
    assert directory.find(B) == StoredObject(name) and directory.num_blocks == 2
    (tmp_path / f"{name.hex()}.data").unlink()
    came, went = directory.refresh()
    assert (came, sorted(went)) == ([], [A, B])
    assert directory.find(A) is None and directory.num_blocks == 0


def test_refresh_sees_that_what_we_wrote_ourselves_is_gone(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    name = write(tmp_path, A)
    directory.add([name])
    (tmp_path / f"{name.hex()}.data").unlink()
    assert directory.refresh() == ([], [A])


def test_refresh_misses_no_change_within_one_tick_of_the_folders_clock(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for number in range(200):
        name = bytes([number]) * 16
        write(tmp_path, name)
        assert directory.refresh()[0] == [name]


def test_refresh_of_a_folder_at_rest_lists_it_no_more(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    write(tmp_path, A)
    directory.refresh()
    time.sleep(0.1)
    directory.refresh()
    assert directory._is_settled
    write(tmp_path, B)
    assert directory.refresh()[0] == [B]


def test_folder_that_is_gone_is_empty_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, A)
    directory = open_directory(folder)
    directory.refresh()
    (path,) = folder.iterdir()
    path.unlink()
    folder.rmdir()
    assert directory.refresh() == ([], [A]) and not directory.is_present
    folder.mkdir()
    write(folder, B)
    assert directory.refresh() == ([B], []) and directory.is_present


def test_block_in_two_objects_is_found_until_both_are_gone(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    first, second = write(tmp_path, A, B), write(tmp_path, B, C)
    directory.add([first])
    directory.add([second])
    assert directory.num_blocks == 4
    assert directory.remove(first) == (A,) and directory.remove(first) == ()
    assert directory.find(B) == StoredObject(second) and directory.find(A) is None
    directory.add([first])
    assert directory.remove(second) == (C,) and directory.find(B) == StoredObject(first)
    assert directory.remove(first) == (A, B) and directory.find(B) is None and directory.num_blocks == 0


def test_oldest_are_picked_tail_first_and_what_is_spared_stays(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    names = [write(tmp_path, block) for block in (A, B, C, D)]
    directory.add(names)
    directory.touch([D])
    directory.touch([A, B, C])
    assert directory.pick_oldest(1, []) == [D]
    assert directory.pick_oldest(2, [D]) == [C, B]
    assert directory.pick_oldest(9, [B]) == [D, C, A]


def test_what_another_process_used_meanwhile_is_not_picked(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    names = [write(tmp_path, block) for block in (A, B)]
    directory.add(names)
    directory.touch([B])
    directory.touch([A])
    assert directory.pick_oldest(1, []) == [B]
    os.utime(tmp_path / f"{B.hex()}.data", ns=(2**62, 2**62))
    assert directory.pick_oldest(1, []) == [A]
