"""What grammars cost a step, and what jump decoding saves: masks timed alone; one engine's answers with and without jumps.

python -m bench.grammars --json

The engine runs the real model in this process. Each round asks the same requests twice, with jumps and without; ratios are of
the two runs of a round, and the median of rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from core.clock import MonotonicClock
from core.config import EngineOptions, ModelOptions
from core.engine import EngineCore
from core.grammar import GrammarMatcher
from core.grammar_compiler import LlgCompiler
from core.model.loading import LoadedModel, load_model
from core.sampling_params import GrammarSource, SamplingParams

MODEL = "smollm2"
MAX_TOKENS = 96
NO_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "marital_status": {"enum": ["married", "single", "widowed"]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "postal_code"],
            "additionalProperties": False,
        },
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["first_name", "age", "marital_status", "address", "hobbies"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": GrammarSource("json_schema", json.dumps(PERSON)),
    "schema without whitespace": GrammarSource("json_schema", json.dumps(PERSON | {"x-guidance": NO_WHITESPACE})),
    "any object": GrammarSource("json_schema", '{"type":"object"}'),
    "regex": GrammarSource("regex", r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]: [a-z ]{20,60}\."),
    "choice": GrammarSource("choice", '["positive", "negative", "neutral"]'),
}
PROMPT = [index * 37 % 40_000 + 100 for index in range(96)]


def matcher_of(compiler: LlgCompiler, source: GrammarSource) -> GrammarMatcher:
    """Waits for it."""
    pending = compiler.start(source, ())
    while (matcher := pending.poll()) is None:
        time.sleep(0.0005)
    return matcher


class Bench:
    """One loaded model, asked through engines of its own."""

    def __init__(self, num_requests: int) -> None:
        self.options = EngineOptions(kv_pool_mib=400)
        self.loaded: LoadedModel = load_model(ModelOptions(path=MODEL, max_model_len=512), self.options)
        self.num_requests = num_requests

    def compiler(self) -> LlgCompiler:
        """A new one, whose tokenizer is read already."""
        compiler = LlgCompiler(self.loaded.model_dir, self.loaded.model.vocab_size, self.loaded.model.eos_token_ids)
        compiler.check(GrammarSource("regex", "a")).result()
        return compiler

    def answer(self, source: GrammarSource | None, *, jumps: bool) -> dict[str, Any]:
        """All requests at once: seconds, tokens, and how often the model ran."""
        loaded = self.loaded
        options = EngineOptions(kv_pool_mib=400, jump_decoding=jumps, enable_prefix_caching=False)
        engine = EngineCore(
            options, loaded.model, loaded.num_blocks, loaded.runner, None, MonotonicClock(), grammar_compiler=self.compiler()
        )
        sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=MAX_TOKENS, grammar=source)
        tokens: dict[str, list[int]] = {}
        started_s = time.monotonic()
        for index in range(self.num_requests):
            engine.add_request(f"r{index}", [*PROMPT, 100 + index], (), sampling)
        while engine.has_work():
            for request_id, new in engine.step().new_token_ids.items():
                tokens.setdefault(request_id, []).extend(new)
        seconds = time.monotonic() - started_s
        engine.step()
        stats = engine.stats
        engine.close()
        return {
            "seconds": seconds,
            "steps": stats.num_steps,
            "tokens": stats.num_generation_tokens,
            "forced": stats.num_forced_tokens,
            "ids": tokens,
        }

    def jump_row(self, name: str, rounds: int) -> dict[str, Any]:
        """The figures of one grammar."""
        pairs = [(self.answer(GRAMMARS[name], jumps=True), self.answer(GRAMMARS[name], jumps=False)) for _ in range(rounds)]
        jumping, stepping = pairs[0]
        assert jumping["ids"] == stepping["ids"], "jumping changed a token"
        return {
            "grammar": name,
            "tokens": jumping["tokens"],
            "forced_share": round(jumping["forced"] / jumping["tokens"], 3),
            "tokens_per_step_jumping": round(jumping["tokens"] / jumping["steps"] / self.num_requests, 3),
            "tokens_per_step": round(stepping["tokens"] / stepping["steps"] / self.num_requests, 3),
            "speedup": round(statistics.median(b["seconds"] / a["seconds"] for a, b in pairs), 3),
        }

    def mask_row(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Microseconds of what a step does for one request: after each token of an answer, with the engine's calls."""
        compiler = self.compiler()
        started_s = time.perf_counter()
        matcher = matcher_of(compiler, GRAMMARS[name])
        compile_ms = (time.perf_counter() - started_s) * 1e3
        micros: list[float] = []
        for token_id in tokens:
            started_s = time.perf_counter()
            matcher.accept([token_id])
            if not matcher.is_terminated:
                matcher.forced_tokens()
                matcher.token_masks(())
            micros.append((time.perf_counter() - started_s) * 1e6)
        compiler.close()
        ordered = sorted(micros)
        return {
            "grammar": name,
            "compile_ms": round(compile_ms, 2),
            "step_us_p50": round(statistics.median(micros), 1),
            "step_us_p99": round(ordered[int(len(ordered) * 0.99)], 1),
        }


def main() -> None:
    """Parse flags, run, print."""
    parser = argparse.ArgumentParser(description="What grammars cost a step, and what jump decoding saves.")
    parser.add_argument("--requests", type=int, default=4, help="answered at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    bench = Bench(arguments.requests)
    masks = []
    for name, source in GRAMMARS.items():
        answers = bench.answer(source, jumps=False)["ids"]
        masks.append(bench.mask_row(name, next(iter(answers.values()))))
    jumps = [bench.jump_row(name, arguments.rounds) for name in ("schema", "schema without whitespace", "choice")]
    figures = {"masks": masks, "jumps": jumps}
    if arguments.json:
        print(json.dumps(figures))
    else:
        for row in (*masks, *jumps):
            print(row)


if __name__ == "__main__":
    main()
