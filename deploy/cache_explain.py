"""`kvrelay cache explain PROMPT`: which blocks of a prompt the store has, and where it misses, why.

Hashes say what a block holds, and nothing of what it nearly holds. So a miss is explained by what can be looked up: the same
prompt under another salt, dtype, block size or form at rest, deeper blocks of it that are there, and how full the store is.
Against a second prompt the first difference can be shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from connectors.coding.block_coding import fingerprints_at_rest
from connectors.store_browser import StoreBrowser
from core.config import DTYPES, OneLineParser
from core.kv.hashing import Namespace
from core.kv.layout import KVLayout
from deploy.cache_blocks import open_store, summarize
from deploy.cache_prompt import Scene, add_prompt_flags, config_of, open_scene, token_ids_of
from deploy.router_client import post_json

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXT_TOKENS = 8  # shown on either side of a difference
_FULL = 0.95  # of a store's capacity


def run_explain(argv: list[str]) -> int:
    """Returns the exit code: 0 when the store has all full blocks, else 1. Raises InvalidInputError or another KVRelayError."""
    arguments = _parser().parse_args(argv)
    config = config_of(arguments, ("prompt", "against", "json"))
    scene = open_scene(arguments, config)
    token_ids = token_ids_of(arguments, "PROMPT", arguments.prompt, scene)
    report: dict[str, Any] = {"num_tokens": len(token_ids), "block_size": scene.namespace.block_size, "notes": scene.words}
    if arguments.against is not None:
        other = token_ids_of(arguments, "--against", arguments.against, scene)
        report["difference"] = first_difference(token_ids, other, scene)
    browser = open_store(config)
    try:
        report.update(look_up(browser, token_ids, scene, form_read_with(config.connector.options)))
        report["num_leading_blocks_by_node"] = _ask_nodes(scene, report["block_hashes"])
        report["notes"] += [*browser.problems, *browser.missing]
    finally:
        browser.close()
    print(json.dumps(report) if arguments.json else "\n".join(_lines(report, config.connector.name)))
    return 0 if report["num_stored"] == report["num_blocks"] else 1


def form_read_with(options: Mapping[str, Any]) -> str:
    """How blocks are at rest that a connector with these options reads, in the words of fingerprints_at_rest."""
    codec = options.get("codec", "none")
    return f"{codec if codec in ('int8', 'fp8') else 'exact'}{', encrypted' if options.get('encryption_key_file') else ''}"


def look_up(browser: StoreBrowser, token_ids: Sequence[int], scene: Scene, form: str = "exact") -> dict[str, Any]:
    """Where the prompt's blocks are, in runs, and reasons for the first that an engine that reads this form misses."""
    names = scene.hashes(token_ids)
    fingerprint_by_form = {words: fingerprint for fingerprint, words in fingerprints_at_rest(scene.layout).items()}
    found = {words: browser.find(fingerprint, names) for words, fingerprint in fingerprint_by_form.items()}
    order = sorted(found, key=lambda words: words != form)
    where = [next((words for words in order if found[words][place]), "") for place in range(len(names))]
    by_tier = {words: browser.find_by_tier(fingerprint_by_form[words], names) for words in set(where) - {""}}
    tiers = [tuple(tier for tier, has in by_tier.get(words, {}).items() if has[place]) for place, words in enumerate(where)]
    first_missing = next((place for place, words in enumerate(where) if words != form), len(names))
    size = scene.namespace.block_size
    report: dict[str, Any] = {
        "num_blocks": len(names),
        "form": form,
        "num_stored": where.count(form),
        "num_hit_tokens": first_missing * size,
        "runs": [
            {"first": first, "last": last, "form": where[first], "tiers": list(tiers[first])}
            for first, last in _runs(list(zip(where, tiers, strict=True)))
        ],
        "block_hashes": [name.hex() for name in names],
    }
    if first_missing < len(names):
        start = first_missing * size
        report["first_missing"] = {
            "block": first_missing,
            "block_hash": names[first_missing].hex(),
            "first_token": start,
            "text": scene.tokenizer.decode(token_ids[start : start + size], skip_special_tokens=False),
            "reasons": list(_reasons(browser, token_ids, scene, (form, where), first_missing)),
        }
    return report


def _reasons(
    browser: StoreBrowser, token_ids: Sequence[int], scene: Scene, forms: tuple[str, Sequence[str]], first_missing: int
) -> Iterator[str]:
    form, where = forms
    num_deeper = where[first_missing:].count(form)
    summary = summarize(browser.entries(), browser.capacity_bytes, 0.0)
    if not summary["num_blocks"]:
        yield "the store is empty"
        return
    if where[first_missing]:
        yield f"it is stored, but {where[first_missing]}: with these options of the connector, blocks are read that are {form}"
        return
    if num_deeper:
        yield f"{num_deeper} blocks behind it are stored: this one was, too, and was evicted, removed, or found to be bad"
    if first_missing == 0:
        yield from _other_namespaces(browser, token_ids, scene)
    yield from _layout_reasons(summary["layouts"], scene.layout)
    if not num_deeper:
        part = summary["num_bytes"] / summary["capacity_bytes"] if summary["capacity_bytes"] else 0.0
        if part >= _FULL:
            yield f"the store is full ({part:.0%} of its capacity), so this block may have been evicted; else it was never stored"
        else:
            filled = f"the store is {part:.0%} full, so hardly by eviction" if part else "the store has no limit that is known"
            yield f"it was never stored, or removed ({filled})"


def _other_namespaces(browser: StoreBrowser, token_ids: Sequence[int], scene: Scene) -> Iterator[str]:
    """Under what else the same tokens are stored."""
    candidates: list[tuple[str, Scene]] = []
    if scene.cache_salt:
        candidates.append(("without a cache salt", replace(scene, cache_salt="")))
    for layout, words in _similar_layouts(scene.layout):
        namespace = Namespace(scene.namespace.model_fingerprint, layout.fingerprint, layout.block_size)
        candidates.append((f"as {words}", replace(scene, layout=layout, namespace=namespace)))
    for words, candidate in candidates:
        names = candidate.hashes(token_ids)[:1]
        for fingerprint, form in fingerprints_at_rest(candidate.layout).items() if names else ():
            if browser.find(fingerprint, names)[0]:
                yield f"the same prompt is stored {words} ({form})"


def _layout_reasons(layouts: dict[str, dict[str, int]], ours: KVLayout) -> Iterator[str]:
    """What the store holds when it holds nothing of our layout."""
    own = {fingerprint.hex() for fingerprint in fingerprints_at_rest(ours)}
    if own & layouts.keys():
        return
    known = {
        fingerprint.hex(): f"{words}, {form}"
        for layout, words in _similar_layouts(ours)
        for fingerprint, form in fingerprints_at_rest(layout).items()
    }
    yield f"no block of layout {ours.fingerprint.hex()} is stored"
    for layout, counts in layouts.items():
        differs = f"it differs in {known[layout]}" if layout in known else "of a model with other layers, heads or head size"
        yield f"stored instead: {counts['num_blocks']} blocks of layout {layout}: {differs}"


def _similar_layouts(layout: KVLayout) -> Iterator[tuple[KVLayout, str]]:
    """Layouts of the same model with another dtype or block size, and what differs."""
    for dtype in DTYPES:
        for block_size in sorted({*_BLOCK_SIZES, layout.block_size}):
            other = replace(layout, dtype=dtype, block_size=block_size)
            words = [f"dtype {dtype} (not {layout.dtype})"] if dtype != layout.dtype else []
            words += [f"block size {block_size} (not {layout.block_size})"] if block_size != layout.block_size else []
            if words:
                yield other, " and ".join(words)


def first_difference(token_ids: Sequence[int], other: Sequence[int], scene: Scene) -> dict[str, Any] | None:
    """Where two prompts part, with the texts around it; None when neither differs from the other's beginning."""
    size = scene.namespace.block_size
    pairs = enumerate(zip(token_ids, other, strict=False))
    place = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    if place is None:
        if len(token_ids) == len(other):
            return None
        place = min(len(token_ids), len(other))

    def text(ids: Sequence[int]) -> str:
        return scene.tokenizer.decode(ids, skip_special_tokens=False)

    return {
        "token": place,
        "block": place // size,
        "before": text(token_ids[max(0, place - _CONTEXT_TOKENS) : place]),
        "prompt": text(token_ids[place : place + _CONTEXT_TOKENS]),
        "against": text(other[place : place + _CONTEXT_TOKENS]),
    }


def _lines(report: dict[str, Any], store: str) -> Iterator[str]:
    size, num_blocks = report["block_size"], report["num_blocks"]
    rest = report["num_tokens"] - num_blocks * size
    yield f"prompt: {report['num_tokens']} tokens: {num_blocks} full blocks of {size}, and {rest} tokens that no store keeps"
    yield from report["notes"]
    for run in report["runs"]:
        form = "" if run["form"] == report["form"] else f", but {run['form']}"
        tiers = f" ({', '.join(run['tiers'])})" if run["tiers"] else ""
        where = f"in {store}{tiers}{form}" if run["form"] else f"not in {store}"
        blocks = f"blocks {run['first']} to {run['last']}" if run["last"] > run["first"] else f"block {run['first']}"
        yield f"{blocks}: {where}"
    for node, count in report["num_leading_blocks_by_node"].items():
        yield f"blocks of its own cache that {node} can use: the first {count}" if count else f"in {node}'s own cache: none"
    if missing := report.get("first_missing"):
        last = missing["first_token"] + size - 1
        yield f"first miss: block {missing['block']}, tokens {missing['first_token']} to {last}, hash {missing['block_hash']}"
        yield f"  its text: {missing['text']!r}"
        for reason in missing["reasons"]:
            yield f"  {reason}"
    if "difference" in report:
        difference = report["difference"]
        if difference is None:
            yield "the other prompt has the same tokens"
            return
        yield f"the other prompt differs from token {difference['token']} on, in block {difference['block']}"
        yield f"  both:   …{difference['before']!r}"
        yield f"  this:    {difference['prompt']!r}…"
        yield f"  other:   {difference['against']!r}…"


def _runs(where: Sequence[object]) -> Iterator[tuple[int, int]]:
    start = 0
    for place in range(1, len(where) + 1):
        if place == len(where) or where[place] != where[start]:
            yield start, place - 1
            start = place


def _ask_nodes(scene: Scene, block_hashes: Sequence[str]) -> dict[str, int]:
    """How many leading blocks of the prompt each node has in its own cache."""
    if not scene.url or not block_hashes:
        return {}
    status, body = post_json(scene.url, "/cached", content={"block_hashes": block_hashes}, timeout_s=30.0)
    if status != 200 or not isinstance(body, dict):
        scene.words.append(f"what nodes have in their own caches is not known: status {status} from {scene.url}/cached")
        return {}
    counts: dict[str, int] = body.get("num_leading_blocks", {})
    return counts


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="kvrelay cache explain",
        description="Which blocks of a prompt a store has, and why not the others.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text; @FILE or @- reads it")
    parser.add_argument("--against", metavar="OTHER", help="a second prompt: shows the first difference")
    parser.add_argument("--json", action="store_true", help="as JSON, with all block hashes")
    add_prompt_flags(parser)
    return parser
