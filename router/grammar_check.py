"""Refuses grammars that do not compile, before anything is dispatched: in a thread, so that other requests go on meanwhile."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from core.errors import InvalidInputError, OverloadedError
from core.grammar_compiler import LlgCompiler
from core.sampling_params import GrammarSource
from router.structured_outputs import RequestedGrammar
from router.tokenizer import Tokenizer

_MAX_WAITING = 64  # each may take a good part of a second
_MAX_KNOWN = 256
_RETRY_AFTER_S = 1.0


class GrammarCheck:
    """Remembers grammars that compiled: those never wait behind others. Used on the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._compiler = LlgCompiler(tokenizer.folder, tokenizer.vocab_size, ())
        self._known: OrderedDict[GrammarSource, None] = OrderedDict()
        self._num_waiting = 0

    async def check(self, grammar: RequestedGrammar | None) -> None:
        """Raise InvalidInputError naming the field for what is no grammar, OverloadedError while too many wait to be checked."""
        if grammar is None:
            return
        if grammar.source in self._known:
            self._known.move_to_end(grammar.source)
            return
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} grammars are waiting to be checked already", _RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            await asyncio.wrap_future(self._compiler.check(grammar.source))
        except InvalidInputError as error:
            raise InvalidInputError(grammar.field, error.value, error.allowed) from error
        finally:
            self._num_waiting -= 1
        self._known[grammar.source] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
