"""python -m bench.router decide: how long one routing decision takes with many nodes and a large index of what they hold.

A decision is what the router does between a request's block hashes and the name of its node: matching the index, reading the nodes'
load, the policy. Hashing a prompt's tokens is timed beside it. Prompts are of 500 to 100,000 tokens, evenly on a logarithmic
scale; each begins as one of the sequences in the index does, for a random share of it.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.router.virtual_router import VirtualRouter, register_message
from core.clock import MonotonicClock
from core.kv.hashing import Namespace, extend_block_hashes
