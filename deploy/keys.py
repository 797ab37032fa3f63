"""`kvrelay keys`: makes a cluster's CURVE keys, its clients' API keys, and keys for stored blocks.

What the files hold is decided where they are read: in core/wire/curve.py, router/api_key_file.py and
connectors/coding/block_cipher.py.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from core.config import OneLineParser
from core.errors import ConfigError
from core.wire.curve import NODE, ROUTER, create_keys, key_files
from router.api_key_file import add_api_key

API = "api"
STORE = "store"
STORE_KEY_BYTES = 32


def run_keys(argv: list[str]) -> int:
    """`keys DIR`, `keys api NAME --file FILE [--admin]` or `keys store FILE`. Returns the exit code.

    Raises ConfigError; nothing is overwritten.
    """
    if argv[:1] == [API]:
        _make_api_key(argv[1:])
    elif argv[:1] == [STORE]:
        _make_store_key(argv[1:])
    else:
        _make_cluster_keys(argv)
    return 0


def _make_cluster_keys(argv: list[str]) -> None:
    parser = OneLineParser(prog="kvrelay keys", description="Make the keys of router and nodes.", allow_abbrev=False)
    parser.epilog = "keys api NAME --file FILE [--admin] makes an API key, keys store FILE one that encrypts stored blocks."
    parser.add_argument("DIR", help="a new folder")
    folder = Path(parser.parse_args(argv).DIR)
    create_keys(folder)
    for machine, role in (("the router's machine", ROUTER), ("every node's machine", NODE)):
        files = " and ".join(str(folder / name) for name in key_files(role))
        print(f"{machine} needs {files}")


def _make_api_key(argv: list[str]) -> None:
    parser = OneLineParser(prog="kvrelay keys api", description="Make an API key, and print it this once.", allow_abbrev=False)
    parser.add_argument("NAME", help="whose key it is")
    parser.add_argument("--file", required=True, help="the router's api_keys_file; the key's hash is appended")
    parser.add_argument("--admin", action="store_true", help="also for /nodes, /audit and what changes the cluster")
    given = parser.parse_args(argv)
    key = add_api_key(Path(given.file), given.NAME, is_admin=given.admin)
    print(key, flush=True)
    print(f"{given.file} holds a hash of it alone: this is the only time that it is shown", file=sys.stderr)


def _make_store_key(argv: list[str]) -> None:
    parser = OneLineParser(
        prog="kvrelay keys store", description="Make a key that encrypts blocks in a store.", allow_abbrev=False
    )
    parser.add_argument("FILE", help="a new file; every node that shares the store needs a copy")
    path = Path(parser.parse_args(argv).FILE)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError("FILE", str(path), f"a new file in a folder that exists ({error.strerror})") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(STORE_KEY_BYTES))
    print(f"every node that shares the store needs {path}: --connector-option encryption_key_file={path}")
