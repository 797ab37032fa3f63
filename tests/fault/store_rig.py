"""A cluster on a store that is about to break: questions with known answers, and whether the store is used."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.fault.verified_load import Outcome, Question, VerifiedClient, VerifiedLoad
from tests.support.cluster import MODEL_NAME, Cluster

PROMPT_LENGTHS = (24, 50, 100, 200, 300, 450)
NUM_OUTPUT_TOKENS = 24
LOAD_S = 4.0


class StoreRig:
    """A cluster of one node per role on a store of its own, and questions with known answers."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        """root: where the store's directories are."""
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

    def files(self) -> list[Path]:
        """Index and segment files of the store."""
        return [path for path in self.root.rglob("*") if path.name in ("index", "segment")]
