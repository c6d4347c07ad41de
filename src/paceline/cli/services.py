"""What algorithms may ask for while a group is processed: callables by import path, and chat endpoints."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from paceline.config import ChatSection
from paceline.engines.openai_chat import OpenAIChat
from paceline.errors import ConfigError


def chat_of(name: str, section: ChatSection) -> OpenAIChat:
    """The client of a chat endpoint. ConfigError when its key is not there."""
    key = os.environ.get(section.api_key_env) if section.api_key_env else None
    if section.api_key_env and not key:
        raise ConfigError(
            f"chat.{name}.api_key_env names {section.api_key_env}, which is not set: set it to the endpoint's key"
        )
    options = {"temperature": section.temperature, "max_tokens": section.max_tokens}
    return OpenAIChat(
        section.url,
        section.model,
        name=name,
        api_key=key,
        options={option: value for option, value in options.items() if value is not None},
        max_connections=section.max_connections,
        request_s=section.request_s,
    )


class ConfiguredServices:
    """The async callables that `[services]` names, and the chat endpoints of `[chat.NAME]`."""

    def __init__(self, paths: Mapping[str, str], chats: Mapping[str, ChatSection] | None = None) -> None:
        self._calls = {name: imported(path, f"service {name!r}") for name, path in paths.items()}
        self._chats = {name: chat_of(name, section) for name, section in (chats or {}).items()}
        self._calls.update(self._chats)

    async def close(self) -> None:
        for chat in self._chats.values():
            await chat.close()

    async def call(self, service: str, request: Any) -> Any:
        if service not in self._calls:
            raise ConfigError(
                f"the algorithm asks for service {service!r}, configured are {sorted(self._calls) or 'none'}: "
                "add it to [services], or as [chat.NAME]"
            )
        return await self._calls[service](request)


def imported(path: str, what: str) -> Any:
    """What an import path `module:name` of the config names. ConfigError when there is none."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}: cannot import {path!r}: {error}; expected module:name") from error
    return found
