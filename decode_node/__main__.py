"""`python -m decode_node`: the process of one decode node."""

from __future__ import annotations

import sys

from decode_node.node import main

if __name__ == "__main__":
    sys.exit(main())
