"""What an engine asks of grammars: a compiler that works in its own thread, and a matcher for each request. No library here.

core/grammar_compiler.py implements both; scheduler and engine use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.sampling_params import GrammarSource


class GrammarMatcher(Protocol):
    """Where one request's output stands in its grammar. Used from one thread. Methods raise GrammarLimitError when following the
    grammar takes more time or memory than is allowed; the request cannot go on then.
    """

    @property
    def is_terminated(self) -> bool:
        """True when the output is complete: an end token was accepted."""
        ...

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens that were appended to the output. False when they leave the grammar, and the matcher is useless."""
        ...

    def count_valid(self, draft_token_ids: Sequence[int]) -> int:
        """How many leading drafts may follow, the state left as it is. An end token counts where the grammar may end."""
        ...

    def token_masks(self, draft_token_ids: Sequence[int]) -> list[bytes]:
        """Which tokens may come next: after nothing, after the first draft, and so on; all drafts must be valid.

        One mask each: bit token_id % 8 of byte token_id // 8 is 1 where the token is allowed; a multiple of 4 bytes, for at least
        the model's vocabulary. End tokens are allowed exactly where the grammar may end. The state is left as it is.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must follow, maybe an end token; none if there is a choice. The masks allow no others, one by one."""
        ...


class PendingGrammar(Protocol):
    """A matcher that is being made."""

    def poll(self) -> GrammarMatcher | None:
        """The matcher, None while it is not there yet. Raises InvalidInputError when there will be none."""
        ...


class GrammarCompiler(Protocol):
    """Makes matchers for a model's tokenizer, in a thread of its own.

    on_result: called from that thread whenever a matcher is there, or has failed; whoever owns the engine's loop wakes up by it.
    """

    on_result: Callable[[], None]

    def start(self, source: GrammarSource, output_token_ids: Sequence[int]) -> PendingGrammar:
        """Begin to make a matcher that stands behind output_token_ids. Returns at once."""
        ...

    def close(self) -> None:
        """End the thread; what is pending never arrives. Safe to repeat."""
        ...
