"""What an address text says: whether it stays on this machine, and its two halves. Resolves no name and opens nothing."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host` can only mean this machine: a loopback address, with or without brackets, or localhost.

    Any other name counts as beyond this machine, whatever it resolves to today: another resolver, or another day, may say
    something else. So do "", "*", 0.0.0.0 and ::, which listen everywhere.
    """
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def host_of(address: str) -> str:
    """The host of HOST:PORT, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")
