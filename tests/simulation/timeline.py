"""Messages as lines of a timeline. Only a traced run pays for this."""

from __future__ import annotations

from core.wire import messages


def describe(node_name: str, direction: str, frame: bytes) -> str:
    """What a frame says, in one line; "" for heartbeats and pings, which say nothing that matters here."""
    if direction == "to_router":
        _, news = messages.decode_node_message(frame)
        text = _describe_news(news)
        return f"{node_name} > router: {text}" if text else ""
    _, command = messages.decode_router_message(frame)
    text = _describe_command(command)
    return f"router > {node_name}: {text}" if text else ""


def _describe_news(message: messages.NodeMessage) -> str:
    if isinstance(message, messages.Register):
        return f"registers, number {message.registration_index}"
    if isinstance(message, messages.KVEvents):
        return f"{len(message.events)} KV events from {message.first_sequence}"
    if isinstance(message, messages.Updates):
        return "; ".join(_describe_update(update) for update in message.updates)
    return ""


def _describe_update(update: messages.RequestUpdate) -> str:
    parts = [update.request_id]
    if update.num_cached_tokens:
        parts.append(f"{update.num_cached_tokens} tokens cached")
    if update.token_ids:
        parts.append(f"token {update.first_index} is {' '.join(map(str, update.token_ids))}")
    if update.is_prefill_done:
        parts.append("prefill done")
    if update.finish_reason:
        parts.append(f"ends: {update.finish_reason} {update.error}".rstrip())
    return ", ".join(parts)


def _describe_command(message: messages.RouterMessage) -> str:
    if isinstance(message, messages.Generate):
        known = f"{len(message.prompt_token_ids)} + {len(message.output_token_ids)} tokens"
        return f"{message.stage} {message.request_id}, {known}"
    if isinstance(message, messages.Abort):
        return f"forget {', '.join(message.request_ids)}"
    if isinstance(message, messages.Drain):
        return "drain"
    if isinstance(message, messages.RegisterAgain):
        return "register again"
    if isinstance(message, messages.KVSnapshotRequest):
        return "tell all KV"
    return ""
