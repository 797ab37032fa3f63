"""`kvrelay cache pin PROMPT` and `unpin`: keeps what a store has of a prompt from eviction, or no longer.

A pin is a mark on a stored block, so a prompt must have been served before it can be pinned, and whoever removes a block removes
its mark. A chat is taken without the beginning of an answer, so that what is pinned is the prefix of every chat that goes on.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from connectors.coding.block_coding import fingerprints_at_rest
from connectors.store_browser import StoreBrowser
from core.config import OneLineParser
from core.errors import ConnectorError, InvalidInputError
from deploy.cache_blocks import open_store
from deploy.cache_prompt import Scene, add_prompt_flags, config_of, open_scene, token_ids_of

_ARGUMENTS = ("prompts", "all", "json")


def run_pin(argv: list[str], *, is_pinned: bool) -> int:
    """Returns the exit code: 0 when all full blocks of the prompts are as they should be, else 1. Raises KVRelayError."""
    arguments = _parser(is_pinned).parse_args(argv)
    takes_all = not is_pinned and arguments.all
    if bool(arguments.prompts) == takes_all:
        raise InvalidInputError("PROMPT", " ".join(arguments.prompts), "one prompt or more" + ("" if is_pinned else ", or --all"))
    config = config_of(arguments, _ARGUMENTS)
    with contextlib.closing(open_store(config)) as browser:
        browser.problems += browser.missing
        for problem in browser.problems:
            print(f"kvrelay cache: {problem}", file=sys.stderr)
        if browser.why_no_pins:
            raise ConnectorError(f"{config.connector.name}: {browser.why_no_pins}")
        if takes_all:
            print(f"{unpin_all(browser)} blocks were pinned, and no longer are")
            return 1 if browser.problems else 0
        scene = open_scene(arguments, config)
        reports = []
        for prompt in arguments.prompts:
            tokens = token_ids_of(arguments, "PROMPT", prompt, scene, add_generation_prompt=False)
            reports.append(pin_prompt(browser, scene, tokens, is_pinned=is_pinned))
    if arguments.json:
        print(json.dumps(reports))
    else:
        print("\n".join([*scene.words, *(_line(report, is_pinned) for report in reports)]))
    is_done = all(report["num_pinned"] == (report["num_blocks"] if is_pinned else 0) for report in reports)
    return 0 if is_done and not browser.problems and all(report["num_blocks"] for report in reports) else 1


def pin_prompt(browser: StoreBrowser, scene: Scene, token_ids: Sequence[int], *, is_pinned: bool) -> dict[str, Any]:
    """Pin or unpin a prompt's blocks in whatever form they are stored; counts of them."""
    names = scene.hashes(token_ids)
    are_stored, are_pinned = [False] * len(names), [False] * len(names)
    for fingerprint in fingerprints_at_rest(scene.layout):
        found = browser.find(fingerprint, names)
        if any(found):
            pinned = browser.pin(fingerprint, names, is_pinned=is_pinned)
            are_stored = [a or b for a, b in zip(are_stored, found, strict=True)]
            are_pinned = [a or b for a, b in zip(are_pinned, pinned, strict=True)]
    return {
        "num_tokens": len(token_ids),
        "block_size": scene.namespace.block_size,
        "num_blocks": len(names),
        "num_stored": sum(are_stored),
        "num_pinned": sum(are_pinned),
    }


def unpin_all(browser: StoreBrowser) -> int:
    """End all pins; how many there were."""
    pinned_by_layout: dict[bytes, list[bytes]] = {}
    num_pinned = 0
    for entry in browser.entries():
        if entry.is_pinned:
            pinned_by_layout.setdefault(entry.layout_fingerprint, []).append(entry.block_hash)
            num_pinned += 1
    for fingerprint, names in pinned_by_layout.items():
        browser.pin(fingerprint, names, is_pinned=False)
    return num_pinned


def _line(report: dict[str, Any], is_pinned: bool) -> str:
    num_blocks, num_stored, num_pinned = report["num_blocks"], report["num_stored"], report["num_pinned"]
    line = f"{report['num_tokens']} tokens, {num_blocks} full blocks: {num_stored} are stored, {num_pinned} are pinned"
    if not num_blocks:
        return f"{line}; only full blocks of {report['block_size']} tokens are stored"
    if is_pinned and num_stored < num_blocks:
        line += "; what is not stored cannot be pinned: have the prompt served first (`kvrelay cache explain` tells more)"
    if is_pinned and num_pinned < num_stored:
        line += "; a store pins a quarter of its blocks at most, and of tiers only nvme and shm have pins"
    return line


def _parser(is_pinned: bool) -> OneLineParser:
    parser = OneLineParser(
        prog=f"kvrelay cache {'pin' if is_pinned else 'unpin'}",
        description="Keep what a store has of prompts from eviction." if is_pinned else "Let prompts be evicted again.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="the text; @FILE or @- reads it")
    if not is_pinned:
        parser.add_argument("--all", action="store_true", help="whatever is pinned, instead of prompts")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_prompt_flags(parser)
    return parser
