"""Weights that a trainer sends over NCCL: what is said to whom, and in which order. Nothing is sent here: that needs GPUs.

vLLM's sender is stood in for by one that makes the calls vLLM 0.32's makes, in its order.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_server import FakeServer
from test_http_generate import engine_on

from paceline.domain.transfer import TRANSFER_FILE, Transfer
from paceline.errors import EngineError, TrainerError
from paceline.runtime.weight_check import ProbeCheck
from paceline.transport.layout import weights_dir
from paceline.transport.nccl import NcclSender, PublishingClient

INIT = {"master_address": "10.0.0.1", "master_port": 29501, "world_size": 4, "packed": True}


class Source:
    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name="w", dtype="torch.bfloat16", shape=(4, 2))]


UPDATE = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[4, 2]]}


def test_a_version_is_published_before_the_sender_waits_and_each_server_has_its_ranks(tmp_path: Path) -> None:
    told: list[tuple[int, Transfer]] = []
    client = PublishingClient(
        {"http://a:1/": 2, "http://b:1": 1},
        Source().metadata,
        lambda version, data: told.append((version, msgspec.json.decode(data, type=Transfer))),
    )
    assert client.world_size == 4
    client.version = 1
    client.init_weight_transfer_engine({**INIT, "rank_offset": 1})  # from here on the trainer's end waits
    first = Transfer(1, INIT, {"http://a:1": 1, "http://b:1": 3}, UPDATE)
    assert told == [(1, first)]
    client.start_weight_update()
    client.update_weights(UPDATE)
    client.finish_weight_update()
    assert told == [(1, first)], "once"
    client.version = 2
    client.start_weight_update()
    client.update_weights(UPDATE)
    assert told[1:] == [(2, msgspec.structs.replace(first, version=2))]


async def test_the_server_joins_the_group_once_and_takes_each_version_between_pause_and_resume(
    tmp_path: Path,
) -> None:
    async with FakeServer() as fake, engine_on(fake, check=ProbeCheck(0.1, lambda _: [])) as engine:
        for version in (1, 2):
            path = tmp_path / f"v{version}"
            path.mkdir()
            sent = Transfer(version, INIT, {fake.url: 3}, UPDATE)
            (path / TRANSFER_FILE).write_bytes(msgspec.json.encode(sent))
            await engine.update_weights(version, str(path))
        joins = ["/init_weight_transfer_engine"]
        steps = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
        assert fake.paths(*joins, *steps) == [steps[0], *joins, *steps[1:], *steps]
        assert fake.group == {**INIT, "rank_offset": 3}
        assert (fake.loaded, fake.label, engine.version) == (UPDATE, "v2", 2)
        (path / TRANSFER_FILE).write_bytes(msgspec.json.encode(Transfer(3, INIT, {"http://a:1": 1}, UPDATE)))
        with pytest.raises(
            EngineError, match="is sent to http://a:1: name this server to the trainer's sender"
        ):
            await engine.update_weights(3, str(path))
        assert not fake.paused


def test_without_vllm_the_sender_says_what_to_do(tmp_path: Path) -> None:
    sender = NcclSender(
        tmp_path,
        Source(),
        servers={"http://a:1": 1},
        master_address="10.0.0.1",
        master_port=29501,
        run_id="r",
    )
    with pytest.raises(TrainerError, match="install vllm where the trainer runs, or publish files"):
        sender.publish(1)


def test_what_is_published_is_a_version_like_any_other(tmp_path: Path) -> None:
    sender = NcclSender(
        tmp_path,
        Source(),
        servers={"http://a:1": 1},
        master_address="10.0.0.1",
        master_port=29501,
        run_id="r",
        also=lambda folder: folder.joinpath("probe.json").touch(),
    )
    sender._client.version = 5
    sender._client.init_weight_transfer_engine(INIT)
    folder = weights_dir(tmp_path, 5)
    assert json.loads((folder / "version.json").read_text()) == {"version": 5, "run_id": "r"}
    assert {path.name for path in folder.iterdir()} == {"version.json", TRANSFER_FILE, "probe.json"}


async def test_a_torn_note_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / TRANSFER_FILE).write_bytes(b"{")
    async with FakeServer() as fake, engine_on(fake) as engine:
        with pytest.raises(EngineError, match=f"{TRANSFER_FILE} cannot be read"):
            await engine.update_weights(1, str(tmp_path))
        await asyncio.sleep(0)
        assert not fake.paused
