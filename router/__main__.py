"""`python -m router`: reads the configuration and runs the router's process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from core.config import add_config_flags, load_config
from core.errors import KVRelayError
from router.server import run

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until it is told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kvrelay router", allow_abbrev=False, description="The HTTP server of a cluster.")
    add_config_flags(parser, ("model", "router"))
    flags = vars(parser.parse_args(argv))
    try:
        config = load_config(flags)
    except KVRelayError as error:
        print(f"kvrelay router: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
