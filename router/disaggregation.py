"""Whether a prompt is computed on a prefill node or on the decode node that goes on with it: pure functions over predictions.

Placer asks. All times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.predictions import Prediction, PromptFacts, load_ms


def local_prefill_reason(num_tokens: int, has_prefill_node: bool, block_size: int, local_prefill_max_tokens: int) -> str:
    """Why a request of `num_tokens` known tokens is prefilled on its decode node whatever the load; empty when that is open.

    Only full blocks can be handed over, so that a prompt of one block or less gains nothing from a prefill node.
    """
    if not has_prefill_node:
        return "no_prefill_node"
    if num_tokens <= max(local_prefill_max_tokens, block_size):
        return "short_prompt"
    return ""


def nodes_within_target(predictions: Sequence[Prediction], itl_target_ms: float) -> list[Prediction]:
    """Decode nodes that may compute this prompt, too, without holding up those that decode there for longer than the target.

    As if all prompts there and this one came in a single step: a node's steps are shorter, so the bound is on the safe side.
    """
    if itl_target_ms <= 0.0:
        return list(predictions)
    return [
        each
        for each in predictions
        if num_decoding(each) == 0 or each.step_ms + each.node.prefill_backlog_ms + each.own_ms <= itl_target_ms
    ]


def measured_reason(there: Sequence[Prediction], here: Sequence[Prediction], prompt: PromptFacts, itl_target_ms: float) -> str:
    """Why a decode node computes the prompt: cached, faster_here or prefill_saturated; empty when a prefill node is to do it.

    there, here: predictions for prefill and decode nodes, neither empty. On the way over a prefill node the first token waits
    for its queue and computing, the second for the handoff. On a decode node the prompt also holds up each request that decodes
    there, for as long as it is computed: the sum of all that is compared. Without measurements prefill nodes are used, since
    that is what they were started for.
    """
    allowed = nodes_within_target(here, itl_target_ms)
    if not allowed or not all(any(each.is_measured for each in side) for side in (there, here)):
        return ""
    local = min(allowed, key=_local_ms)
    num_blocks = prompt.num_tokens // prompt.block_size
    if prompt.num_pool_blocks.get(local.node.node_id, 0) >= max(1, (prompt.num_tokens - 1) // prompt.block_size):
        return "cached"  # all that a prefill node could hand over is there
    handoff_ms = min(
        load_ms(each.costs, num_blocks - prompt.num_pool_blocks.get(each.node.node_id, 0)) + each.decode_ms for each in here
    )
    remote = min(there, key=lambda each: each.ttft_ms)
    if _local_ms(local) >= remote.ttft_ms + handoff_ms:
        return ""
    return "prefill_saturated" if _local_ms(local) >= min(each.own_ms for each in there) + handoff_ms else "faster_here"


def num_decoding(prediction: Prediction) -> int:
    """Requests that the router has there beyond their first token."""
    return max(0, prediction.node.num_in_flight - prediction.node.num_prefilling)


def _local_ms(prediction: Prediction) -> float:
    return prediction.ttft_ms + prediction.decode_ms + prediction.own_ms * num_decoding(prediction)
