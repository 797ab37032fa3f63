"""Asks an OpenAI server for streams as cheaply as a client can, so that on few cores the server gets most of the time.

HTTP/1.1 over kept connections, one request at a time on each; a stream is only searched for its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

ANSWER_LIMIT_S = 120.0


async def ask_all(port: int, bodies: Sequence[bytes], num_connections: int) -> int:
    """Send every body to /v1/chat/completions, num_connections at a time; how many events came in all.

    Raises RuntimeError when an answer is no stream that ends well, TimeoutError when one takes too long.
    """
    waiting = iter(bodies)
    counts = await asyncio.gather(*(_ask_in_turn(port, waiting) for _ in range(num_connections)))
    return sum(counts)


async def is_ready(port: int, body: bytes) -> bool:
    """Whether the server answers this as it should."""
    try:
        return await ask_all(port, [body], 1) > 0
    except (OSError, RuntimeError, asyncio.IncompleteReadError):
        return False


def chat_body(model: str, text: str, num_tokens: int) -> bytes:
    """A streamed, greedy chat of one message."""
    message = {"role": "user", "content": text}
    return json.dumps(
        {"model": model, "messages": [message], "max_tokens": num_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    ).encode()


async def _ask_in_turn(port: int, bodies: Iterator[bytes]) -> int:
    num_events = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for body in bodies:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
                writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
                num_events += await _read_stream(reader)
    finally:
        writer.close()
    return num_events


async def _read_stream(reader: asyncio.StreamReader) -> int:
    """Events of one answer in chunked encoding."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"chunked" not in head.lower():
        raise RuntimeError(f"no stream: {head[:300]!r} {await reader.read(300)!r}")
    answer = bytearray()
    while not answer.endswith(b"0\r\n\r\n"):
        piece = await reader.read(1 << 16)
        if not piece:
            raise RuntimeError(f"a stream was cut after {answer[-300:]!r}")
        answer += piece
    if b"[DONE]" not in answer:
        raise RuntimeError(f"a stream without its end: {answer[-300:]!r}")
    return answer.count(b"data: ")
