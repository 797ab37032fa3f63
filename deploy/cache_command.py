"""`kvrelay cache`: looks into a store of KV, apart from engines and while they use it.

Here are the flags and what is printed; deploy/cache_blocks.py does the work, deploy/cache_explain.py and deploy/cache_pins.py
what is asked of one prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from connectors.byte_sizes import parse_byte_size, readable_bytes
from connectors.store_browser import BlockEntry, StoreBrowser, WriteOutcome
from core.config import EXIT_USAGE, OneLineParser, add_config_flags, load_config
from core.errors import ConfigError, ConnectorError, InvalidInputError, KVRelayError, NotRepresentable
from deploy.cache_blocks import (
    Progress,
    choose_to_prune,
    entries_of,
    export_blocks,
    import_blocks,
    open_store,
    remove_blocks,
    summarize,
    summarize_tiers,
    verify_blocks,
)

EXIT_OK, EXIT_FAILED = 0, 1
SORTS: dict[str, Callable[[BlockEntry], Any]] = {
    "recent": lambda entry: -entry.eviction_order,
    "oldest": lambda entry: entry.eviction_order,
    "largest": lambda entry: -entry.num_bytes,
    "hash": lambda entry: entry.block_hash,
}
USAGE = """usage: kvrelay cache COMMAND --connector NAME --connector-option KEY=VALUE ... (or --config FILE)
  ls       the blocks that a store holds     [--limit N] [--sort recent|oldest|largest|hash] [--pinned] [--json]
  stat     how many, how large, how old      [--json]
  verify   reads every block and checks it; exit code 1 when one is bad, or not of the encryption_key_file given  [--remove]
  prune    takes blocks away, those that would be evicted first: --older-than 7d, --to-size 10GiB or --all; with --yes.
           Pinned ones only with --all
  export   FILE (- is stdout): verified blocks, least recently used first
  import   FILE (- is stdin): verifies every block; also into another kind of store
  explain  PROMPT: which blocks of a prompt are stored, and why not the others
  pin      PROMPT ...: keeps what is stored of these prompts from eviction (nvme, shm, and tiers of them)
  unpin    PROMPT ... or --all
Those that list blocks take --layout HEX: only blocks whose layout fingerprint at rest begins so.
Exit code 1 also when a part of the store could not be looked at."""


def run_cache(argv: list[str]) -> int:
    """One subcommand; returns the exit code. Raises InvalidInputError or another KVRelayError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return EXIT_OK if argv else EXIT_USAGE
    command = COMMANDS.get(argv[0])
    if command is None:
        raise InvalidInputError("COMMAND", argv[0], f"one of {', '.join(COMMANDS)}")
    try:
        code = command(argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; what Python still wants to flush at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def store_parser(name: str, description: str) -> OneLineParser:
    """A parser with the flags that name a store."""
    parser = OneLineParser(prog=f"kvrelay cache {name}", description=description, allow_abbrev=False)
    add_config_flags(parser, ("connector", "security"))
    return parser


@contextlib.contextmanager
def opened_store(arguments: argparse.Namespace, to_change: str = "") -> Iterator[StoreBrowser]:
    """The store that the flags name. What of it cannot be opened is said on stderr. to_change: the command, if it changes it.

    An import makes what is missing; to all others that is a part that cannot be looked at.
    """
    config = load_config({key: value for key, value in vars(arguments).items() if key in _STORE_KEYS})
    browser = open_store(config)
    try:
        if to_change and browser.why_read_only:
            raise ConnectorError(f"{to_change} cannot be done with {config.connector.name}: {browser.why_read_only}")
        if to_change != "import":
            browser.problems += browser.missing
        yield browser
        for line in (*browser.problems, *browser.notes):
            print(f"kvrelay cache: {line}", file=sys.stderr)
    finally:
        browser.close()


def _and_not_looked_at(browser: StoreBrowser) -> str:
    """The end of a summary of what was not all."""
    num_parts = len(browser.problems)
    return f"; {num_parts} part{'s' * (num_parts > 1)} of the store could not be looked at" if num_parts else ""


def _exit_code(browser: StoreBrowser, *, has_failed: bool = False) -> int:
    return EXIT_FAILED if has_failed or browser.problems else EXIT_OK


_STORE_KEYS = ("config", "connector.name", "connector_option", "security.keys")


def _ls(argv: list[str]) -> int:
    parser = _listing_parser("ls", "List the blocks that a store holds.")
    parser.add_argument("--limit", type=int, default=0, help="at most so many (default: all)")
    parser.add_argument("--sort", default="recent", help=f"{', '.join(SORTS)} (default %(default)s)")
    parser.add_argument("--pinned", action="store_true", help="only those that are pinned")
    parser.add_argument("--json", action="store_true", help="a line of JSON per block")
    arguments = parser.parse_args(argv)
    if arguments.sort not in SORTS:
        raise InvalidInputError("--sort", arguments.sort, f"one of {', '.join(SORTS)}")
    if arguments.limit < 0:
        raise InvalidInputError("--limit", arguments.limit, "0 (all) or more")
    now_s = time.time()
    with opened_store(arguments) as browser:
        wanted = (entry for entry in _chosen(browser, arguments) if entry.is_pinned or not arguments.pinned)
        entries = sorted(wanted, key=SORTS[arguments.sort])
        shown = entries[: arguments.limit or None]
        for entry in shown:
            print(json.dumps(_as_json(entry)) if arguments.json else _as_line(entry, now_s))
        if not arguments.json:
            print(f"{len(shown)} of {len(entries)} blocks{_and_not_looked_at(browser)}", file=sys.stderr)
    return _exit_code(browser)


def _stat(argv: list[str]) -> int:
    parser = _listing_parser("stat", "How much a store holds.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(argv)
    now_s = time.time()
    with opened_store(arguments) as browser:
        entries = list(_chosen(browser, arguments))
        summary = summarize(entries, browser.capacity_bytes, now_s)
        summary |= {"tiers": summarize_tiers(browser, entries), "not_looked_at": browser.problems}
    if arguments.json:
        print(json.dumps(summary))
        return _exit_code(browser)
    print(f"{_holding(summary)}{_and_not_looked_at(browser)}")
    for tier, counts in summary["tiers"].items():
        print(f"tier {tier}: {_holding(counts)}")
    for layout, counts in summary["layouts"].items():
        print(f"layout {layout}: {counts['num_blocks']} blocks, {readable_bytes(counts['num_bytes'])}")
    if summary["num_blocks"]:
        print("last used: " + ", ".join(f"{count} {age}" for age, count in summary["ages"].items() if count))
    if summary["num_pinned"]:
        print(f"pinned: {summary['num_pinned']} blocks")
    if summary["oldest_use_s"] is not None:
        print(f"oldest use: {_readable_age(now_s - summary['oldest_use_s'])} ago")
    return _exit_code(browser)


def _verify(argv: list[str]) -> int:
    parser = _listing_parser("verify", "Read and check every block; exit code 1 when one is bad.")
    parser.add_argument("--remove", action="store_true", help="take bad blocks away")
    arguments = parser.parse_args(argv)
    with opened_store(arguments) as browser:
        report = verify_blocks(browser, _chosen(browser, arguments), Progress("verified"))
        for entry, fault in report.faults:
            print(f"{entry.block_hash.hex()} of layout {entry.layout_fingerprint.hex()}, {entry.place}: {fault}")
        num_removed = remove_blocks(browser, [entry for entry, _ in report.faults]) if arguments.remove else 0
    gone = f", {report.num_gone} gone meanwhile" if report.num_gone else ""
    removed = f", {num_removed} removed" if arguments.remove else ""
    print(f"{report.num_ok} blocks are intact, {len(report.faults)} are bad{gone}{removed}{_and_not_looked_at(browser)}")
    if report.num_readable or report.num_other_key:
        print(f"encrypted: {report.num_readable} can be read with the key given, {report.num_other_key} are of another key")
    if report.num_without_key:
        print(f"encrypted: {report.num_without_key} were checked at rest only: no encryption_key_file was given")
    return _exit_code(browser, has_failed=bool(report.faults or report.num_other_key))


def _prune(argv: list[str]) -> int:
    parser = _listing_parser("prune", "Take blocks away, those that would be evicted first.")
    parser.add_argument("--older-than", metavar="AGE", help="not used for so long: 90s, 30m, 12h, 7d")
    parser.add_argument("--to-size", metavar="SIZE", help="until the rest is no larger: 10GiB")
    parser.add_argument("--all", action="store_true", help="everything, pinned blocks, too")
    parser.add_argument("--yes", action="store_true", help="do it; without, only say what would be done (exit code 0)")
    arguments = parser.parse_args(argv)
    if sum((arguments.older_than is not None, arguments.to_size is not None, arguments.all)) != 1:
        given = [flag for flag in ("--older-than", "--to-size", "--all") if vars(arguments)[flag[2:].replace("-", "_")]]
        words = NotRepresentable(" and ".join(given) or "nothing of that")
        raise InvalidInputError("what to prune", words, "one of --older-than AGE, --to-size SIZE, --all")
    older_than_s = None if arguments.older_than is None else _seconds("--older-than", arguments.older_than)
    max_bytes = None if arguments.to_size is None else parse_byte_size("--to-size", arguments.to_size)
    with opened_store(arguments, "prune") as browser:
        entries = [entry for entry in _chosen(browser, arguments) if browser.can_remove(entry)]
        chosen, num_unknown = choose_to_prune(entries, older_than_s, max_bytes, time.time())
        size = readable_bytes(sum(entry.num_bytes for entry in chosen))
        if num_unknown:
            print(f"kvrelay cache: the age of {num_unknown} blocks is not known: they stay", file=sys.stderr)
        if not arguments.all and (num_pinned := sum(entry.is_pinned for entry in entries)):
            print(f"kvrelay cache: {num_pinned} blocks are pinned: they stay", file=sys.stderr)
        if not arguments.yes:
            print(f"{len(chosen)} blocks ({size}) would go{_and_not_looked_at(browser)}; with --yes they do")
        else:
            num_removed = remove_blocks(browser, chosen, Progress("removed"))
            print(f"{num_removed} blocks were removed{_and_not_looked_at(browser)}")
    return _exit_code(browser)


def _export(argv: list[str]) -> int:
    parser = _listing_parser("export", "Write verified blocks to a file, least recently used first.")
    parser.add_argument("FILE", help="- is stdout")
    arguments = parser.parse_args(argv)
    with opened_store(arguments) as browser, _output(arguments.FILE) as file:
        report = export_blocks(browser, _chosen(browser, arguments), file, Progress("exported"))
    for entry, fault in report.faults:
        print(f"left out: {entry.block_hash.hex()}, {entry.place}: {fault}", file=sys.stderr)
    counts = f"{report.num_ok} blocks were exported, {len(report.faults)} are bad and were left out"
    if report.num_copies:
        counts += f", {report.num_copies} copies in other tiers were not needed"
    print(f"{counts}{_and_not_looked_at(browser)}", file=sys.stderr)
    return _exit_code(browser, has_failed=bool(report.faults))


def _import(argv: list[str]) -> int:
    parser = store_parser("import", "Verify the blocks of an export and store them.")
    parser.add_argument("FILE", help="- is stdin")
    arguments = parser.parse_args(argv)
    with _input(arguments.FILE) as file, opened_store(arguments, "import") as browser:
        report = import_blocks(browser, file, Progress("imported"))
    counts = ", ".join(f"{count} {what}" for what, count in report.counts.items() if count)
    print(f"blocks of the export: {counts or 'none'}{_and_not_looked_at(browser)}")
    if report.error:
        what = "what came before it was imported" if report.counts.get(WriteOutcome.WRITTEN.value) else "nothing was imported"
        raise KVRelayError(f"{arguments.FILE}: {report.error}; {what}")
    return _exit_code(browser, has_failed=bool(report.num_refused))


def _explain(argv: list[str]) -> int:
    from deploy.cache_explain import run_explain

    return run_explain(argv)


def _pin(argv: list[str], *, is_pinned: bool = True) -> int:
    from deploy.cache_pins import run_pin

    return run_pin(argv, is_pinned=is_pinned)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "ls": _ls,
    "stat": _stat,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
    "import": _import,
    "explain": _explain,
    "pin": _pin,
    "unpin": functools.partial(_pin, is_pinned=False),
}


def _listing_parser(name: str, description: str) -> OneLineParser:
    parser = store_parser(name, description)
    parser.add_argument("--layout", default="", metavar="HEX", help="only of layouts whose fingerprint at rest begins so")
    return parser


def _chosen(browser: StoreBrowser, arguments: argparse.Namespace) -> Iterable[BlockEntry]:
    if not re.fullmatch("[0-9a-f]{0,32}", arguments.layout):
        raise InvalidInputError(
            "--layout", arguments.layout, "the first hexadecimal digits of a fingerprint, as `stat` shows them"
        )
    return entries_of(browser, arguments.layout)


def _as_json(entry: BlockEntry) -> dict[str, Any]:
    return {
        "block_hash": entry.block_hash.hex(),
        "layout": entry.layout_fingerprint.hex(),
        "num_bytes": entry.num_bytes,
        "last_used_s": entry.last_used_s,
        "expires_s": entry.expires_s,
        "place": entry.place,
        "is_pinned": entry.is_pinned,
    }


def _as_line(entry: BlockEntry, now_s: float) -> str:
    age = "age unknown" if entry.last_used_s is None else f"used {_readable_age(now_s - entry.last_used_s)} ago"
    expiry = "" if entry.expires_s is None else f", expires in {_readable_age(entry.expires_s - now_s)}"
    pinned = ", pinned" if entry.is_pinned else ""
    where = f"layout {entry.layout_fingerprint.hex()[:8]}  {entry.place}"
    return f"{entry.block_hash.hex()}  {readable_bytes(entry.num_bytes):>10}  {age}{expiry}{pinned}  {where}"


def _holding(counts: dict[str, Any]) -> str:
    capacity = counts["capacity_bytes"]
    of_capacity = f" of {readable_bytes(capacity)}" if capacity else ""
    return f"{counts['num_blocks']} blocks, {readable_bytes(counts['num_bytes'])}{of_capacity}"


def _readable_age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _seconds(field: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if match is None:
        raise InvalidInputError(field, text, "a number with a unit: 90s, 30m, 12h, 7d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@contextlib.contextmanager
def _output(path: str) -> Iterator[BinaryIO]:
    """A file appears under its name when it is complete."""
    if path == "-":
        yield sys.stdout.buffer
        return
    unfinished = Path(f"{path}.part")
    try:
        with unfinished.open("xb") as file:
            unfinished.chmod(0o600)  # KV tells what prompts said
            yield file
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError("FILE", path, f"a file that can be written ({error})") from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - closed below; only opening it is a user's mistake
    except OSError as error:
        raise ConfigError("FILE", path, f"a readable export ({error.strerror})") from error
    with file:
        yield file
