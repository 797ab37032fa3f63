"""The file of API keys: what is written, what is refused, and how it is read again."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest
import yaml

from core.errors import ConfigError
from router.api_key_file import CHECK_INTERVAL_S, ApiKeyFile, add_api_key, hash_of, read_api_keys
from tests.support.virtual_clock import VirtualClock

HASH = hash_of(b"some key")


def opened(path: Path) -> tuple[ApiKeyFile, VirtualClock]:
    clock = VirtualClock()
    return ApiKeyFile(path, clock), clock


def find(file: ApiKeyFile, key: str) -> str | None:
    found = file.find(key.encode())
    return found.name if found else None


def test_add_key_file_holds_a_hash_and_not_the_key(tmp_path: Path) -> None:
    path = tmp_path / "api.yaml"
    key = add_api_key(path, "alice", is_admin=False)
    admin_key = add_api_key(path, "bob", is_admin=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert key not in text and admin_key not in text and len(key) >= 40
    assert [(entry.name, entry.is_admin) for entry in read_api_keys(path)] == [("alice", False), ("bob", True)]
    assert [entry["key_sha256"] for entry in yaml.safe_load(text)] == [hash_of(key.encode()), hash_of(admin_key.encode())]
    assert list(tmp_path.iterdir()) == [path]


def test_add_key_comments_and_links_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text(f"# who has what\n- name: carol  # on leave\n  key_sha256: {HASH}")
    real.chmod(0o600)
    link.symlink_to(real)
    add_api_key(link, "dave", is_admin=False)
    assert link.is_symlink()
    assert "# who has what" in real.read_text() and "# on leave" in real.read_text()
    assert [entry.name for entry in read_api_keys(link)] == ["carol", "dave"]


@pytest.mark.parametrize("name", ["", "two words", "a" * 65, "new\nline", "../x", "ключ"])
def test_add_key_name_that_is_not_allowed_writes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^NAME: "):
        add_api_key(tmp_path / "api.yaml", name, is_admin=False)
    assert not list(tmp_path.iterdir())


def test_add_key_taken_name_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "api.yaml"
    add_api_key(path, "alice", is_admin=False)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"^NAME: got 'alice'"):
        add_api_key(path, "alice", is_admin=True)
    assert path.read_bytes() == before


def test_add_key_several_at_once_all_stay(tmp_path: Path) -> None:
    path = tmp_path / "api.yaml"
    threads = [threading.Thread(target=add_api_key, args=(path, f"n{i}"), kwargs={"is_admin": False}) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {entry.name for entry in read_api_keys(path)} == {f"n{i}" for i in range(8)}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "a list of entries"),
        ("keys: []", "a list of entries"),
        ("- name: [", "valid YAML"),
        (f"- {{name: a, key_sha256: {HASH}, admin: true}}", "unknown field `admin`"),
        (f"- {{name: a, key_sha256: {HASH}, is_admin: 1}}", "is_admin"),
        ("- {name: a}", "key_sha256"),
        (f"- {{name: a b, key_sha256: {HASH}}}", "number 1"),
        ("- {name: a, key_sha256: kvr-oops-the-key-itself}", "number 1"),
        (f"- {{name: a, key_sha256: {HASH}}}\n- {{name: a, key_sha256: {'f' * 64}}}", "same name"),
        (f"- {{name: a, key_sha256: {HASH}}}\n- {{name: b, key_sha256: {HASH}}}", "same hash"),
        ("- name: a\n  key: kvr-oops-the-key-itself\n bad", "valid YAML"),
        ("- !!python/object/apply:os.system ['true']", "valid YAML"),
    ],
)
def test_key_file_that_is_none_is_refused_and_not_quoted(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "api.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^router\.api_keys_file: ") as caught:
        read_api_keys(path)
    assert word in str(caught.value) and "\n" not in str(caught.value)
    assert "oops" not in str(caught.value) and HASH not in str(caught.value)


def test_key_file_missing_or_writable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "api.yaml"
    with pytest.raises(ConfigError, match=r"kvrelay keys api NAME --file FILE"):
        opened(path)
    add_api_key(path, "alice", is_admin=False)
    path.chmod(0o620)
    with pytest.raises(ConfigError, match=rf"chmod go-w {path}"):
        opened(path)


def test_find_only_the_whole_key_fits(tmp_path: Path) -> None:
    path = tmp_path / "api.yaml"
    key, other = add_api_key(path, "alice", is_admin=False), add_api_key(path, "bob", is_admin=False)
    file, _ = opened(path)
    assert (find(file, key), find(file, other)) == ("alice", "bob")
    for wrong in (key[:-1], key + "x", key.upper(), hash_of(key.encode()), "", "\x00"):
        assert find(file, wrong) is None


def test_reload_new_key_counts_and_removed_one_is_revoked_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "api.yaml"
    alice = add_api_key(path, "alice", is_admin=False)
    file, clock = opened(path)
    bob = add_api_key(path, "bob", is_admin=False)
    assert find(file, bob) is None, "the file is looked at once a second at most"
    clock.advance(CHECK_INTERVAL_S)
    assert (find(file, alice), find(file, bob)) == ("alice", "bob")
    path.write_text(yaml.safe_dump([entry for entry in yaml.safe_load(path.read_text()) if entry["name"] != "alice"]))
    clock.advance(CHECK_INTERVAL_S)
    assert (find(file, alice), find(file, bob)) == (None, "bob")
    path.write_text("[]")
    clock.advance(CHECK_INTERVAL_S)
    assert find(file, bob) is None


@pytest.mark.parametrize("damage", ["broken", "empty", "gone", "writable"])
def test_reload_file_that_cannot_be_used_keeps_the_keys_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "api.yaml"
    key = add_api_key(path, "alice", is_admin=False)
    whole = path.read_bytes()
    file, clock = opened(path)
    match damage:
        case "broken":
            path.write_text("- name: [")
        case "empty":
            path.write_text("")
        case "gone":
            path.unlink()
        case "writable":
            path.chmod(0o666)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            clock.advance(CHECK_INTERVAL_S)
            assert find(file, key) == "alice"
    assert len(caplog.records) == 1 and "the API keys stay as they were" in caplog.text and str(path) in caplog.text
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    path.chmod(0o600)
    bob = add_api_key(path, "bob", is_admin=False)
    clock.advance(CHECK_INTERVAL_S)
    assert find(file, bob) == "bob", "a repaired file is taken"


def test_reload_same_size_replaced_within_the_same_instant_is_seen(tmp_path: Path) -> None:
    path, next_path = tmp_path / "api.yaml", tmp_path / "next.yaml"
    old, new = add_api_key(path, "alice", is_admin=False), add_api_key(next_path, "alice", is_admin=False)
    file, clock = opened(path)
    os.utime(next_path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    assert path.stat().st_size == next_path.stat().st_size
    next_path.replace(path)
    clock.advance(CHECK_INTERVAL_S)
    assert (find(file, old), find(file, new)) == (None, "alice")
