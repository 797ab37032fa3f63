"""`python -m prefill_node`: the process of one prefill node."""

from __future__ import annotations

import sys

from prefill_node.node import main

if __name__ == "__main__":
    sys.exit(main())
