"""`python -m router`: reads the configuration and runs the router's process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.config import EXIT_USAGE, parse_config
from core.errors import KVRelayError
from router.server import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until it is told to stop; returns the exit code."""
    try:
        config = parse_config("kvrelay router", "The HTTP server of a cluster.", ("model", "router", "security"), argv)
    except KVRelayError as error:
        print(f"kvrelay router: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
