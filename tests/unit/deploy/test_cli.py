"""The `kvrelay` command: a user's mistake is one line and exit code 2; questions to a router print its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.cli import main
from router.api_key_file import ApiKeyFile
from tests.support.virtual_clock import VirtualClock


class Answers(BaseHTTPRequestHandler):
    """Answers GET with what `bodies` holds for the path."""

    bodies: dict[str, object] = {}  # noqa: RUF012  # set by each test through the fixture
    authorizations: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.authorizations.append(self.headers["Authorization"])
        body = self.bodies.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if body is not None else b"no")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[tuple[str, dict[str, object]]]:
    handler = type("Handler", (Answers,), {"bodies": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.bodies  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def exit_code(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as error:  # argparse
        assert isinstance(error.code, int)
        return error.code


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["launch"], "no command 'launch'"),
        (["serve", "--port", "eighty"], "router.port"),
        (["serve", "--port", "99999"], "router.port: got 99999; allowed: 0 to 65535"),
        (["serve", "--prot", "80"], "unrecognized arguments: --prot 80"),
        (["serve", "--decode", "0"], "cluster.decode"),
        (["serve", "--config", "/no/such/file.yaml"], "--config: got '/no/such/file.yaml'; allowed: a readable YAML file"),
        (["serve", "--host", "192.0.2.77"], "an address of this machine"),
        (["serve", "--port", "0", "--connector", "floppy"], "connector.name: got 'floppy'; allowed: one of"),
        (["serve", "--port", "0", "--connector-option", "capacity=4"], "connector.options.capacity: got '4'"),
        (
            ["serve", "--port", "0", "--connector-option", "capacity_bytes=-5"],
            "capacity_bytes: got '-5'; allowed: a number of bytes",
        ),
        (["serve", "--control-host", "0.0.0.0"], "router.control_host: got '0.0.0.0'; allowed: a loopback address"),
        (["router", "--control-host", "0.0.0.0"], "router.control_host: got '0.0.0.0'; allowed: a loopback address"),
        (["decode-node", "--router", "192.0.2.7:8001"], "make them with `kvrelay keys DIR`"),
        (["decode-node", "--keys", "/no/such/keys"], "security.keys: got '/no/such/keys'"),
        (["decode-node", "--model", "/no/model", "--connector-option", "x=1"], "connector.options.x: got '1'; allowed: one of"),
        (["prefill-node", "--model", "/no/model", "--connector", "nvme"], "connector.options.path: got ''; allowed: a directory"),
        (["serve", "--port", "0", "--keys", "/no/such/keys"], "security.keys: got '/no/such/keys'"),
        (["serve", "--port", "0", "--api-keys-file", "/no/such.yaml"], "router.api_keys_file: got '/no/such.yaml'"),
        (["keys"], "the following arguments are required: DIR"),
        (["keys", "api", "alice"], "the following arguments are required: --file"),
        (["keys", "api", "a b", "--file", "/tmp/never-written"], "NAME: got 'a b'"),
        (["audit", "--url", "localhost:8000"], "--url: got 'localhost:8000'; allowed: http://HOST:PORT"),
    ],
)
def test_cli_mistake_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert exit_code(*argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert expected in lines[0]


def test_cli_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert exit_code("serve", "--port", "0", "--model", str(tmp_path / "none")) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "no such folder" in lines[0]


def test_cli_without_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 2
    assert exit_code("--help") == 0
    listed = capsys.readouterr().out
    for command in ("serve", "router", "prefill-node", "decode-node", "audit", "nodes", "keys", "version"):
        assert f"  {command} " in listed


def test_cli_version_says_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("version") == 0
    assert capsys.readouterr().out.startswith("kvrelay")


def test_cli_audit_clean_cluster_exits_zero(capsys: pytest.CaptureFixture[str], router: tuple[str, dict[str, object]]) -> None:
    url, bodies = router
    bodies["/audit"] = {"is_clean": True, "nodes": {}}
    assert exit_code("audit", "--url", url) == 0
    assert json.loads(capsys.readouterr().out)["is_clean"] is True


def test_cli_audit_something_left_exits_one(router: tuple[str, dict[str, object]]) -> None:
    url, bodies = router
    bodies["/audit"] = {"is_clean": False, "nodes": {"decode-0": {"counts": {"pinned_blocks": 3}}}}
    assert exit_code("audit", "--url", url) == 1


def test_cli_audit_without_an_answer_exits_one(capsys: pytest.CaptureFixture[str], router: tuple[str, dict[str, object]]) -> None:
    assert exit_code("audit", "--url", router[0]) == 1
    assert "status 404" in capsys.readouterr().err
    assert exit_code("audit", "--url", "http://127.0.0.1:9") == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


def test_cli_nodes_prints_a_line_each(capsys: pytest.CaptureFixture[str], router: tuple[str, dict[str, object]]) -> None:
    url, bodies = router
    bodies["/nodes"] = {"nodes": [{"node_id": "prefill-0", "role": "prefill"}, {"node_id": "decode-0", "role": "decode"}]}
    assert exit_code("nodes", "--url", url) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["node_id", "prefill-0", "decode-0"]


def test_cli_key_from_the_environment_is_sent_and_not_shown(
    capsys: pytest.CaptureFixture[str], router: tuple[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bodies = router
    Answers.authorizations.clear()
    assert exit_code("audit", "--url", url) == 1
    monkeypatch.setenv("KVRELAY_API_KEY", "kvr-secret")
    bodies["/nodes"] = {"nodes": []}
    assert exit_code("nodes", "--url", url) == 0
    assert exit_code("audit", "--url", url) == 1
    assert Answers.authorizations == [None, "Bearer kvr-secret", "Bearer kvr-secret"]
    assert "secret" not in "".join(capsys.readouterr())


def test_cli_keys_says_what_to_copy_where_and_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert exit_code("keys", str(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"the router's machine needs {folder}/router.key_secret and {folder}/node.key",
        f"every node's machine needs {folder}/node.key_secret and {folder}/router.key",
    ]
    assert all(Path(word).is_file() for line in lines for word in line.split() if "/" in word)
    assert exit_code("keys", str(folder)) == 2
    assert "never overwritten" in capsys.readouterr().err


def test_cli_keys_api_prints_the_key_once_and_keeps_its_hash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "api.yaml"
    assert exit_code("keys", "api", "alice", "--file", str(file)) == 0
    shown = capsys.readouterr()
    assert exit_code("keys", "api", "root", "--admin", "--file", str(file)) == 0
    admin_key = capsys.readouterr().out.strip()
    key = shown.out.strip()
    assert key not in file.read_text() + shown.err and len(key.split()) == 1
    found = ApiKeyFile(file, VirtualClock())
    for text, name, is_admin in ((key, "alice", False), (admin_key, "root", True)):
        entry = found.find(text.encode())
        assert entry is not None and (entry.name, entry.is_admin) == (name, is_admin)
