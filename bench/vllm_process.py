"""vLLM's offline engine in a process of its own virtual environment, asked for one measurement at a time.

Used by bench.executor. The child runs this same file as a program there; it speaks JSON lines over its standard streams.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 128


class VllmProcess:
    """Waits until the model is loaded. Answers come through a pipe apart from vLLM's own output."""

    def __init__(self, venv: Path, model_dir: Path, dtype: str, num_threads: int) -> None:
        read_end, write_end = os.pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(num_threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_threads])),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        environment.pop("PYTHONPATH", None)
        libraries = [str(path) for name in ("libtcmalloc_minimal*", "libiomp5.so") for path in sorted(venv.rglob(name))[:1]]
        if libraries:
            environment["LD_PRELOAD"] = ":".join(libraries)
        self._process = subprocess.Popen(
            [str(venv / "bin/python"), __file__, str(model_dir), dtype, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=(write_end,),
            text=True,
        )
        os.close(write_end)
        self._answers: IO[str] = os.fdopen(read_end)
        ready = self._answers.readline()
        if not ready:
            raise RuntimeError(
                f"vLLM in {venv} ended before it was ready (exit code {self._process.wait()}); see its output above"
            )

    def measure(self, kind: str, size: int) -> float:
        """Seconds of one decode of `size` requests, or one prefill of `size` tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "size": size}) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"vLLM ended during {kind} {size}")
        return float(json.loads(line)["seconds"])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(model_dir: str, dtype: str, answers: IO[str]) -> None:
    """The child: a line in, a measurement out."""
    from vllm import LLM, SamplingParams  # of the other environment

    llm = LLM(
        model=model_dir,
        dtype=dtype,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": [rng.randrange(100, 40000) for _ in range(length)]} for _ in range(count)]

    def run(count: int, length: int, num_output: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts(count, length), sampling, use_tqdm=False)
        return time.perf_counter() - started

    for count in (1, 8, 32):
        run(count, 32, 4)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["kind"] == "prefill":
            seconds = run(1, request["size"], 1)
        else:  # what follows the first tokens, by difference
            seconds = run(request["size"], PROMPT_TOKENS, OUTPUT_TOKENS) - run(request["size"], PROMPT_TOKENS, 1)
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[3]), "w") as stream:
        serve(sys.argv[1], sys.argv[2], stream)
