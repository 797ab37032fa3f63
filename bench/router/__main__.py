"""Command line: python -m bench.router replay | decide | overhead, each with --json for one line of JSON at the end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from bench.router import decide, overhead, replay

COMMANDS = {"replay": replay, "decide": decide, "overhead": overhead}


def main() -> None:
    """Run one of the subcommands."""
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.__doc__, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="one line of JSON at the end")
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    run: Callable[[argparse.Namespace], dict[str, Any]] = arguments.run
    found = run(arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
