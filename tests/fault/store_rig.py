"""A cluster on a store that is about to break: questions with known answers, and whether the store is used."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.fault.verified_load import Outcome, Question, VerifiedClient, VerifiedLoad
from tests.support.cluster import MODEL_NAME, Cluster
from tests.support.memory_pools import give_up_pools, pool_files

PROMPT_LENGTHS = (24, 50, 100, 200, 300, 450)
NUM_OUTPUT_TOKENS = 24
LOAD_S = 4.0


class StoreRig:
    """A cluster of one node per role on a store of its own, and questions with known answers."""

    def __init__(self, cluster: Cluster, root: Path | None) -> None:
        """root: where the store's directories are; None for a pool in memory."""
        self.cluster = cluster
        self.root = root
        self.client = VerifiedClient(cluster.url, MODEL_NAME, deadline_s=60.0)
        vocabulary = self.client.vocabulary()
        questions = [
            Question(random.Random(length).choices(vocabulary, k=length), NUM_OUTPUT_TOKENS, 1.0, length)
            for length in PROMPT_LENGTHS
        ]
        self.questions = self.client.with_answers(questions)
        self._num_salts = 0

    def check_right_under_load(self, seconds: float = LOAD_S) -> None:
        """Closed-loop clients for a while."""
        load = VerifiedLoad(self.client, self.questions, num_clients=4, seed=self._num_salts)
        self._num_salts += 1
        load.start()
        time.sleep(seconds)
        load.stop()
        assert load.records
        assert [r.detail for r in load.records if r.outcome is not Outcome.RIGHT] == []
        self.cluster.wait_clean()

    def check_used(self, timeout_s: float = 30.0, node_id: str = "") -> None:
        """Sooner or later a decode node (this one) must find in the store what the prefill node has just computed."""
        labels = {"node_id": node_id} if node_id else {"role": "decode"}
        before = self._num_external_hit_tokens(labels)

        def is_used() -> bool:
            self._num_salts += 1
            record = self.client.start(self.questions[3], f"is it used {self._num_salts}")
            assert self.client.wait_for([record]) == [Outcome.RIGHT], record.detail
            return self._num_external_hit_tokens(labels) > before

        self.cluster.wait_until(is_used, "the store is used", timeout_s)

    def _num_external_hit_tokens(self, labels: dict[str, str]) -> float:
        return self.cluster.client.metric("kvrelay_external_prefix_cache_hits_total", **labels)

    def files(self, kind: str) -> list[Path]:
        """The store's "index" or "segment" files, as they are now."""
        return list(self.root.rglob(kind)) if self.root else pool_files(self.cluster.pool_name, kind)

    def remove_store(self) -> None:
        """Behind its users' backs."""
        if self.root:
            shutil.rmtree(self.root)
        else:
            give_up_pools(self.cluster.pool_name)
