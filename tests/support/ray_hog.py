"""Another user of a Ray's object store, in a process of its own: fills it with objects that cannot be spilled, while it runs.

Arguments: Ray's address, the node's IP address. Commands by line, as CommandedProcess gives them: {"do": "fill"}.
"""

from __future__ import annotations

import json
import logging
import os
import sys

import numpy as np

_OBJECT_BYTES = 4 * 1024 * 1024


def main() -> None:
    """Answers a command with how many objects are held."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    import ray

    address, ip = sys.argv[1:]
    ray.init(address=address, _node_ip_address=ip, log_to_driver=False, logging_level=logging.CRITICAL)
    held = []
    for line in sys.stdin:
        assert json.loads(line)["do"] == "fill"
        num_objects = int(ray.cluster_resources()["object_store_memory"]) // _OBJECT_BYTES + 1
        for _ in range(num_objects):
            reference = ray.put([np.zeros(_OBJECT_BYTES, dtype=np.uint8)])
            held.append((reference, ray.get(reference)))  # mapped, so that it stays in memory
        print(json.dumps(len(held)), flush=True)


if __name__ == "__main__":
    main()
