"""`kvrelay cache explain`, with a real store on disk, the real tokenizer and the real model's namespace."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import SteppedClock
from connectors.registry import create_connector, open_browser
from core.config import ModelOptions
from core.kv.hashing import Namespace, extend_block_hashes
from core.kv.layout import KVLayout
from core.model.description import ModelDescription, describe_model
from core.model_files import resolve_model
from deploy.cli import main
from router.api_keys import tenant_cache_salt
from router.tokenizer import Tokenizer
from tests.contract.test_coded_stores import KVNode

PROMPT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 6
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def described() -> ModelDescription:
    return describe_model(resolve_model("smollm2"), ModelOptions(), 16)


class Explained:
    """A store in a folder, prompts saved to it as engines do, and the command's answers."""

    connector_name = "nvme"

    def __init__(self, folder: Path, described: ModelDescription, capsys: pytest.CaptureFixture[str]) -> None:
        self.options: dict[str, Any] = {"path": str(folder), "capacity_bytes": "200MiB"}
        self._described = described
        self._capsys = capsys
        self._tokenizer = Tokenizer(resolve_model("smollm2"))

    def hashes(self, text: str, salt: str = "", layout: KVLayout | None = None) -> list[bytes]:
        layout = layout or self._described.kv_layout
        found: list[bytes] = []
        root = Namespace(self._described.model_fingerprint, layout.fingerprint, layout.block_size).root_hash(salt)
        extend_block_hashes(found, self._tokenizer.encode(text, add_special_tokens=True), layout.block_size, root)
        return found

    def open_node(self, layout: KVLayout | None = None, **options: Any) -> KVNode:
        clock = SteppedClock()
        connector = create_connector(self.connector_name, {**self.options, **options}, clock)
        return KVNode(connector, clock, layout or self._described.kv_layout)

    def save(self, hashes: list[bytes], layout: KVLayout | None = None, **options: Any) -> None:
        node = self.open_node(layout, **options)
        assert node.save(hashes).num_blocks_ok == len(hashes)
        node.connector.close()

    def remove(self, names: list[bytes]) -> None:
        browser = open_browser("nvme", self.options)
        assert browser.remove([entry for entry in browser.entries() if entry.block_hash in names]) == len(names)
        browser.close()

    def run(self, command: str, *argv: str) -> tuple[int, str]:
        flags = [part for key, value in self.options.items() for part in ("--connector-option", f"{key}={value}")]
        code = main(["cache", command, "--connector", self.connector_name, *flags, *argv])
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def ask(self, *argv: str) -> tuple[int, str]:
        return self.run("explain", *argv)

    def ask_json(self, *argv: str) -> tuple[int, dict[str, Any]]:
        code, said = self.ask("--json", *argv)
        return code, json.loads(said)


@pytest.fixture
def explained(
    tmp_path: Path,
    described: ModelDescription,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Explained:
    monkeypatch.setattr("deploy.cache_prompt.DEFAULT_URL", UNREACHABLE)  # a cluster may run on this machine
    return Explained(tmp_path / "store", described, capsys)


def test_explain_prompt_that_is_stored_shows_one_run(explained: Explained) -> None:
    hashes = explained.hashes(PROMPT)
    explained.save(hashes)
    code, said = explained.ask(PROMPT)
    assert code == 0 and f"blocks 0 to {len(hashes) - 1}: in nvme" in said and "first miss" not in said
    _, report = explained.ask_json(PROMPT)
    assert report["block_hashes"] == [name.hex() for name in hashes]
    assert report["num_hit_tokens"] == 16 * len(hashes)


def test_explain_finds_a_prompt_in_lmcache_files_and_in_a_tcp_node(explained: Explained, tmp_path: Path) -> None:
    hashes = explained.hashes(PROMPT)
    explained.save(hashes)
    assert explained.run("export", str(tmp_path / "blocks"))[0] == 0
    explained.connector_name, explained.options = "lmcache", {"path": str(tmp_path / "lmcache")}
    assert explained.run("import", str(tmp_path / "blocks"))[0] == 0
    code, said = explained.ask(PROMPT)
    assert code == 0 and f"blocks 0 to {len(hashes) - 1}: in lmcache" in said
    explained.connector_name, explained.options = "tcp", {"capacity_bytes": "16MiB"}
    node = explained.open_node()
    node.save(hashes[:3])
    explained.options = {"peers": node.connector.kv_address}
    code, said = explained.ask(PROMPT)
    assert code == 1 and "blocks 0 to 2: in tcp" in said and "first miss: block 3" in said
    node.connector.close()


def test_explain_of_tiers_says_which_have_a_block(explained: Explained, tmp_path: Path) -> None:
    hashes, path = explained.hashes(PROMPT), explained.options["path"]
    explained.save(hashes[:3])
    shutil.copytree(path, tmp_path / "fast")
    explained.save(hashes)
    tiers = {"fast": tmp_path / "fast", "slow": path}
    explained.options = {"tiers": ",".join(tiers)}
    for name, folder in tiers.items():
        explained.options |= {f"{name}.connector": "nvme", f"{name}.path": str(folder)}
    explained.connector_name = "tiered"
    code, said = explained.ask(PROMPT)
    assert code == 0 and "blocks 0 to 2: in tiered (fast, slow)\n" in said
    assert f"blocks 3 to {len(hashes) - 1}: in tiered (slow)\n" in said


def test_explain_hole_names_the_first_missing_block_and_its_text(explained: Explained) -> None:
    hashes = explained.hashes(PROMPT)
    explained.save(hashes)
    explained.remove(hashes[2:3])
    code, report = explained.ask_json(PROMPT)
    missing = report["first_missing"]
    assert code == 1 and [run["form"] for run in report["runs"]] == ["exact", "", "exact"]
    assert (missing["block"], missing["first_token"], missing["block_hash"]) == (2, 32, hashes[2].hex())
    assert missing["text"] and missing["text"] in PROMPT
    assert missing["reasons"] == [
        f"{len(hashes) - 3} blocks behind it are stored: this one was, too, and was evicted, removed, or found to be bad"
    ]


def test_explain_prefix_that_ends_says_that_the_rest_was_never_stored(explained: Explained) -> None:
    hashes = explained.hashes(PROMPT)
    explained.save(hashes[:3])
    code, report = explained.ask_json(PROMPT)
    assert code == 1 and report["first_missing"]["block"] == 3 and report["num_hit_tokens"] == 48
    assert report["first_missing"]["reasons"][-1].startswith("it was never stored, or removed (the store is")


def test_explain_empty_store_says_so(explained: Explained) -> None:
    code, said = explained.ask(PROMPT)
    assert code == 1 and "the store is empty" in said and "there is no store in" in said


def test_explain_other_salt_dtype_and_block_size_are_found(explained: Explained, described: ModelDescription) -> None:
    layout = described.kv_layout
    explained.save(explained.hashes(PROMPT))
    code, said = explained.ask(PROMPT, "--cache-salt", "tenant")
    assert code == 1 and "the same prompt is stored without a cache salt (exact)" in said
    code, said = explained.ask(PROMPT, "--dtype", "float16", "--block-size", "32")
    assert code == 1 and "the same prompt is stored as dtype bfloat16 (not float16) and block size 16 (not 32)" in said
    assert f"no block of layout {KVLayout(30, 32, 3, 64, 'float16').fingerprint.hex()} is stored" in said
    assert f"of layout {layout.fingerprint.hex()}: it differs in dtype bfloat16 (not float16) and block size 16" in said


def test_explain_blocks_of_a_codec_that_these_options_do_not_read_are_a_miss(explained: Explained) -> None:
    explained.save(explained.hashes(PROMPT), codec="int8")
    code, said = explained.ask(PROMPT)
    assert code == 1 and "in nvme, but int8" in said and "first miss: block 0" in said
    assert "it is stored, but int8: with these options of the connector, blocks are read that are exact" in said
    code, said = explained.ask(PROMPT, "--connector-option", "codec=int8")
    assert code == 0 and "first miss" not in said


def test_explain_key_of_an_api_client_has_its_own_salt(explained: Explained) -> None:
    explained.save(explained.hashes(PROMPT, salt=tenant_cache_salt("alice", "")))
    assert explained.ask(PROMPT, "--api-key-name", "alice")[0] == 0
    assert explained.ask(PROMPT)[0] == 1


def test_explain_against_another_prompt_shows_the_first_difference(explained: Explained, tmp_path: Path) -> None:
    explained.save(explained.hashes(PROMPT))
    other = PROMPT[:150] + "Xylophone " + PROMPT[150:]
    (tmp_path / "other").write_text(other)
    _, report = explained.ask_json(PROMPT, "--against", f"@{tmp_path / 'other'}")
    difference = report["difference"]
    tokens, others = (Tokenizer(resolve_model("smollm2")).encode(text, add_special_tokens=True) for text in (PROMPT, other))
    place = difference["token"]
    assert tokens[:place] == others[:place] and tokens[place] != others[place]
    assert difference["block"] == place // 16 and difference["before"] in PROMPT
    _, said = explained.ask(PROMPT, "--against", PROMPT)
    assert "the other prompt has the same tokens" in said


def test_explain_token_ids_and_chats_are_prompts_too(explained: Explained) -> None:
    tokens = Tokenizer(resolve_model("smollm2")).encode(PROMPT, add_special_tokens=True)
    explained.save(explained.hashes(PROMPT))
    assert explained.ask(json.dumps(tokens), "--token-ids")[0] == 0
    code, report = explained.ask_json(json.dumps([{"role": "user", "content": PROMPT}]), "--chat")
    assert code == 1 and report["num_tokens"] > len(tokens) and report["first_missing"]["block"] == 0


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["[1, 2", "--token-ids"], "PROMPT: got '[1, 2'; allowed: a JSON list of token ids"),
        (["[-1]", "--token-ids"], "token ids from 0 to 2147483647"),
        (["@/nowhere/prompt"], "PROMPT: got '@/nowhere/prompt'"),
        (["hello", "--chat"], "a JSON list of chat messages"),
    ],
)
def test_explain_mistakes_are_one_line(explained: Explained, argv: list[str], expected: str) -> None:
    code, said = explained.ask(*argv)
    assert code == 2 and expected in said and said.count("\n") == 1


@contextmanager
def cluster_with(node: dict[str, object]) -> Iterator[str]:
    """A router's GET /nodes and POST /cached."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"nodes": [node]}).encode())

        def do_POST(self) -> None:
            names = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["block_hashes"]
            self.send_response(200)
            self.end_headers()
            body = {"num_leading_blocks": {"decode-0": len(names) - 1, "prefill-0": 0}, "missing": []}
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_explain_uses_the_namespace_of_a_running_cluster(explained: Explained, described: ModelDescription) -> None:
    layout = KVLayout(30, 32, 3, 64, "float16")
    explained.save(explained.hashes(PROMPT, layout=layout), layout)
    node: dict[str, object] = {
        "model_name": "smollm2",
        "model_fingerprint": described.model_fingerprint.hex(),
        "layout_fingerprint": layout.fingerprint.hex(),
        "block_size": 32,
        "dtype": "float16",
    }
    with cluster_with(node) as url:
        code, said = explained.ask(PROMPT, "--url", url)
        assert code == 0 and "the cluster has dtype float16 and block size 32" in said
        num_blocks = len(explained.hashes(PROMPT, layout=layout))
        assert f"blocks of its own cache that decode-0 can use: the first {num_blocks - 1}" in said
        assert "in prefill-0's own cache: none" in said
    with cluster_with({**node, "model_fingerprint": "00" * 16}) as url:
        code, said = explained.ask(PROMPT, "--url", url)
        assert code == 1 and "the cluster serves another model" in said
    code, said = explained.ask(PROMPT, "--url", UNREACHABLE)
    assert code == 1 and f"no answer from {UNREACHABLE}" in said
