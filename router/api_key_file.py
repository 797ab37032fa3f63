"""The file of API keys: one entry per key, with a name, the key's hash, and whether it is an administrator's.

The keys themselves are nowhere: a file that leaks opens nothing. SHA-256 is enough for that, because a key is 256 random bits:
nothing can be guessed, as it can with passwords, so that a deliberately slow hash would only slow down every request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

from core.clock import Clock
from core.errors import ConfigError

logger = logging.getLogger("kvrelay.router")

FIELD = "router.api_keys_file"
KEY_PREFIX = "kvr-"  # lets scanners for leaked secrets, and people, see what it is
KEY_BYTES = 32
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
HASH_PATTERN = re.compile(r"[0-9a-f]{64}")
CHECK_INTERVAL_S = 1.0
WRITTEN_BY_OTHERS = 0o022

_Signature = tuple[int, int, int, int]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry. key_sha256: hex digest of the key."""

    name: str
    key_sha256: str
    is_admin: bool = False


class ApiKeyFile:
    """The keys that are valid now. Runs on the event loop's thread: the file is small, and looked at once a second at most."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises ConfigError when the file cannot be read or is none."""
        self._path = path
        self._clock = clock
        self._checked_s = clock.now_s()
        self._signature = _signature(path)
        self._keys: Sequence[ApiKey] = read_api_keys(path)

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of a key that a client sent, or None. Takes as long for every key: all entries are compared."""
        self._reload_if_changed()
        digest, found = hash_of(key), None
        for entry in self._keys:
            if hmac.compare_digest(entry.key_sha256, digest):
                found = entry
        return found

    def _reload_if_changed(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        # Looked at before it is read: a file that changes meanwhile is read again.
        if (signature := _signature(self._path)) == self._signature:
            return
        self._signature = signature
        try:
            self._keys = read_api_keys(self._path)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        logger.info("read %d API keys from %s", len(self._keys), self._path)


def hash_of(key: bytes) -> str:
    """What an entry holds of a key."""
    return hashlib.sha256(key).hexdigest()


def read_api_keys(path: Path) -> list[ApiKey]:
    """The entries of a file. Raises ConfigError, whose message shows nothing of what the file holds but names."""
    try:
        mode, content = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(FIELD, str(path), f"a file made with `kvrelay keys api NAME --file FILE` ({reason})") from error
    if mode & WRITTEN_BY_OTHERS:
        allowed = f"a file that its owner alone can write; it has mode {mode & 0o777:04o}: chmod go-w {path}"
        raise ConfigError(FIELD, str(path), allowed)
    return _parse(content, path)


def add_api_key(path: Path, name: str, *, is_admin: bool) -> str:
    """Make a key, append its entry to the file, and return the key, which is kept nowhere. Creates the file when it is not there.

    The file is replaced in one go; what it held stays, comments too. Raises ConfigError when the name is taken or not allowed.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError("NAME", name, "1 to 64 letters, digits, dots, dashes and underscores")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry = ApiKey(name=name, key_sha256=hash_of(key.encode()), is_admin=is_admin)
    path = path.resolve()  # a link stays one
    try:
        with _alone_in(path.parent):
            content = path.read_text(encoding="utf-8") if path.exists() else ""
            if content.strip() and any(known.name == name for known in _parse(content, path)):
                raise ConfigError("NAME", name, f"a name that {path} does not have yet: remove its entry to revoke the key")
            if content.strip() in ("", "[]"):
                content = ""
            added = yaml.safe_dump([msgspec.to_builtins(entry)], sort_keys=False)
            content = f"{content}\n{added}" if content and not content.endswith("\n") else content + added
            _parse(content, path)
            _replace(path, content)
    except OSError as error:
        raise ConfigError("--file", str(path), f"a path that can be written ({error.strerror})") from error
    return key


def _parse(content: str, path: Path) -> list[ApiKey]:
    try:
        keys = msgspec.convert(yaml.safe_load(content), list[ApiKey])
    except yaml.MarkedYAMLError as error:  # its text would quote the file
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(FIELD, str(path), f"valid YAML (line {line}: {error.problem})") from None
    except yaml.YAMLError as error:
        raise ConfigError(FIELD, str(path), "valid YAML") from error
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, str(path), f"a list of entries with name, key_sha256 and is_admin ({error})") from None
    for place, entry in enumerate(keys):
        if not NAME_PATTERN.fullmatch(entry.name) or not HASH_PATTERN.fullmatch(entry.key_sha256):
            allowed = f"entries as `kvrelay keys api` makes them; number {place + 1} has another name or hash than allowed"
            raise ConfigError(FIELD, str(path), allowed)
    for what, values in (("name", [entry.name for entry in keys]), ("hash", [entry.key_sha256 for entry in keys])):
        if len(set(values)) != len(values):
            raise ConfigError(FIELD, str(path), f"entries of which no two have the same {what}")
    return keys


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two commands do not lose each other's entry."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _signature(path: Path) -> _Signature | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size, status.st_mode
