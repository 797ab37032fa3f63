"""Which LoRA adapters are served, under which names, and what nodes are told of them: a part of RouterCore's state.

A name may be given to new content. What was admitted under the old one keeps it: an adapter is known to the nodes as long as a
name, a request in flight or a load that has not ended refers to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from core.adapter_files import Adapter, read_adapter
from core.errors import InvalidInputError
from core.wire.messages import AdapterReply, LoadAdapter, RouterMessage, UnloadAdapter

MAX_NAME_CHARS = 256
MAX_ADAPTERS = 512  # with a name at a time


@dataclass(slots=True)
class AdapterRound:
    """A load by all nodes; complete when `missing` is empty. errors: of nodes that cannot serve the adapter."""

    adapter: Adapter
    missing: set[str]
    errors: dict[str, str] = field(default_factory=dict)


class AdapterRegistry:
    """Used from the router's event loop alone, like all of RouterCore."""

    def __init__(self, tell_all: Callable[[RouterMessage], set[str]]) -> None:
        """tell_all: sends to all connected nodes, and returns their ids."""
        self._tell_all = tell_all
        self._by_name: dict[str, Adapter] = {}
        self._uses: dict[bytes, Counter[Adapter]] = {}  # by fingerprint: several folders may hold the same
        self._rounds: list[AdapterRound] = []

    @property
    def names(self) -> Collection[str]:
        """Names that requests may use, in the order of their loading."""
        return self._by_name.keys()

    def find(self, name: str) -> Adapter | None:
        """What a name means now."""
        return self._by_name.get(name)

    def known(self) -> list[Adapter]:
        """All that nodes must know, each content once."""
        return [self._best_of(uses) for uses in self._uses.values()]

    def use(self, adapter: Adapter) -> None:
        """Refer to it until `release`."""
        self._uses.setdefault(adapter.fingerprint, Counter())[adapter] += 1

    def release(self, adapter: Adapter) -> None:
        """End one reference. After the last one nodes need the adapter no more."""
        uses = self._uses[adapter.fingerprint]
        uses[adapter] -= 1
        if uses[adapter]:
            return
        del uses[adapter]
        if uses:  # nodes may have this one's folder, where other content may be by now
            self._tell_all(load_message(self._best_of(uses)))
        else:
            del self._uses[adapter.fingerprint]
            self._tell_all(UnloadAdapter(adapter.fingerprint))

    def start_load(self, adapter: Adapter) -> AdapterRound:
        """Tell all connected nodes of an adapter. The caller waits as long as it likes, and ends the round."""
        self.use(adapter)
        round_ = AdapterRound(adapter, self._tell_all(load_message(adapter)))
        self._rounds.append(round_)
        return round_

    def end_load(self, round_: AdapterRound, *, is_accepted: bool) -> None:
        """From now on the adapter's name means it, whatever it meant before; or, not accepted, nothing has changed."""
        self._rounds.remove(round_)
        if is_accepted:
            before = self._by_name.get(round_.adapter.name)
            self.use(round_.adapter)
            self._by_name[round_.adapter.name] = round_.adapter
            if before is not None:
                self.release(before)
        self.release(round_.adapter)

    def unload(self, name: str) -> bool:
        """Requests can no longer name it; those in flight keep it. False when no adapter has that name."""
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            self.release(adapter)
        return adapter is not None

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

    def _best_of(self, uses: Counter[Adapter]) -> Adapter:
        """The one that still has its name, if there is any: its folder is more likely to hold what it held."""
        return next((adapter for adapter in uses if self._by_name.get(adapter.name) == adapter), next(iter(uses)))

    def forget_node(self, node_id: str) -> None:
        """The node is gone; it is told again when it is back."""
        for round_ in self._rounds:
            round_.missing.discard(node_id)


def load_message(adapter: Adapter) -> LoadAdapter:
    """What nodes are told of an adapter."""
    return LoadAdapter(name=adapter.name, fingerprint=adapter.fingerprint, path=adapter.path)


def adapter_from_folder(name: str, path: str, model_names: Collection[str]) -> Adapter:
    """Read a folder and give its content a name. Takes as long as reading its files. Raises InvalidInputError."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidInputError("lora_name", name, f"1 to {MAX_NAME_CHARS} characters")
    if name in model_names:
        raise InvalidInputError("lora_name", name, "another name than the model's own")
    absolute = str(Path(path).expanduser().absolute())
    return Adapter(name, read_adapter(absolute, keeps_weights=False).fingerprint, absolute)
