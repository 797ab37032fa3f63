"""`kvrelay keys`: makes a cluster's CURVE keys and its clients' API keys.

What the files hold is decided where they are read: in core/wire/curve.py and router/api_key_file.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.config import OneLineParser
from core.wire.curve import NODE, ROUTER, create_keys, key_files
from router.api_key_file import add_api_key

API = "api"


def run_keys(argv: list[str]) -> int:
    """`keys DIR` or `keys api NAME --file FILE [--admin]`. Returns the exit code. Raises ConfigError; nothing is overwritten."""
    if argv[:1] == [API]:
        _make_api_key(argv[1:])
    else:
        _make_cluster_keys(argv)
    return 0


def _make_cluster_keys(argv: list[str]) -> None:
    parser = OneLineParser(prog="kvrelay keys", description="Make the keys of router and nodes.", allow_abbrev=False)
    parser.epilog = "kvrelay keys api NAME --file FILE [--admin] makes an API key."
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
