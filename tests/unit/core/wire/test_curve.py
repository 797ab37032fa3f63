"""The cluster's key files: how they are made, and what is refused when they are read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.wire.curve import NODE, ROUTER, create_keys, key_files, load_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster's keys."""
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_create_keys_each_end_knows_the_other(folder: Path) -> None:
    router, node = load_keys(str(folder), ROUTER), load_keys(str(folder), NODE)
    assert router is not None and node is not None
    assert router.peer_public_key == node.public_key != router.public_key == node.peer_public_key


def test_create_keys_nobody_else_can_read_anything(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {*key_files(ROUTER), *key_files(NODE)}


def test_create_keys_existing_folder_is_never_overwritten(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="never overwritten"):
        create_keys(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["keys"], "nothing unfinished is left"


def test_create_keys_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("mine")
    with pytest.raises(ConfigError, match=r"^DIR: "):
        create_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"^DIR: "):
        create_keys(tmp_path / "keys" / "below")
    assert (tmp_path / "keys").read_text() == "mine"


def test_create_keys_empty_folder_is_taken_and_closed(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    create_keys(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_load_keys_no_folder_named_is_no_keys() -> None:
    assert load_keys("", ROUTER) is None


@pytest.mark.parametrize("role", [ROUTER, NODE])
def test_load_keys_only_the_two_files_of_the_role_are_needed(folder: Path, role: str) -> None:
    whole = load_keys(str(folder), role)
    for path in folder.iterdir():
        if path.name not in key_files(role):
            path.unlink()
    assert load_keys(str(folder), role) == whole
    for name in key_files(role):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(ConfigError, match=rf"security\.keys.*{name}.*No such file"):
            load_keys(str(folder), role)
        (folder / name).write_bytes(kept)
        (folder / name).chmod(0o600)


@pytest.mark.parametrize(
    ("name", "mode", "is_allowed"),
    [
        ("router.key_secret", 0o640, False),
        ("router.key_secret", 0o604, False),
        ("router.key_secret", 0o400, True),
        ("node.key", 0o644, True),
        ("node.key", 0o664, False),
        (".", 0o755, True),
        (".", 0o777, False),
    ],
)
def test_load_keys_open_to_others_is_refused_with_the_remedy(folder: Path, name: str, mode: int, is_allowed: bool) -> None:
    (folder / name).chmod(mode)
    if is_allowed:
        assert load_keys(str(folder), ROUTER) is not None
        return
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}: chmod go-rwx {folder / name}"):
        load_keys(str(folder), ROUTER)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'public-key = "short"\nsecret-key = "short"\n'])
@pytest.mark.parametrize("name", ["router.key_secret", "node.key"])
def test_load_keys_broken_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"security\.keys.*{name}"):
        load_keys(str(folder), ROUTER)


def test_load_keys_secret_of_another_pair_is_refused_and_not_shown(folder: Path, tmp_path: Path) -> None:
    create_keys(tmp_path / "other")
    other = load_keys(str(tmp_path / "other"), ROUTER)
    own = load_keys(str(folder), ROUTER)
    assert other is not None and own is not None
    path = folder / "router.key_secret"
    path.write_bytes(path.read_bytes().replace(own.secret_key, other.secret_key))
    with pytest.raises(ConfigError, match="its own public key") as caught:
        load_keys(str(folder), ROUTER)
    assert other.secret_key.decode() not in str(caught.value)
    assert other.secret_key.decode() not in repr(other)


def test_derived_secret_is_the_same_for_all_nodes_and_nobody_elses(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    create_keys(tmp_path / "others")
    ours, again, others = (load_keys(str(tmp_path / name), NODE) for name in ("keys", "keys", "others"))
    routers = load_keys(str(tmp_path / "keys"), ROUTER)
    assert ours is not None and again is not None and others is not None and routers is not None
    assert ours.derive_secret("a") == again.derive_secret("a")
    assert len({keys.derive_secret(purpose) for keys in (ours, others, routers) for purpose in ("a", "b")}) == 6
    assert ours.secret_key not in ours.derive_secret("a")
