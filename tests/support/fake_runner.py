"""A model whose next token is a hash over all the KV it reads: any stale, swapped or corrupt block changes the text.

The KV of a token depends on everything before it, as a real model's does. `oracle_tokens` computes the same text without a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from core.engine_model import EngineModel
from core.kv.hashing import Namespace
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.step import AdapterLoad, StepPlan, StepResult

ENTRY_BYTES = 32
VOCAB_SIZE = 1000
EOS_TOKEN_ID = 0


def fake_layout(block_size: int) -> KVLayout:
    """32 bytes a token: one layer, K and V of one head of four float32."""
    return KVLayout(num_layers=1, block_size=block_size, num_kv_heads=1, head_dim=4, dtype="float32")


def fake_model(block_size: int, max_model_len: int) -> EngineModel:
    """An EngineModel for the fake runner."""
    layout = fake_layout(block_size)
    namespace = Namespace(b"fake model 0001!", layout.fingerprint, block_size)
    return EngineModel(
        namespace=namespace, layout=layout, max_model_len=max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,)
    )


def fake_entry(previous: bytes, token_id: int, position: int) -> bytes:
    return sha256(previous + token_id.to_bytes(4, "little") + position.to_bytes(4, "little")).digest()


def _next_token(entries: bytes) -> int:
    """Never the end-of-sequence token: tests decide how long a text is."""
    return 1 + int.from_bytes(sha256(entries).digest()[:8], "little") % (VOCAB_SIZE - 1)


def oracle_tokens(prompt_token_ids: Sequence[int], num_tokens: int, adapter: str = "") -> list[int]:
    """The only right continuation of a prompt, with an adapter if there is one."""
    token_ids = list(prompt_token_ids)
    entries = b""
    previous = adapter.encode()
    for position, token_id in enumerate(token_ids):
        previous = fake_entry(previous, token_id, position)
        entries += previous
    for _ in range(num_tokens):
        token_ids.append(_next_token(entries))
        previous = fake_entry(previous, token_ids[-1], len(token_ids) - 1)
        entries += previous
    return token_ids[len(prompt_token_ids) :]


def _next_allowed(token_id: int, mask: bytes) -> int:
    """Of the allowed tokens the one that the hash falls on: wrong KV still shows, where there is a choice."""
    allowed = [candidate for candidate in range(VOCAB_SIZE) if mask[candidate // 8] >> candidate % 8 & 1]
    return allowed[token_id % len(allowed)]


@dataclass(slots=True)
class _RunnerRequest:
    token_ids: list[int]
    num_computed: int
    block_ids: list[int]
    adapter: str


class FakeAdapters:
    """core.step.AdapterStore without content: a folder holds what its path says. is_slow: loads end with `finish` alone."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.started: list[str] = []
        self.is_slow = False
        self.broken: set[str] = set()  # adapters that cannot be loaded
        self._pending: list[str] = []

    def start_load(self, adapter: str, path: str) -> None:
        """Remember it."""
        assert adapter not in self.here and adapter not in self._pending, f"{adapter} is here already"
        self.started.append(adapter)
        self._pending.append(adapter)

    def poll_loads(self) -> list[AdapterLoad]:
        """All that were started, unless they are slow."""
        return [] if self.is_slow else self.finish()

    def finish(self) -> list[AdapterLoad]:
        """End all loads."""
        loads = [AdapterLoad(adapter, "its files are gone" if adapter in self.broken else "") for adapter in self._pending]
        self.here |= {load.adapter for load in loads if not load.error}
        self._pending = []
        return loads

    def find(self, adapter: str) -> str:
        """The adapter's name, as long as it is here."""
        assert adapter in self.here, f"{adapter} is not in memory"
        return adapter

    def drop(self, adapter: str) -> None:
        """Forget it."""
        self.here.remove(adapter)


class FakeRunner:
    """core.step.ModelRunner over a real pool. Checks that plans are consistent with what it was told before."""

    def __init__(self, pool: KVPoolMemory) -> None:
        self.pool = pool
        self.adapters = FakeAdapters()
        self.most_adapters = 0  # different ones in a step, so far
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self._requests: dict[str, _RunnerRequest] = {}
        self._block_size = pool.layout.block_size

    @property
    def num_requests(self) -> int:
        """Requests whose state the runner keeps."""
        return len(self._requests)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan in Python."""
        self.plans.append(plan)
        for request_id in plan.removed_request_ids:
            self._requests.pop(request_id, None)
        for new in plan.new_requests:
            assert new.request_id not in self._requests, f"{new.request_id} is new twice"
            self._requests[new.request_id] = _RunnerRequest(
                list(new.token_ids), new.num_computed_tokens, list(new.block_ids), str(new.adapter or "")
            )
        for request_id, block_ids in plan.new_block_ids.items():
            self._requests[request_id].block_ids += block_ids
        for request_id, token_ids in plan.forced_token_ids.items():
            self._requests[request_id].token_ids += token_ids
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the fake model was told to fail")
        assert sum(plan.num_scheduled_tokens.values()) == plan.num_total_tokens
        adapters = {self._requests[request_id].adapter for request_id in plan.num_scheduled_tokens} - {""}
        self.most_adapters = max(self.most_adapters, len(adapters))
        return StepResult(
            [
                self._advance(request_id, count, plan.draft_token_ids.get(request_id, []), plan.token_masks.get(request_id))
                for request_id, count in plan.num_scheduled_tokens.items()
            ]
        )

    def _advance(self, request_id: str, num_tokens: int, drafts: list[int], masks: list[bytes] | None) -> list[int]:
        request = self._requests[request_id]
        num_known, end = len(request.token_ids), request.num_computed + num_tokens
        assert end == num_known + len(drafts) if drafts else end <= num_known, f"{request_id}: more tokens than are known"
        token_ids = request.token_ids + drafts
        for position in range(request.num_computed, end):
            previous = self._read(request, position - 1) if position else request.adapter.encode()
            entry = fake_entry(previous, token_ids[position], position)
            block, offset = self._locate(request, position)
            self.pool.block(block)[offset : offset + ENTRY_BYTES] = entry
        request.num_computed = end
        if end < num_known:
            return []
        sampled: list[int] = []
        for draft in (*drafts, None):
            length = num_known + len(sampled)
            token_id = _next_token(b"".join(self._read(request, position) for position in range(length)))
            if masks is not None:
                assert len(masks) == len(drafts) + 1, f"{request_id}: not a mask for each row"
                token_id = _next_allowed(token_id, masks[len(sampled)])
            sampled.append(token_id)
            if sampled[-1] != draft:
                break
        request.token_ids += sampled
        request.num_computed = len(request.token_ids) - 1
        return sampled

    def _locate(self, request: _RunnerRequest, position: int) -> tuple[int, int]:
        return request.block_ids[position // self._block_size], position % self._block_size * ENTRY_BYTES

    def _read(self, request: _RunnerRequest, position: int) -> bytes:
        block, offset = self._locate(request, position)
        return bytes(self.pool.block(block)[offset : offset + ENTRY_BYTES])
