"""Which LoRA adapters are served, under which names: plain state of RouterCore's.

A name may be given to new content. What was admitted under the old one keeps it: an adapter is known to the nodes as long as a
name, a request in flight or a load that has not ended refers to it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from core.adapter_files import Adapter, read_adapter
from core.errors import InvalidInputError
from core.wire.messages import AdapterReply

MAX_NAME_CHARS = 256
MAX_ADAPTERS = 512  # with a name at a time


@dataclass(slots=True)
class AdapterRound:
    """A load by all nodes; complete when `missing` is empty. errors: of nodes that cannot serve the adapter."""

    adapter: Adapter
    missing: set[str]
    errors: dict[str, str] = field(default_factory=dict)


class AdapterRegistry:
    """Methods that give up a reference return the adapter when it was the last one: then nodes need it no more."""

    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._known: dict[bytes, Adapter] = {}  # by fingerprint
        self._num_uses: dict[bytes, int] = {}
        self._rounds: list[AdapterRound] = []

    @property
    def names(self) -> Collection[str]:
        """Names that requests may use, in the order of their loading."""
        return self._by_name.keys()

    def find(self, name: str) -> Adapter | None:
        """What a name means now."""
        return self._by_name.get(name)

    def known(self) -> list[Adapter]:
        """All that nodes must know."""
        return list(self._known.values())

    def use(self, adapter: Adapter) -> None:
        """Refer to it until `release`."""
        self._known[adapter.fingerprint] = adapter
        self._num_uses[adapter.fingerprint] = self._num_uses.get(adapter.fingerprint, 0) + 1

    def release(self, adapter: Adapter) -> Adapter | None:
        """End one reference."""
        self._num_uses[adapter.fingerprint] -= 1
        if self._num_uses[adapter.fingerprint]:
            return None
        del self._num_uses[adapter.fingerprint]
        return self._known.pop(adapter.fingerprint)

    def bind(self, adapter: Adapter) -> Adapter | None:
        """Give the adapter its name, which may be another's until now."""
        before = self._by_name.get(adapter.name)
        self.use(adapter)
        self._by_name[adapter.name] = adapter
        return self.release(before) if before is not None else None

    def unbind(self, name: str) -> Adapter | None:
        """Take a name back; it must be there."""
        return self.release(self._by_name.pop(name))

    def start_round(self, adapter: Adapter, node_ids: set[str]) -> AdapterRound:
        """Expect a reply of each of these nodes. The round is one reference."""
        self.use(adapter)
        round_ = AdapterRound(adapter, node_ids)
        self._rounds.append(round_)
        return round_

    def end_round(self, round_: AdapterRound) -> None:
        """Expect nothing more. The reference stays the caller's to release."""
        self._rounds.remove(round_)

    def take_reply(self, node_id: str, reply: AdapterReply) -> bool:
        """A node's outcome; False when it is an error that nobody waits for."""
        is_expected = False
        for round_ in self._rounds:
            if round_.adapter.fingerprint == reply.fingerprint and node_id in round_.missing:
                is_expected = True
                round_.missing.discard(node_id)
                if reply.error:
                    round_.errors[node_id] = reply.error
        return is_expected or not reply.error

    def forget_node(self, node_id: str) -> None:
        """The node is gone; it is told again when it is back."""
        for round_ in self._rounds:
            round_.missing.discard(node_id)


def adapter_from_folder(name: str, path: str, model_names: Collection[str]) -> Adapter:
    """Read a folder and give its content a name. Takes as long as reading its files. Raises InvalidInputError."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidInputError("lora_name", name, f"1 to {MAX_NAME_CHARS} characters")
    if name in model_names:
        raise InvalidInputError("lora_name", name, "another name than the model's own")
    absolute = str(Path(path).expanduser().absolute())
    return Adapter(name, read_adapter(absolute).fingerprint, absolute)
