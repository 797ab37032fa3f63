"""How long the scheduler and its KV management are: lines in all, and lines of code (without blanks, comments and docstrings).

python -m bench.lines_of_code
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

CORE = Path(__file__).resolve().parents[1] / "core"
PARTS = {
    "scheduler": ("scheduler", "waiting_queue", "blocks_in_progress", "prompt_delay", "long_prompts"),
    "requests, plans, results": ("request", "step", "step_output", "steps_in_flight"),
    "drafts": ("drafter",),
    "KV cache": ("kv_cache_manager", "kv/block_pool", "kv/hashing"),
    "transfers": ("kv/ledger", "kv/pin_budget", "kv/circuit_breaker", "kv/load_cost", "kv/connector"),
}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def count_lines(text: str) -> tuple[int, int]:
    """(All lines of a module, those with code.)"""
    with_code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            with_code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_scope = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_scope and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            with_code.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(text.splitlines()), len(with_code)


def main() -> None:
    """Print the table."""
    total, total_code = 0, 0
    for part, modules in PARTS.items():
        counts = [count_lines((CORE / f"{module}.py").read_text()) for module in modules]
        lines, code = (sum(column) for column in zip(*counts, strict=True))
        print(f"{part:26} {lines:6} lines {code:6} of code   {', '.join(modules)}")
        total, total_code = total + lines, total_code + code
    print(f"{'in all':26} {total:6} lines {total_code:6} of code")


if __name__ == "__main__":
    main()
