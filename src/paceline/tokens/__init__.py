"""Messages and token ids: the tokenizer with its chat template, and the bridge that only ever extends ids."""

from __future__ import annotations

from paceline.tokens.bridge import AppendOnly, Bridge, Conversation, Plan, probe_append_only
from paceline.tokens.messages import ChatMessage, Tools, assistant, system, tool, user
from paceline.tokens.tokenizer import ChatTokenizer, resolve_model_dir

__all__ = [
    "AppendOnly",
    "Bridge",
    "ChatMessage",
    "ChatTokenizer",
    "Conversation",
    "Plan",
    "Tools",
    "assistant",
    "probe_append_only",
    "resolve_model_dir",
    "system",
    "tool",
    "user",
]
