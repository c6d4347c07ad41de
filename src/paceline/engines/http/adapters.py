"""LoRA adapters as versions: loaded beside the base model, without a pause.

A version whose directory holds `adapter_config.json` (peft's form) is loaded under a name of its own, `policy-v7`. Calls
name it as their model, so that what is in flight goes on under the adapter it began with, to its end: nothing is paused,
and a call has one version. An adapter is never overwritten in place: the server's prefix cache goes by its name and path.
Old ones leave the server's memory by themselves, least recently used first (`--max-loras`, `--max-cpu-loras`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.domain.ids import Version
from paceline.engines.http.link import Link
from paceline.engines.http.wire import error_text
from paceline.errors import EngineError

CONFIG = "adapter_config.json"
_REMEDY = (
    "start the server with --enable-lora, --max-lora-rank of at least the adapter's, and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)


class Adapter(msgspec.Struct, frozen=True):
    """One that is loaded."""

    name: str
    version: Version


def is_adapter(path: str) -> bool:
    """Whether a version is an adapter rather than a whole model."""
    return (Path(path) / CONFIG).is_file()


class AdapterLoader:
    """Loads adapters into one server."""

    def __init__(self, link: Link, model: str) -> None:
        self._link, self._model = link, model

    async def load(self, version: Version, path: str) -> Adapter:
        """Returns once calls may name it. EngineError with what the server needs, or said."""
        link, adapter = self._link, Adapter(f"{self._model}-v{version}", version)
        answer = await link.call(
            "POST",
            "/v1/load_lora_adapter",
            {"lora_name": adapter.name, "lora_path": path, "load_inplace": True},
            within_s=link.limits.load_weights_s,
        )
        if answer.is_missing:
            raise EngineError(f"{link.name}: cannot load the LoRA adapter {path}: {_REMEDY}")
        if answer.status != 200:
            raise EngineError(
                f"{link.name}: /v1/load_lora_adapter from {path} answered {answer.status}: {error_text(answer.body)}"
            )
        return adapter
