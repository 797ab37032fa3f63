"""Durations come from monotonic clocks: a jump of the wall clock must end no deadline and declare nobody dead."""

from __future__ import annotations

import ast

from tests.architecture.source_tree import ROOT

ROOMS = ("core", "connectors", "router", "prefill_node", "decode_node", "deploy")
WALL_CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "clock_gettime", "clock_gettime_ns"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
# Where the time of day is what is asked for; no deadline comes from it.
LEGITIMATE = {
    "router/http_generation.py": 2,  # `created` of answers
    "router/http_api.py": 1,  # `created` of the model card
    "router/chat_template.py": 1,  # strftime_now, which chat templates ask for
    "connectors/redis/link.py": 1,  # the first guess of the server's clock, until it has told
    "connectors/redis/browser.py": 2,  # what a server says of expiry is the time of day
    "connectors/ray/index.py": 2,  # when objects were last used, for people
    "connectors/slots/use_times.py": 2,  # when a block was last used, for people; eviction does not ask
    "deploy/cache_command.py": 3,  # the ages of blocks, which are shown, and what `prune --older-than` goes by
}


def _num_wall_clock_uses(source: str) -> int:
    num_uses = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            num_uses += node.attr in WALL_CLOCKS.get(owner, ())
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            num_uses += sum(name.name in WALL_CLOCKS["time"] for name in node.names)
    return num_uses


def test_wall_clock_is_read_only_where_the_time_of_day_is_meant() -> None:
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if num_uses := _num_wall_clock_uses(path.read_text(encoding="utf-8")):
                found[path.relative_to(ROOT).as_posix()] = num_uses
    assert found == LEGITIMATE


def test_wall_clock_search_finds_what_it_must() -> None:
    assert _num_wall_clock_uses("import time\nstart = time.time()\n") == 1
    assert _num_wall_clock_uses("from time import time\nstart = time()\n") == 1
    assert _num_wall_clock_uses("import datetime\nstart = datetime.datetime.now()\n") == 1
    assert _num_wall_clock_uses("import time\nstart = time.monotonic()\n") == 0
