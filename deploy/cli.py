"""The `kvrelay` command: a thin parser in front of serve.py, the three mains, and questions to a running router.

A user's mistake is one clear line and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import signal
import sys
from collections.abc import Callable
from typing import Any

from core.config import EXIT_USAGE, OneLineParser, parse_config
from core.errors import InvalidInputError, KVRelayError
from deploy.rolling import drain, restart
from deploy.router_client import RouterRefusalError, get_json

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
SERVE_SECTIONS = ("model", "engine", "connector", "router", "cluster", "security")
NODE_COLUMNS = (
    "node_id",
    "role",
    "status",
    "num_in_flight",
    "num_running",
    "num_waiting",
    "kv_usage",
    "connector",
    "kv_address",
    "down_reason",
)
REQUEST_COLUMNS = ("request_id", "phase", "node_id", "age_s", "num_prompt_tokens", "num_output_tokens", "num_faults")
DEFAULT_URL = "http://127.0.0.1:8000"

USAGE = """usage: kvrelay COMMAND [OPTIONS]     (kvrelay COMMAND --help lists a command's options)

  serve          a router, prefill nodes and decode nodes on this machine
  router         the HTTP server; nodes register with it
  prefill-node   one prefill node: --router HOST:PORT
  decode-node    one decode node: --router HOST:PORT
  nodes          the nodes of a running router: --url URL
  requests       what is in flight in a running cluster: --url URL
  drain          let a node, or "router", finish what it has and leave: NAME --url URL
  restart        a rolling restart of a supervised cluster: [NAME ...] --url URL
  audit          what a running cluster still holds: --url URL; exit code 1 when something is left
  cache          looks into a store: ls, stat, verify, prune, export, import, explain (why a prompt misses), pin, unpin
  keys           keys for a cluster beyond one machine: DIR; API keys: api NAME --file FILE [--admin];
                 a key for stored blocks: store FILE
  version        this version

What asks a router sends the API key in the environment variable KVRELAY_API_KEY, if there is one."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return EXIT_OK if arguments else EXIT_USAGE
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get("version" if name == "--version" else name)
    if command is None:
        print(f"kvrelay: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return command(rest)
    except InvalidInputError as error:
        print(f"kvrelay {name}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KVRelayError as error:
        print(f"kvrelay {name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _serve(argv: list[str]) -> int:
    config = parse_config("kvrelay serve", "Serve a model on this machine.", SERVE_SECTIONS, argv)
    from deploy.serve import serve

    # Until the supervisor watches, SIGTERM ends us as Ctrl-C does: a model that is being converted is cleaned up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return serve(config)


# The mains are imported when they are wanted: `kvrelay router` must not load torch, nor `kvrelay audit` anything of them.
def _router(argv: list[str]) -> int:
    from router.__main__ import main as router_main

    return router_main(argv)


def _prefill_node(argv: list[str]) -> int:
    from prefill_node.node import main as prefill_node_main

    return prefill_node_main(argv)


def _decode_node(argv: list[str]) -> int:
    from decode_node.node import main as decode_node_main

    return decode_node_main(argv)


def _nodes(argv: list[str]) -> int:
    body = _ask_router("kvrelay nodes", argv, "/nodes")
    nodes = body.get("nodes", []) if isinstance(body, dict) else []
    _print_table(NODE_COLUMNS, nodes)
    if not nodes:
        print("no node is registered")
    return EXIT_OK


def _print_table(columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Aligned, with a head. The router's JSON has more than these columns."""
    table = [list(columns), *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(cells[place]) for cells in table) for place in range(len(columns))]
    for cells in table if rows else ():
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _audit(argv: list[str]) -> int:
    # 503 comes with the same body: it lists what should not be held.
    body = _ask_router("kvrelay audit", argv, "/audit", allowed=(200, 503))
    print(json.dumps(body, indent=2))
    return EXIT_OK if isinstance(body, dict) and body.get("is_clean") is True else EXIT_FAILED


def _keys(argv: list[str]) -> int:
    from deploy.keys import run_keys

    return run_keys(argv)


def _cache(argv: list[str]) -> int:
    from deploy.cache_command import run_cache

    return run_cache(argv)


def _requests(argv: list[str]) -> int:
    body = _ask_router("kvrelay requests", argv, "/requests")
    requests = body.get("requests", []) if isinstance(body, dict) else []
    _print_table(REQUEST_COLUMNS, requests)
    if not requests:
        print("no request is in flight")
    return EXIT_OK


def _drain(argv: list[str]) -> int:
    parser = _router_parser("kvrelay drain")
    parser.add_argument("name", metavar="NAME", help='a node_id as `kvrelay nodes` shows it, or "router"')
    parser.add_argument(
        "--timeout-s", type=_seconds, default=600.0, help="how long to wait until it is gone (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    drain(arguments.url, arguments.name, arguments.timeout_s)
    print(f"{arguments.name} has left")
    return EXIT_OK


def _restart(argv: list[str]) -> int:
    parser = _router_parser("kvrelay restart")
    parser.add_argument("names", metavar="NAME", nargs="*", help='node_ids or "router" (default: all nodes, then the router)')
    parser.add_argument("--timeout-s", type=_seconds, default=900.0, help="for each process (default %(default)s)")
    arguments = parser.parse_args(argv)
    restart(arguments.url, arguments.names, arguments.timeout_s)
    return EXIT_OK


def _version(_argv: list[str]) -> int:
    try:
        print(f"kvrelay {importlib.metadata.version('kvrelay')}")
    except importlib.metadata.PackageNotFoundError:
        print("kvrelay, not installed: run from a checkout")
    return EXIT_OK


def _seconds(text: str) -> float:
    """argparse type."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number of seconds above 0")
    return seconds


def _router_parser(prog: str) -> OneLineParser:
    parser = OneLineParser(prog=prog, allow_abbrev=False)
    parser.add_argument("--url", default=DEFAULT_URL, help="of the router (default %(default)s)")
    return parser


def _ask_router(prog: str, argv: list[str], path: str, allowed: tuple[int, ...] = (200,)) -> Any:
    url = _router_parser(prog).parse_args(argv).url
    status, body = get_json(url, path, timeout_s=30.0)
    if status not in allowed or body is None:
        raise RouterRefusalError(url, path, status, body)
    return body


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "router": _router,
    "prefill-node": _prefill_node,
    "decode-node": _decode_node,
    "nodes": _nodes,
    "requests": _requests,
    "drain": _drain,
    "restart": _restart,
    "audit": _audit,
    "cache": _cache,
    "keys": _keys,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
