"""A prefill node: computes prompts, samples each one's first token, and reports when the blocks are visible in the store.

Engine, loop and wire are core's; this file composes them with a model and a store.
"""

from __future__ import annotations

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.config import Config
from core.grammar_compiler import LlgCompiler
from core.model.loading import load_model
from core.node import NodeServer, run_node_process


def compose(config: Config) -> NodeServer:
    """Load the model and open the store."""
    # Made twice: a wrong option is told before the model's minutes pass.
    create_connector(config.connector.name, config.connector.options, MonotonicClock())
    loaded = load_model(config.model, config.engine)
    connector = create_connector(config.connector.name, config.connector.options, MonotonicClock(), loaded.open_copies)
    return NodeServer(
        config,
        "prefill",
        loaded.model,
        loaded.connector_memory,
        loaded.runner,
        connector,
        num_blocks=loaded.num_blocks,
        grammar_compiler=LlgCompiler(loaded.model_dir, loaded.model.vocab_size, loaded.model.eos_token_ids),
        adapters=loaded.runner.adapters,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; `argv` without the program's name. Returns the exit code."""
    return run_node_process("prefill", compose, argv)
