"""Who is served: the official client and plain HTTP with and without keys, and what of a key reaches the nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from starlette.types import Message, Scope

from core.wire.messages import Generate
from deploy.router_client import get_json, nodes_up, post_json
from router.api_key_file import ApiKeyFile, add_api_key
from router.api_keys import ACCESS_BY_PATH, Access, ApiKeyGate, access_of, bearer_key, is_local, tenant_cache_salt
from router.metrics import RouterMetrics
from tests.unit.router.running_router import RunningRouter

PROMPT = [5, 6, 7, 8, 9, 10, 11]
CLIENT_REQUESTS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
OPEN_PATHS = ["/health", "/version", "/metrics"]
ADMIN_REQUESTS = [("GET", "/nodes"), ("GET", "/audit"), ("GET", "/requests"), ("POST", "/drain/decode-0"), ("GET", "/admin/x")]


@dataclass
class Keyed:
    """A router with API keys, and the keys."""

    router: RunningRouter
    file: Path
    alice: str
    bob: str
    admin: str

    def generated(self, key: str, **body: object) -> Generate:
        """Completes PROMPT; what the first node was told."""
        before = [len(node.received) for node in self.router.nodes]
        answer = httpx.post(
            f"{self.router.url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 2, **body},
            headers={"Authorization": f"Bearer {key}"},
            timeout=10,
        )
        assert answer.status_code == 200, answer.text
        told = [message for node, old in zip(self.router.nodes, before, strict=True) for message in node.received[old:]]
        assert len(told) == 2 and len({message.cache_salt for message in told}) == 1, "prefill and decode share their blocks"
        return told[0]


def keyed_router(model_folder: Path, folder: Path, **options: object) -> Keyed:
    file = folder / "api.yaml"
    alice, bob = (add_api_key(file, name, is_admin=False) for name in ("alice", "bob"))
    admin = add_api_key(file, "root", is_admin=True)
    return Keyed(RunningRouter(model_folder, api_keys_file=str(file), **options), file, alice, bob, admin)


@pytest.fixture(scope="module")
def keyed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    found = keyed_router(model_folder, tmp_path_factory.mktemp("api_keys"))
    with found.router as router:
        router.add_node("prefill")
        router.add_node("decode")
        yield found


def ask(router: RunningRouter, method: str, path: str, authorization: str | None = None, **headers: str) -> httpx.Response:
    given = {"Authorization": authorization} if authorization is not None else {}
    body = {"prompt": [5, 6, 7], "max_tokens": 1} if method == "POST" else None
    return httpx.request(method, f"{router.url}{path}", json=body, headers={**given, **headers}, timeout=10)


def count(router: RunningRouter, kind: str) -> float:
    lines = httpx.get(f"{router.url}/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f'kvrelay_request_errors_total{{kind="{kind}"}}'))


# -- with keys ---------------------------------------------------------------------------------------------------------
def test_openai_client_key_is_all_it_needs(keyed: Keyed) -> None:
    with openai.OpenAI(base_url=f"{keyed.router.url}/v1", api_key=keyed.alice, max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).usage is not None
        assert [model.id for model in client.models.list()] == ["tiny"]
    with (
        openai.OpenAI(base_url=f"{keyed.router.url}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
    assert "unused" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "path", "authorization"),
    [
        *((method, path, sent) for method, path in CLIENT_REQUESTS + ADMIN_REQUESTS for sent in (None, "Bearer wrong-key")),
        *(("GET", "/v1/models", sent) for sent in ("", "Bearer", "Basic {key}", "{key}", "Bearer {key}x", "Bearer {key} {key}")),
    ],
)
def test_key_missing_or_wrong_is_a_401_in_openai_shape(keyed: Keyed, method: str, path: str, authorization: str | None) -> None:
    num_before = count(keyed.router, "unauthorized")
    answer = ask(keyed.router, method, path, authorization and authorization.format(key=keyed.alice))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert error["type"] == "authentication_error" and error["code"] == 401 and "Authorization: Bearer KEY" in error["message"]
    assert keyed.alice not in answer.text and "wrong-key" not in answer.text
    assert count(keyed.router, "unauthorized") == num_before + 1


def test_key_two_headers_are_refused_even_when_both_fit(keyed: Keyed) -> None:
    headers = [("Authorization", f"Bearer {keyed.alice}"), ("Authorization", f"Bearer {keyed.alice}")]
    assert httpx.get(f"{keyed.router.url}/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_key_open_paths_need_none(keyed: Keyed, path: str) -> None:
    assert ask(keyed.router, "GET", path).status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMIN_REQUESTS)
def test_admin_path_clients_key_is_a_403_and_admins_key_passes(keyed: Keyed, method: str, path: str) -> None:
    refused = ask(keyed.router, method, path, f"Bearer {keyed.alice}")
    assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"
    passed = ask(keyed.router, method, path, f"bearer   {keyed.admin}")
    assert passed.status_code not in (401, 403)


def test_key_revoked_by_removing_its_entry(model_folder: Path, tmp_path: Path) -> None:
    keyed = keyed_router(model_folder, tmp_path)
    with keyed.router as router:
        assert ask(router, "GET", "/v1/models", f"Bearer {keyed.alice}").status_code == 200
        entries = [entry for entry in yaml.safe_load(keyed.file.read_text()) if entry["name"] != "alice"]
        keyed.file.write_text(yaml.safe_dump(entries))
        for _ in range(100):
            answer = httpx.get(f"{router.url}/v1/models", headers={"Authorization": f"Bearer {keyed.alice}"})
            if answer.status_code == 401:
                break
            assert answer.status_code == 200
            time.sleep(0.1)
        assert answer.status_code == 401
        assert ask(router, "GET", "/v1/models", f"Bearer {keyed.bob}").status_code == 200


def test_key_and_its_hash_show_up_nowhere(model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keyed = keyed_router(model_folder, tmp_path)
    with caplog.at_level(logging.DEBUG), keyed.router as router:
        node = router.add_node("decode")
        texts = [
            ask(router, method, path, f"Bearer {key}").text
            for key in (keyed.admin, keyed.alice, "wrong-" + keyed.bob)
            for method, path in CLIENT_REQUESTS + ADMIN_REQUESTS
        ]
        texts.append(httpx.get(f"{router.url}/metrics").text)
        texts += [repr(message) for message in node.received]
    everything = "\n".join([*texts, caplog.text])
    hashes = [entry["key_sha256"] for entry in yaml.safe_load(keyed.file.read_text())]
    for secret in (keyed.alice, keyed.bob, keyed.admin, *hashes):
        assert secret not in everything


# -- tenants are apart -------------------------------------------------------------------------------------------------
def test_cache_salt_two_keys_never_share_and_one_key_does(keyed: Keyed) -> None:
    alice, again, bob = (keyed.generated(key).cache_salt for key in (keyed.alice, keyed.alice, keyed.bob))
    assert alice == again and alice != bob and alice and bob
    salted = [keyed.generated(key, cache_salt="mine").cache_salt for key in (keyed.alice, keyed.alice, keyed.bob)]
    assert salted[0] == salted[1] and len({alice, bob, salted[0], salted[2]}) == 4


def test_cache_salt_client_cannot_ask_for_anothers(keyed: Keyed) -> None:
    alice = keyed.generated(keyed.alice).cache_salt
    assert keyed.generated(keyed.bob, cache_salt=alice).cache_salt != alice


def test_cache_salt_option_off_is_as_the_client_says(model_folder: Path, tmp_path: Path) -> None:
    keyed = keyed_router(model_folder, tmp_path, cache_salt_per_key=False)
    with keyed.router as router:
        router.add_node("prefill")
        router.add_node("decode")
        assert keyed.generated(keyed.alice).cache_salt == keyed.generated(keyed.bob).cache_salt == ""
        assert keyed.generated(keyed.alice, cache_salt="mine").cache_salt == "mine"


def test_tenant_cache_salt_every_split_of_name_and_salt_is_another() -> None:
    text = "1:a2:bb"
    salts = [tenant_cache_salt(text[:i], text[i:]) for i in range(1, len(text) + 1)]
    assert len(set(salts)) == len(salts)
    assert tenant_cache_salt("", "as is") == "as is"


# -- without keys ------------------------------------------------------------------------------------------------------
def scope_of(path: str, client: str | None, *headers: bytes) -> Scope:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "client": (client, 50000) if client is not None else None,
        "headers": [(name, b"x") for name in headers],
    }


async def status_behind_gate(scope: Scope, keys: ApiKeyFile | None = None) -> int:
    """What the gate says; 200 when it lets the request through."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: object, send: object) -> None:
        assert scope["state"]["tenant"] == ""
        sent.append({"status": 200})

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    async def send(message: Message) -> None:
        sent.append(message)

    gate = ApiKeyGate(app, keys, RouterMetrics("tiny"), has_salt_per_key=True)
    await gate(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("client", "headers", "expected"),
    [
        ("127.0.0.1", (), 200),
        ("127.8.9.1", (), 200),
        ("::1", (), 200),
        ("::ffff:127.0.0.1", (), 200),
        ("192.0.2.7", (), 403),
        ("::ffff:192.0.2.7", (), 403),
        ("fd00::2", (), 403),
        (None, (), 403),
        ("127.0.0.1", (b"x-forwarded-for",), 403),
        ("127.0.0.1", (b"forwarded",), 403),
        ("127.0.0.1", (b"origin",), 403),
    ],
)
def test_admin_path_without_keys_answers_loopback_peers_alone(
    client: str | None, headers: tuple[bytes, ...], expected: int
) -> None:
    for path in ("/nodes", "/audit", "/drain/x", "/requests", "/admin/anything", "/forgotten"):
        assert asyncio.run(status_behind_gate(scope_of(path, client, *headers))) == expected
    for path in ("/v1/models", "/tokenize", *OPEN_PATHS):
        assert asyncio.run(status_behind_gate(scope_of(path, client, *headers))) == 200
    assert is_local(scope_of("/", client, *headers)) == (expected == 200)


def test_admin_path_without_keys_says_why(cluster: RunningRouter) -> None:
    assert ask(cluster, "GET", "/nodes").status_code == 200
    num_before = count(cluster, "forbidden")
    answer = ask(cluster, "GET", "/nodes", **{"X-Forwarded-For": "127.0.0.1"})
    assert answer.status_code == 403
    assert "router.api_keys_file" in answer.json()["error"]["message"]
    assert count(cluster, "forbidden") == num_before + 1


def test_keys_without_file_any_or_none_is_served(cluster: RunningRouter) -> None:
    for authorization in (None, "Bearer unused"):
        assert ask(cluster, "POST", "/v1/completions", authorization).status_code == 200


# -- the table ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/completions", Access.KEY),
        ("/v1", Access.KEY),
        ("/v1x", Access.ADMIN),
        ("/healthy", Access.ADMIN),
        ("/nodes/", Access.ADMIN),
        ("//health", Access.ADMIN),
        ("/health/../nodes", Access.OPEN),  # the application knows no such path, either
        ("/HEALTH", Access.ADMIN),
        ("", Access.ADMIN),
        ("/anything/new", Access.ADMIN),
    ],
)
def test_access_path_is_judged_by_whole_parts(path: str, expected: Access) -> None:
    assert access_of(path) is expected


def test_access_tricks_with_the_path_open_nothing(keyed: Keyed) -> None:
    for path in (
        "/health/../nodes",
        "/health/%2e%2e/nodes",
        "/%6eodes",
        "/v1/../nodes",
        "//nodes",
        "/nodes/",
        "/nodes?x=/health",
    ):
        with httpx.Client() as client:
            request = client.build_request("GET", keyed.router.url)
            request.url = request.url.copy_with(raw_path=path.encode())
            assert client.send(request).status_code in (401, 404), path


def test_access_every_route_is_in_the_table(keyed: Keyed) -> None:
    """A route that is not is closed to clients; one that they need would be missed here first."""
    routes = {route.path for route in keyed.router.api._routes().routes}  # type: ignore[attr-defined]
    parts = tuple(part for part, _ in ACCESS_BY_PATH)
    assert not {path for path in routes if not any(path == part or path.startswith(f"{part}/") for part in parts)}


@pytest.mark.parametrize(
    ("header", "expected"),
    [(b"Bearer k", b"k"), (b"bEaReR   k ", b"k"), (b"Bearer", b""), (b"Basic k", b""), (b"k", b""), (b"Bearer \xff", b"\xff")],
)
def test_bearer_key_scheme_is_read_in_any_case(header: bytes, expected: bytes) -> None:
    assert bearer_key([(b"host", b"x"), (b"authorization", header)]) == expected
    assert bearer_key([]) == b""


def test_nodes_up_are_told_without_a_key(keyed: Keyed) -> None:
    """What `kvrelay serve` waits for, whoever the API keys belong to."""
    assert nodes_up(keyed.router.url) == {"prefill-0", "decode-1"}


def test_commands_send_the_key_of_their_environment(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses() -> tuple[int, int]:
        return get_json(keyed.router.url, "/requests")[0], post_json(keyed.router.url, "/drain/nobody")[0]

    assert statuses() == (401, 401)
    monkeypatch.setenv("KVRELAY_API_KEY", keyed.alice)
    assert statuses() == (403, 403)
    monkeypatch.setenv("KVRELAY_API_KEY", keyed.admin)
    assert statuses() == (200, 404)
