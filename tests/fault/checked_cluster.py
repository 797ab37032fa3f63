"""What chaos and soak run on: a cluster of a real model with a store of its own, a client that checks every token, samples of its
processes; and nothing of it is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fault.process_samples import ProcessSampler
from tests.fault.verified_load import Question, VerifiedClient, make_questions
from tests.support.cluster import MODEL_NAME, SLOW_KERNELS, Cluster, ClusterSpec
from tests.support.redis_server import RedisProcess

MODEL = "smollm2"
ENGINE = {**SLOW_KERNELS, "kv_pool_mib": 300, "max_num_batched_tokens": 256}


class CheckedCluster:
    """A context manager: the cluster runs inside, and its store is gone afterwards in any case. Use from the main thread."""

    def __init__(
        self,
        *,
        prefill: int,
        decode: int,
        connector: str,
        capacity: str,
        router: Mapping[str, Any] | None = None,
        redis_flags: tuple[str, ...] = (),
    ) -> None:
        """capacity: of a store in memory or on disk, as "512MiB". redis_flags: of the server that redis gets."""
        self.folder = Path(tempfile.mkdtemp(prefix="kvrelay-store-")) if connector != "shm" else None
        self.redis: RedisProcess | None = None
        options = {"capacity_bytes": capacity}
        if self.folder is not None and connector == "redis":
            self.redis = RedisProcess(self.folder, *redis_flags)
            options = {"url": self.redis.url}
        elif self.folder is not None:
            options["path"] = str(self.folder)
        self.cluster = Cluster(
            ClusterSpec(
                model=MODEL,
                prefill=prefill,
                decode=decode,
                dtype="bfloat16",
                connector=connector,
                connector_options=options,
                engine=ENGINE,
                router=router or {},
            )
        )
        self.client = VerifiedClient(self.cluster.url, MODEL_NAME)
        self.sampler = ProcessSampler(self.pids)

    def __enter__(self) -> CheckedCluster:
        try:
            self.cluster.__enter__()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.cluster.__exit__(*error)
        finally:
            self._end()

    def _end(self) -> None:
        self.client.close()
        if self.redis is not None:
            self.redis.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> dict[str, int]:
        """Of router and nodes, by name. Any thread."""
        return {name: child.pid for name, child in dict(self.cluster.children).items()}

    def learn(self, seed: int, num_questions: int) -> list[Question]:
        """Questions with the answers of the cluster as it is now, undisturbed."""
        return self.client.with_answers(make_questions(self.client.vocabulary(), seed, num_questions))
