"""What the fault tests share: a cluster of two nodes per role, questions with known answers, and how it is made whole again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fault.verified_load import Outcome, Question, RequestRecord, VerifiedClient
from tests.support.cluster import MODEL_NAME, Cluster

NODE_NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
HEARTBEAT_TIMEOUT_S = 2.0
PROMPT_LENGTHS = (20, 60, 150, 300, 600, 900)
NUM_OUTPUT_TOKENS = 32


class Rig:
    """A running cluster and what to ask of it. One test at a time; each begins with restore()."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = VerifiedClient(cluster.url, MODEL_NAME, deadline_s=60.0)
        self._vocabulary = self.client.vocabulary()
        self._num_questions = 0
        self.questions = self.new_questions(PROMPT_LENGTHS, NUM_OUTPUT_TOKENS)

    def new_questions(self, prompt_lengths: Sequence[int], num_output_tokens: int) -> list[Question]:
        """Questions of these lengths, sampled, with the answers of the cluster as it is now."""
        questions = []
        for length in prompt_lengths:
            self._num_questions += 1
            rng = random.Random(self._num_questions)
            questions.append(Question(rng.choices(self._vocabulary, k=length), num_output_tokens, 1.0, self._num_questions))
        return self.client.with_answers(questions)

    def restore(self) -> None:
        """Start what a test has killed, and wait until every node is up and nothing is held."""
        if "router" not in self.cluster.children:
            self.cluster.start_router()
        for name in NODE_NAMES:
            if name not in self.cluster.children:
                self.cluster.restart_node(name, wait=False)
        self.cluster.wait_ready()
        self.cluster.wait_clean()

    def start(self, salt: str, questions: Sequence[Question] = ()) -> list[RequestRecord]:
        """Ask all questions at once. A salt that no test has used yet: no KV is there."""
        return [self.client.start(question, salt) for question in questions or self.questions]

    def check_right(self, records: Sequence[RequestRecord]) -> None:
        """Wait, and fail unless every client saw exactly the right tokens."""
        self.client.wait_for(records)
        assert [(r.outcome, r.detail) for r in records] == [(Outcome.RIGHT, "")] * len(records)

    def wait_status(self, name: str, status: str, timeout_s: float = 30.0) -> None:
        """Until the router says so of a node."""
        self.cluster.wait_until(lambda: self.cluster.client.node_status(name) == status, f"{name} is {status}", timeout_s)

    def wait_busy(self, name: str, num_running: int = 1) -> None:
        """Until a node computes for so many requests."""
        self.cluster.wait_until(lambda: self.node(name)["num_running"] >= num_running, f"{name} computes for {num_running}")

    def node(self, name: str) -> dict[str, object]:
        """What GET /nodes says of a node."""
        return next(node for node in self.cluster.client.nodes() if node["node_id"] == name)
