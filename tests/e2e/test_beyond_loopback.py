"""A whole cluster on an address that others can reach: keys between its processes, API keys for its clients."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import psutil
import pytest

from core.wire.curve import NODE, ROUTER, create_keys, load_keys
from router.api_key_file import add_api_key
from tests.e2e.prompts import MODEL
from tests.support.cluster import MODEL_NAME, Cluster, ClusterSpec

PROMPT = "The quick brown fox jumps over the lazy dog. The dog, who had been asleep in the warm sun, woke up and"


def address_beyond_loopback() -> str:
    """The first IPv4 address of this machine that is not loopback; "" when there is none."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family is socket.AF_INET and not entry.address.startswith(("127.", "169.254."))
    ]
    return found[0] if found else ""


@dataclass
class Served:
    """The cluster and two clients' keys."""

    cluster: Cluster
    alice: str
    bob: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    host = address_beyond_loopback()
    if not host:
        pytest.skip("this machine has no address but loopback")
    folder = tmp_path_factory.mktemp("security")
    create_keys(folder / "keys")
    file = folder / "api.yaml"
    alice, bob = (add_api_key(file, name, is_admin=False) for name in ("alice", "bob"))
    spec = ClusterSpec(
        model=MODEL,
        engine={"kv_pool_mib": 400},
        host=host,
        keys=str(folder / "keys"),
        api_key=add_api_key(file, "root", is_admin=True),
        router={"api_keys_file": str(file)},
    )
    with Cluster(spec) as cluster:
        yield Served(cluster, alice, bob)


def test_keys_cluster_serves_tenants_apart_skipped_where_only_loopback_exists(served: Served) -> None:
    def cached_tokens(key: str) -> tuple[str, int]:
        with openai.OpenAI(base_url=f"{served.cluster.url}/v1", api_key=key, max_retries=0, timeout=120) as client:
            answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=4, temperature=0)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    text, first = cached_tokens(served.alice)
    same_text, again = cached_tokens(served.alice)
    other_text, others_first = cached_tokens(served.bob)
    assert text == same_text == other_text and text
    assert first == 0 and again >= 16, "one key finds what it has cached"
    assert others_first == 0, "another key does not"
    served.cluster.wait_clean()


def test_keys_cluster_refuses_who_has_none_skipped_where_only_loopback_exists(served: Served) -> None:
    url = served.cluster.url
    assert httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT}, trust_env=False).status_code == 401
    assert httpx.get(f"{url}/nodes", headers={"Authorization": f"Bearer {served.alice}"}, trust_env=False).status_code == 403
    assert {node["node_id"] for node in served.cluster.client.nodes()} == {"prefill-0", "decode-0"}
    logs = "".join(served.cluster.log(name) for name in ("router", "prefill-0", "decode-0"))
    keys = [load_keys(served.cluster.spec.keys, role) for role in (ROUTER, NODE)]
    secrets = [pair.secret_key.decode() for pair in keys if pair is not None]
    assert len(secrets) == 2
    for secret in (served.alice, served.bob, served.cluster.spec.api_key, *secrets):
        assert secret not in logs
