"""A real node that does not survive certain prompts: `python -m tests.support.poisoned_node ROLE --config FILE …`.

Stands for a bug that one request sets off, in a kernel for instance: the process ends by SIGSEGV, and nothing can catch it.
"""

from __future__ import annotations

import os
import signal
import sys

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.config import Config
from core.model.loading import load_model
from core.node import NodeServer, run_node_process
from core.step import ModelRunner, StepPlan, StepResult

POISON = (1234, 4321, 1234, 4321)  # a prompt that begins with these tokens


class PoisonedRunner:
    """The real runner, unless the poison is in the step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan, or die."""
        if any(tuple(new.token_ids[: len(POISON)]) == POISON for new in plan.new_requests):
            os.kill(os.getpid(), signal.SIGSEGV)
        return self._runner.execute(plan)


def main(argv: list[str]) -> int:
    """argv: the role, then the flags of a node."""
    role, *flags = argv

    def compose(config: Config) -> NodeServer:
        loaded = load_model(config.model, config.engine)
        connector = create_connector(config.connector.name, config.connector.options, MonotonicClock())
        return NodeServer(config, role, loaded.model, loaded.connector_memory, PoisonedRunner(loaded.runner), connector)

    return run_node_process(role, compose, flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
