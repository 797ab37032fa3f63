"""A network of its own for one process, joined to ours by links that can be cut without a word: a real partition.

Each link is a veth pair whose near end is a port of a bridge. Taking the port out of the bridge loses packets silently in both
directions, as a broken switch does: no reset, no carrier loss. Needs root and the `ip` command; see can_make_namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache


@cache
def can_make_namespaces() -> bool:
    """Whether this machine lets us make namespaces, bridges and veth pairs."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with NetworkNamespace("probe", ("a",)):
            return True
    except subprocess.CalledProcessError:
        return False


@dataclass(frozen=True)
class Link:
    """host_address: ours, on the bridge. port: the near end of the pair."""

    bridge: str
    port: str
    host_address: str
    address: str


class NetworkNamespace:
    """Context manager. links: names; link i has 10.213.N.1 on our side and 10.213.N.2 inside, N different for every one made."""

    _num_links = 0

    def __init__(self, name: str, links: tuple[str, ...]) -> None:
        self.name = f"kvr{os.getpid() % 100_000}{name[:4]}"
        self.links: dict[str, Link] = {}
        for name_of_link in links:
            number = os.getpid() % 200 + NetworkNamespace._num_links
            NetworkNamespace._num_links += 1
            device = f"kv{os.getpid() % 100_000}x{NetworkNamespace._num_links}"
            self.links[name_of_link] = Link(f"{device}b", f"{device}p", f"10.213.{number % 250}.1", f"10.213.{number % 250}.2")

    def __enter__(self) -> NetworkNamespace:
        try:
            _ip("netns", "add", self.name)
            self._inside("link", "set", "lo", "up")
            for link in self.links.values():
                _ip("link", "add", link.bridge, "type", "bridge")
                _ip("addr", "add", f"{link.host_address}/24", "dev", link.bridge)
                inner = f"{link.port}i"
                _ip("link", "add", link.port, "type", "veth", "peer", "name", inner)
                _ip("link", "set", inner, "netns", self.name)
                self._inside("addr", "add", f"{link.address}/24", "dev", inner)
                self._inside("link", "set", inner, "up")
                _ip("link", "set", link.port, "master", link.bridge)
                _ip("link", "set", link.port, "up")
                _ip("link", "set", link.bridge, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links.values():
            for device in (link.port, link.bridge):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip("link", "del", device)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.name)

    @property
    def command(self) -> tuple[str, ...]:
        """What to put before a command line so that it runs inside."""
        return ("ip", "netns", "exec", self.name)

    def cut(self, name: str) -> None:
        """From now on nothing passes this link, and nobody is told."""
        _ip("link", "set", self.links[name].port, "nomaster")

    def heal(self, name: str) -> None:
        """The link works again."""
        _ip("link", "set", self.links[name].port, "master", self.links[name].bridge)

    def _inside(self, *arguments: str) -> None:
        _ip("-netns", self.name, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
