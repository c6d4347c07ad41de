"""Messages and token ids: the tokenizer with its chat template, and the bridge that only ever extends ids."""

from __future__ import annotations

from paceline.tokens.bridge import Bridge
from paceline.tokens.conversation import Conversation
from paceline.tokens.messages import ChatMessage, Tools, assistant, system, tool, user
from paceline.tokens.plan import Plan
from paceline.tokens.probe import AppendOnly, probe_append_only
from paceline.tokens.tokenizer import ChatTokenizer, resolve_model_dir
from paceline.tokens.tool_calls import Answer, ToolCall, detect_format, read_answer

__all__ = [
    "Answer",
    "AppendOnly",
    "Bridge",
    "ChatMessage",
    "ChatTokenizer",
    "Conversation",
    "Plan",
    "ToolCall",
    "Tools",
    "assistant",
    "detect_format",
    "probe_append_only",
    "read_answer",
    "resolve_model_dir",
    "system",
    "tool",
    "user",
]
