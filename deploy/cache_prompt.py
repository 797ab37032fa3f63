"""The prompt that a `kvrelay cache` command is about: its flags, its tokens, and the namespace in which these are hashed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.adapter_files import read_adapter
from core.config import Config, OneLineParser, add_config_flags, load_config
from core.errors import ConfigError, InvalidInputError
from core.kv.hashing import Namespace, extend_block_hashes
from core.kv.layout import KVLayout
from core.model.description import describe_model
from core.model_files import resolve_model
from deploy.router_client import RouterUnreachableError, get_json
from router.api_keys import tenant_cache_salt
from router.chat_template import load_chat_template
from router.tokenizer import Tokenizer

DEFAULT_URL = "http://127.0.0.1:8000"
_FLAGS = ("token_ids", "chat", "url", "cache_salt", "api_key_name", "adapter")


@dataclass(frozen=True, slots=True)
class Scene:
    """What a prompt is looked up with. words: where the namespace comes from, and what is odd about it.
    url: of the cluster; "" where none is asked.
    """

    model_dir: Path
    tokenizer: Tokenizer
    layout: KVLayout
    namespace: Namespace
    cache_salt: str
    url: str
    words: list[str]
    adapter_fingerprint: bytes = b""

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of all full blocks."""
        found: list[bytes] = []
        root_hash = self.namespace.root_hash(self.cache_salt, self.adapter_fingerprint)
        extend_block_hashes(found, token_ids, self.namespace.block_size, root_hash)
        return found


def add_prompt_flags(parser: OneLineParser) -> None:
    """How a prompt is given, and in which namespace it is hashed; with the flags of the store."""
    parser.add_argument("--token-ids", action="store_true", help="PROMPT is a JSON list of token ids")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a JSON list of messages, as /v1/chat/completions takes them"
    )
    parser.add_argument("--url", help=f"of a router, whose namespace is used (default: {DEFAULT_URL}, if one answers)")
    parser.add_argument("--cache-salt", default="", help="of the request")
    parser.add_argument(
        "--api-key-name", default="", help="whose API key the request came with, where keys have salts of their own"
    )
    parser.add_argument("--adapter", default="", metavar="FOLDER", help="of the request's LoRA adapter")
    add_config_flags(parser, ("model", "engine", "connector", "security"))


def config_of(arguments: argparse.Namespace, ours: Sequence[str]) -> Config:
    """What flags, file and environment say. ours: the command's own arguments, beside those of add_prompt_flags."""
    return load_config({key: value for key, value in vars(arguments).items() if key not in (*ours, *_FLAGS)})


def open_scene(arguments: argparse.Namespace, config: Config) -> Scene:
    """The running cluster's namespace if there is one, else that of the flags. Raises KVRelayError."""
    model_dir = resolve_model(config.model.path)
    tokenizer = Tokenizer(model_dir)
    described = describe_model(model_dir, config.model, config.engine.block_size)
    namespace = Namespace(described.model_fingerprint, described.kv_layout.fingerprint, config.engine.block_size)
    layout, words = described.kv_layout, []
    node = _ask_cluster(arguments.url)
    if node is None:
        words.append(f"no cluster was asked: model, dtype and block size are those of the flags ({config.model.path})")
    else:
        layout = replace(layout, dtype=node["dtype"], block_size=node["block_size"])
        cluster = Namespace(
            bytes.fromhex(node["model_fingerprint"]), bytes.fromhex(node["layout_fingerprint"]), node["block_size"]
        )
        if cluster.model_fingerprint != namespace.model_fingerprint:
            words.append(f"the cluster serves another model ({node['model_name']}) than --model {config.model.path}")
        elif cluster.layout_fingerprint != layout.fingerprint:
            words.append("the cluster's layout is none that this version makes of the model")
        if cluster != namespace:
            words.append(f"the cluster has dtype {node['dtype']} and block size {node['block_size']}, which are used here")
        namespace = cluster
    salt = tenant_cache_salt(arguments.api_key_name, arguments.cache_salt)
    adapter = read_adapter(arguments.adapter, keeps_weights=False).fingerprint if arguments.adapter else b""
    url = (arguments.url or DEFAULT_URL) if node is not None else ""
    return Scene(model_dir, tokenizer, layout, namespace, salt, url, words, adapter)


def _ask_cluster(url: str | None) -> dict[str, Any] | None:
    """Some node of the cluster, as GET /nodes shows it. Only a URL that was given must answer."""
    try:
        status, body = get_json(url or DEFAULT_URL, "/nodes")
    except RouterUnreachableError:
        if url is not None:
            raise
        return None
    nodes = body.get("nodes", []) if status == 200 and isinstance(body, dict) else []
    node: dict[str, Any] | None = next((node for node in nodes if "model_fingerprint" in node), None)
    if node is None and url is not None:
        raise InvalidInputError("--url", url, f"a router that shows its nodes (status {status}, {len(nodes)} nodes)")
    return node


def token_ids_of(
    arguments: argparse.Namespace, field: str, given: str, scene: Scene, *, add_generation_prompt: bool = True
) -> list[int]:
    """A prompt as a node gets it. field: the argument that it came in. add_generation_prompt: whether a chat's answer follows."""
    text = given
    if given.startswith("@"):
        try:
            text = sys.stdin.read() if given == "@-" else Path(given[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(field, given, f"@FILE, a readable text in UTF-8 ({error})") from error
    if arguments.token_ids:
        return _parse_json(field, text, "a JSON list of token ids", int)
    if not arguments.chat:
        return scene.tokenizer.encode(text, add_special_tokens=True)
    messages = _parse_json(field, text, "a JSON list of chat messages", dict)
    template = load_chat_template(scene.model_dir, scene.tokenizer)
    if template is None:
        raise InvalidInputError(field, "a chat", "a text: this model has no chat template")
    rendered = template.render(messages, add_generation_prompt=add_generation_prompt)
    return scene.tokenizer.encode(rendered, add_special_tokens=False)


def _parse_json(field: str, text: str, allowed: str, kind: type) -> list[Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(type(item) is kind for item in parsed):
        raise InvalidInputError(field, text, allowed)
    if kind is int and not all(0 <= item < 2**31 for item in parsed):
        raise InvalidInputError(field, text, f"{allowed} from 0 to 2147483647")
    return parsed
