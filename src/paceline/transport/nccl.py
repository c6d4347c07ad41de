"""Weights from a trainer's GPUs to the engines' GPUs, over NCCL: the trainer's side, on vLLM's own sender.

**Needs GPUs, and has not been tried on any.** What is tested, against a scripted server, is the order of the calls and
what they say; their names and shapes are those of vLLM 0.32 (`vllm.distributed.weight_transfer`).

    sender = NcclSender(run_dir, source, servers={"http://gpu-1:8000": 2}, master_address="10.0.0.1", master_port=29501)
    sender.publish(version)         after each optimizer step, instead of `publish_weights`

    trainer                                        run                                     vLLM
    publish: weights/vN/transfer.json ──────────▶  pause                              ──▶
    first time: opens its end, waits for the group init_weight_transfer_engine (once) ──▶  joins the group
    broadcasts, once the group takes part  ◀─────  start, update, finish, resume      ──▶  receives

`publish` returns when everything is sent. vLLM must be installed where the trainer runs, and its servers started with
`--weight-transfer-config '{"backend": "nccl"}'`. A transfer cannot be repeated: an engine that fails it, or joins after
it, has to wait for the next version; a run that resumes needs a version in files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from paceline.domain.ids import Version
from paceline.domain.transfer import TRANSFER_FILE, Transfer
from paceline.errors import TrainerError
from paceline.transport.reader import publish_weights


class Source(Protocol):
    """vLLM's `WeightSource`: what is sent, and in which order. `metadata` gives objects with name, dtype and shape."""

    def metadata(self) -> list[Any]: ...


class PublishingClient:
    """vLLM's `VLLMWeightSyncClient`, by its four methods: it publishes what the servers have to be told, and the run tells
    them. Nothing here waits: the sender does, inside of NCCL, until the servers take part."""

    def __init__(
        self,
        servers: Mapping[str, int],
        metadata: Callable[[], list[Any]],
        publish: Callable[[Version, bytes], None],
    ) -> None:
        """`servers`: address -> GPUs. `publish` makes a version's `transfer.json` appear."""
        self._metadata, self._publish = metadata, publish
        self._init: dict[str, Any] = {}
        self._offsets: dict[str, int] = {}
        rank = 1
        for address, gpus in servers.items():
            self._offsets[address.rstrip("/")] = rank
            rank += gpus
        self.world_size = rank
        self.version: Version = 0
        """The one being sent."""
        self._published: Version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._init = {name: value for name, value in init_info.items() if name != "rank_offset"}
        # The servers join the group when they are told of a first version; until then the trainer's end waits for them.
        self._tell(_update_info(self._metadata()))

    def start_weight_update(self) -> None:
        """The run does it, between the pause and the transfer."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self._published != self.version:
            self._tell(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The run does it, with the version as its label."""

    def _tell(self, update_info: dict[str, Any]) -> None:
        transfer = Transfer(self.version, self._init, self._offsets, update_info)
        self._publish(self.version, msgspec.json.encode(transfer))
        self._published = self.version


def _update_info(metadata: list[Any]) -> dict[str, Any]:
    return {
        "names": [m.name for m in metadata],
        "dtype_names": [str(m.dtype).split(".")[-1] for m in metadata],
        "shapes": [list(m.shape) for m in metadata],
    }


class NcclSender:
    """Publishes versions by sending them. Make one on the trainer's rank 0."""

    def __init__(
        self,
        run_dir: Path | str,
        source: Source,
        *,
        servers: Mapping[str, int],
        master_address: str,
        master_port: int,
        run_id: str | None = None,
        also: Callable[[Path], None] | None = None,
    ) -> None:
        """`servers`: address of each vLLM server, as the run's `engine.urls` has it, -> its GPUs. `master_address`: where
        the servers reach this process. `also(folder)` may put more beside a version, such as `probe.json`."""
        self._run_dir, self._run_id, self._also = Path(run_dir), run_id, also
        self._source = source
        self._address, self._port = master_address, master_port
        self._client = PublishingClient(servers, source.metadata, self._write)
        self._engine: Any = None

    def publish(self, version: Version) -> None:
        """Send the source's weights as `version`; returns when they are sent. TrainerError when vLLM is not installed."""
        self._client.version = version
        if self._engine is None:
            self._engine = self._open()
        self._engine.send_weights()

    def _open(self) -> Any:
        try:
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )
        except ImportError as error:
            raise TrainerError(
                f"weights cannot be sent over NCCL: {error}; install vllm where the trainer runs, or publish files"
            ) from error
        init = NCCLTrainerInitInfo(
            master_address=self._address, master_port=self._port, world_size=self._client.world_size
        )
        return NCCLTrainerWeightTransferEngine.trainer_init(init, client=self._client, source=self._source)

    def _write(self, version: Version, transfer: bytes) -> None:
        def fill(folder: Path) -> None:
            (folder / TRANSFER_FILE).write_bytes(transfer)
            if self._also is not None:
                self._also(folder)

        publish_weights(self._run_dir, version, fill, self._run_id)
