"""CURVE on the control sockets: the cluster's key files, and the socket options that use them.

A cluster has two key pairs, the router's and the nodes'. Each end knows its own pair and the other's public key, so a router
admits only nodes of its cluster, and a node speaks only to its cluster's router. Files are pyzmq's certificates.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth import create_certificates, load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator

from core.errors import ConfigError

ROUTER, NODE = "router", "node"
KEYS_FIELD = "security.keys"
_PEER = {ROUTER: NODE, NODE: ROUTER}
_ZAP_DOMAIN = "kvrelay"
_READ_BY_OTHERS = 0o077
_WRITTEN_BY_OTHERS = 0o022


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What one end needs: its own pair and the other end's public key, each in Z85 (40 characters)."""

    public_key: bytes
    secret_key: bytes = field(repr=False)
    peer_public_key: bytes

    def derive_secret(self, purpose: str) -> bytes:
        """32 bytes that follow from the secret key, and from which it does not follow: equal for all who have this key."""
        return hmac.new(self.secret_key, f"kvrelay {purpose}".encode(), hashlib.sha256).digest()


def create_keys(folder: Path) -> None:
    """Make the cluster's key pairs in a new folder that only its owner may enter. Raises ConfigError, and then leaves nothing.

    The folder appears whole or not at all, and one that holds anything is never written to.
    """
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 0700
    except OSError as error:
        raise ConfigError("DIR", str(folder), f"a new folder ({error.strerror})") from error
    try:
        for name in (ROUTER, NODE):
            for path in create_certificates(unfinished, name):
                Path(path).chmod(0o600)
        unfinished.rename(folder)  # takes the place of an empty folder, of nothing else
    except OSError as error:
        raise ConfigError(
            "DIR", str(folder), f"a folder that is new or empty: keys are never overwritten ({error.strerror})"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def key_files(role: str) -> tuple[str, str]:
    """The two files that a "router" or "node" needs: its secret one, and the other end's public one."""
    return f"{role}.key_secret", f"{_PEER[role]}.key"


def load_keys(folder: str, role: str) -> CurveKeys | None:
    """A "router"'s or "node"'s keys from the folder; None when it is "".

    Raises ConfigError when a file is missing, broken, or open to others than its owner.
    """
    if not folder:
        return None
    secret_file, peer_file = (Path(folder) / name for name in key_files(role))
    _refuse_access(Path(folder), _WRITTEN_BY_OTHERS)
    _refuse_access(secret_file, _READ_BY_OTHERS)
    _refuse_access(peer_file, _WRITTEN_BY_OTHERS)
    public_key, secret_key = _read_certificate(secret_file)
    peer_public_key, _ = _read_certificate(peer_file)
    if secret_key is None or _public_key_of(secret_key) != public_key:
        raise ConfigError(KEYS_FIELD, str(secret_file), "a secret key with its own public key, as kvrelay keys makes them")
    return CurveKeys(public_key, secret_key, peer_public_key)


def use_node_keys(socket: zmq.Socket[Any], keys: CurveKeys | None) -> None:
    """Make a node's socket speak only to the router of its keys. Call before connect; None leaves it in the clear."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.peer_public_key)


def use_router_keys(socket: zmq.Socket[Any], context: zmq.asyncio.Context, keys: CurveKeys | None) -> AsyncioAuthenticator | None:
    """Make the router's socket admit only nodes that have the node key. Call on the event loop, before bind.

    The authenticator must be stopped before the context ends. Without it running nobody is admitted.
    """
    if keys is None:
        return None
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_ZAP_DOMAIN, _OnlyNodeKey(keys.peer_public_key))
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no admission: libzmq's default is to admit everybody
    return authenticator


class _OnlyNodeKey:
    """Answers the authenticator's question about a client's public key."""

    def __init__(self, node_public_key: bytes) -> None:
        self._node_public_key = node_public_key

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the key (Z85) is the one that this cluster's nodes have."""
        return key == self._node_public_key


def _refuse_access(path: Path, forbidden_bits: int) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            KEYS_FIELD, str(path), f"a readable file or folder that `kvrelay keys` has made ({error.strerror})"
        ) from error
    if mode & forbidden_bits:
        what = "read" if forbidden_bits == _READ_BY_OTHERS else "written"
        allowed = f"a path that can be {what} by its owner alone; it has mode {mode & 0o777:04o}: chmod go-rwx {path}"
        raise ConfigError(KEYS_FIELD, str(path), allowed)


def _read_certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public_key, secret_key = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(KEYS_FIELD, str(path), "a key file, as kvrelay keys makes them") from error
    if len(public_key) != 40:
        raise ConfigError(KEYS_FIELD, str(path), "a key file with a public key of 40 characters")
    return public_key, secret_key


def _public_key_of(secret_key: bytes) -> bytes | None:
    try:
        return zmq.curve_public(secret_key)
    except (zmq.ZMQError, ValueError):
        return None
