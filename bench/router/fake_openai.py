"""OpenAI servers that compute nothing: every request gets a stream of as many events as it asks for tokens.

python -m bench.router.fake_openai --ports 4 --pace-ms 10

Prints its ports in one line of JSON. Answers GET as a healthy server of either kind of engine does, as far as routers ask; only
what such a router reads. One process for all ports; it ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import suppress

import msgspec

MODEL_NAME = "smollm2"
_WORDS = [f" word{number}" for number in range(500)]


class _Body(msgspec.Struct):
    """max_completion_tokens: how some routers rewrite max_tokens."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 16


async def serve(num_ports: int, pace_s: float) -> None:
    """Serve at num_ports free ports of this host, for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await _answer_one(reader, writer, pace_s)
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(num_ports)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def _answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace_s: float) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lines = head.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _colon, value in (line.partition(":") for line in lines[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if lines[0].startswith("POST"):
        await _stream(writer, msgspec.json.decode(body, type=_Body).num_tokens, pace_s)
    else:
        model = {"id": MODEL_NAME, "object": "model", "owned_by": "bench", "max_model_len": 8192}
        answer = json.dumps({"object": "list", "data": [model], "model_path": MODEL_NAME, "served_model_name": MODEL_NAME})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer))
        writer.write(answer.encode())
    await writer.drain()


async def _stream(writer: asyncio.StreamWriter, num_tokens: int, pace_s: float) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for place in range(num_tokens):
        reason = '"length"' if place + 1 == num_tokens else "null"
        delta = json.dumps({"content": _WORDS[place % len(_WORDS)]})
        event = (
            f'data: {{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
            f'"model":"{MODEL_NAME}","choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}]}}\n\n'
        )
        _write_chunk(writer, event.encode())
        if pace_s:
            await writer.drain()
            await asyncio.sleep(pace_s)
    _write_chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _write_chunk(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(payload), payload))


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", type=int, default=4)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.ports, arguments.pace_ms / 1000))


if __name__ == "__main__":
    main()
