"""Options of the ray connector, and bodies of its messages: what is refused, and that nothing but our errors comes of garbage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.ray import directory
from connectors.ray import messages as ray_messages
from connectors.ray.connector import RayOptions
from connectors.registry import create_connector
from core.errors import ConfigError, ConnectorError
from tests.support.virtual_clock import VirtualClock

NAMES = [bytes([number]) * 16 for number in range(5)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", "nowhere"),
        ("address", "host:port"),
        ("node_ip", "localhost"),
        ("auth", "maybe"),
        ("namespace", "a b"),
        ("namespace", ""),
        ("capacity_bytes", 0),
        ("object_bytes", 2**31),
        ("linger_s", 0.0),
        ("num_threads", 0),
        ("op_timeout_s", 0.0),
        ("lookup_batch_size", 10**6),
    ],
)
def test_ray_options_value_that_is_not_allowed_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"connector.options.{name}"):
        RayOptions(**{name: value})


def test_ray_connector_takes_sizes_with_units_and_refuses_unknown_options() -> None:
    assert create_connector("ray", {"capacity_bytes": "2GiB", "address": "[::1]:6379"}, VirtualClock()).name == "ray"
    with pytest.raises(ConfigError, match="no_such_option"):
        create_connector("ray", {"no_such_option": 1}, VirtualClock())


def test_ray_messages_come_back_as_they_went() -> None:
    assert ray_messages.unpack_chain(ray_messages.pack_chain(NAMES[:2], NAMES[2:])) == (NAMES[:2], NAMES[2:])
    assert ray_messages.unpack_put(ray_messages.pack_put(NAMES[:2], [7, 9], NAMES)) == (NAMES[:2], (7, 9), NAMES)
    status = ray_messages.StoreStatus(1, 2, 3, 4)
    assert ray_messages.unpack_status(b"answer" + ray_messages.pack_status(status)) == status


def test_ray_directories_of_two_versions_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> tuple[bytes, str]:
        return ray_messages.socket_address("127.0.0.1:6379", ""), directory._actor_name("node")

    ours = names()
    for module in (ray_messages, directory):
        monkeypatch.setattr(module, "VERSION", ray_messages.VERSION + 1)
    assert all(our != their for our, their in zip(ours, names(), strict=True))


@given(st.binary(max_size=200))
def test_ray_messages_any_body_is_read_or_refused(body: bytes) -> None:
    for unpack in (ray_messages.unpack_chain, ray_messages.unpack_put, ray_messages.unpack_names, ray_messages.unpack_status):
        try:
            unpack(body)
        except ConnectorError:
            continue
