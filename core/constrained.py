"""Requests whose output follows a grammar: from the matcher that is being made to what comes after each step's tokens.

The scheduler asks; it alone moves requests between statuses. Step thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.errors import GrammarLimitError, InvalidInputError
from core.grammar import GrammarCompiler, PendingGrammar
from core.request import FinishReason, Request, RequestStage, RequestStatus
from core.step_output import FinishedRequest, find_end


class ConstrainedRequests:
    """jumps: forced tokens are appended at once, instead of being sampled one in a step. Which tokens come is the same."""

    def __init__(self, compiler: GrammarCompiler, *, jumps: bool) -> None:
        self._compiler = compiler
        self._jumps = jumps
        self._pending: list[tuple[Request, PendingGrammar]] = []

    @property
    def num_pending(self) -> int:
        """Requests that wait for their matcher, those among them that have ended included."""
        return len(self._pending)

    def start(self, request: Request) -> None:
        """Begin to make the matcher of a request that waits."""
        assert request.sampling.grammar is not None
        output_token_ids = request.token_ids[request.num_prompt_tokens :]
        self._pending.append((request, self._compiler.start(request.sampling.grammar, output_token_ids)))

    def poll(self) -> Iterator[tuple[Request, FinishedRequest | None]]:
        """Requests that need not wait any longer, with how they end if they do: the grammar is none, or allows nothing more."""
        pending, self._pending = self._pending, []
        for request, handle in pending:
            if request.status is RequestStatus.FINISHED:
                continue
            try:
                request.grammar = handle.poll()
            except (InvalidInputError, GrammarLimitError) as error:
                yield request, FinishedRequest(FinishReason.ERROR, error=str(error))
                continue
            if request.grammar is None:
                self._pending.append((request, handle))
                continue
            finished = self.advance(request, (), may_jump=request.sampling.prompt_logprobs is None)
            request.num_untold_tokens = 0  # the runner knows nothing yet
            yield request, finished

    def advance(self, request: Request, token_ids: Sequence[int], *, may_jump: bool = True) -> FinishedRequest | None:
        """After token_ids were appended to a request without drafts: append what is forced, and find out what may come then.

        Returns how the request ends, if it does.
        """
        grammar = request.grammar
        assert grammar is not None and not request.draft_token_ids
        try:
            if not grammar.accept(token_ids):
                return FinishedRequest(FinishReason.ERROR, error="a token was sampled that the grammar forbids")
            if not grammar.is_terminated and self._jumps and may_jump and request.stage is RequestStage.DECODE:
                while forced := grammar.forced_tokens():
                    finished = self._append_forced(request, forced)
                    if finished is not None:
                        return finished
            if grammar.is_terminated:
                return FinishedRequest(FinishReason.STOP)
            request.token_masks = grammar.token_masks(())
        except GrammarLimitError as error:
            return FinishedRequest(FinishReason.ERROR, error=str(error))
        return None

    def keep_valid_drafts(self, request: Request) -> FinishedRequest | None:
        """Cut a request's drafts where they leave the grammar. Returns how the request ends, if it cannot be followed so far."""
        grammar, drafts = request.grammar, request.draft_token_ids
        assert grammar is not None
        try:
            num_invalid = len(drafts) - grammar.count_valid(drafts)
            if num_invalid:
                del drafts[-num_invalid:]
                request.num_tokens_with_spec -= num_invalid
            if drafts:
                request.token_masks = grammar.token_masks(drafts)
        except GrammarLimitError as error:
            return FinishedRequest(FinishReason.ERROR, error=str(error))
        return None

    @staticmethod
    def _append_forced(request: Request, forced: list[int]) -> FinishedRequest | None:
        """As if they had been sampled."""
        assert request.grammar is not None
        token_ids = request.token_ids
        token_ids += forced
        finished, num_kept = find_end(request, len(forced))
        request.num_tokens_with_spec = len(token_ids)
        request.num_untold_tokens += num_kept
        if finished is None and not request.grammar.accept(forced):
            raise GrammarLimitError("the grammar's own continuation is too much for it")
        return finished
