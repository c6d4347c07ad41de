"""Weights and checkpoints: whole or not there, and bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from paceline.core.packing import pack as pack_batch
from paceline.domain.batch import Batch
from paceline.domain.ids import RolloutId
from paceline.domain.sample import Sample
from paceline.errors import TrainerError

from .packed import pack, random_sequences

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from paceline.trainer import (  # noqa: E402
    OptimizerSettings,
    Trainer,
    latest_checkpoint,
    load_checkpoint,
    loop,
    save_checkpoint,
    write_model,
)
from paceline.transport import layout, room  # noqa: E402
from paceline.transport.filesystem import FilesystemBatches  # noqa: E402
from paceline.transport.reader import publish_weights  # noqa: E402
from paceline.transport.status import finish, open_run  # noqa: E402

pytestmark = pytest.mark.torch

V1 = Path("weights") / "v000001"
SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=3)


def publish(of: Trainer, source: Path, run: Path, dtype: str = "bfloat16") -> None:
    publish_weights(run, 1, lambda folder: write_model(of.model, source, folder, dtype), "test")


def parameters(of: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in of.model.parameters()]


def test_a_resumed_trainer_goes_on_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    one = Trainer(model_dir, SETTINGS)
    for seed in range(3):
        one.step([pack(random_sequences(seed))])
    save_checkpoint(one, tmp_path, keep_last=2)
    other = Trainer(model_dir, SETTINGS)
    load_checkpoint(other, latest_checkpoint(tmp_path))
    assert other.version == 3
    for seed in range(3, 6):
        assert one.step([pack(random_sequences(seed))]) == other.step([pack(random_sequences(seed))])
    assert all(torch.equal(a, b) for a, b in zip(parameters(one), parameters(other), strict=True))


def test_a_resumed_trainer_goes_by_the_settings_that_it_has_now(model_dir: Path, tmp_path: Path) -> None:
    """The resumed run says that it goes on with them; the optimizer went on with those that were saved."""
    one = Trainer(model_dir, SETTINGS)
    one.step([pack(random_sequences(0))])
    save_checkpoint(one, tmp_path, keep_last=2)
    changed = dataclasses.replace(SETTINGS, weight_decay=0.1, betas=(0.8, 0.99))
    other = Trainer(model_dir, changed)
    load_checkpoint(other, latest_checkpoint(tmp_path))
    assert [(g["weight_decay"], tuple(g["betas"])) for g in other.optimizer.param_groups] == [
        (0.1, (0.8, 0.99))
    ]
    moments = [each.optimizer.state_dict()["state"][0]["exp_avg"] for each in (one, other)]
    assert torch.equal(*moments)


def test_only_the_newest_checkpoints_are_kept(model_dir: Path, tmp_path: Path) -> None:
    of = Trainer(model_dir, SETTINGS)
    for version in (1, 2, 9, 10, 11):
        of.version = version
        save_checkpoint(of, tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000010", "v00000011"]


def test_a_copy_under_another_versions_name_is_refused(model_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(model_dir, SETTINGS)
    made = save_checkpoint(trainer, tmp_path, keep_last=2)
    made.rename(tmp_path / "v00000008")
    with pytest.raises(TrainerError, match=r"v00000008 holds version 0, not the one in its name"):
        load_checkpoint(trainer, tmp_path / "v00000008")


def test_a_checkpoint_cannot_run_code(model_dir: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return print, ("ran",)

    (tmp_path / "v00000001").mkdir()
    with (tmp_path / "v00000001" / "trainer.pt").open("wb") as file:
        pickle.dump({"version": Trap()}, file, protocol=2)
    with pytest.raises(TrainerError, match="cannot be loaded"):
        load_checkpoint(Trainer(model_dir, SETTINGS), tmp_path / "v00000001")


@pytest.mark.parametrize("left", [0, 1000])
def test_a_damaged_checkpoint_is_named_with_what_to_do(model_dir: Path, tmp_path: Path, left: int) -> None:
    save_checkpoint(Trainer(model_dir, SETTINGS), tmp_path, 3)
    (file,) = tmp_path.rglob("trainer.pt")
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(TrainerError, match="remove it to go on from the one before"):
        load_checkpoint(Trainer(model_dir, SETTINGS), file.parent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_version_is_a_model_directory(model_dir: Path, tmp_path: Path, dtype: str) -> None:
    of = Trainer(model_dir, SETTINGS)
    of.step([pack(random_sequences(0))])
    publish(of, model_dir, tmp_path, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / V1, dtype=torch.float32)
    for mine, theirs in zip(parameters(of), loaded.parameters(), strict=True):
        assert torch.equal(mine.to(getattr(torch, dtype)).float(), theirs)
    assert json.loads((tmp_path / V1 / "version.json").read_text())["version"] == 1
    config = json.loads((tmp_path / V1 / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == dtype
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / V1 / name).read_bytes() == (model_dir / name).read_bytes()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v000001"]


def test_weights_never_show_before_they_are_whole(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, seen = Trainer(model_dir, SETTINGS), []

    def flush_then_look(path: Path) -> None:
        seen.append(((tmp_path / V1).exists(), path))

    monkeypatch.setattr(layout, "flush_entry", flush_then_look)
    publish(of, model_dir, tmp_path)
    written = {path.name for path in (tmp_path / V1).iterdir()}
    flushed_before = {path.name for visible, path in seen if not visible}
    assert written <= flushed_before
    assert seen[-1] == (True, tmp_path / "weights")


def test_a_publisher_that_dies_halfway_leaves_nothing(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Trainer(model_dir, SETTINGS)

    def disk_full(path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(layout, "flush_entry", disk_full)
    with pytest.raises(OSError, match="no space"):
        publish(of, model_dir, tmp_path)
    assert list((tmp_path / "weights").iterdir()) == []


def test_an_older_directory_of_the_same_version_is_replaced(model_dir: Path, tmp_path: Path) -> None:
    of = Trainer(model_dir, SETTINGS)
    publish(of, model_dir, tmp_path)
    before = (tmp_path / V1 / "model.safetensors").read_bytes()
    of.step([pack(random_sequences(0))])
    publish(of, model_dir, tmp_path)
    assert (tmp_path / V1 / "model.safetensors").read_bytes() != before
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v000001"]


def test_weights_that_are_not_finite_are_not_published(model_dir: Path, tmp_path: Path) -> None:
    of = Trainer(model_dir, SETTINGS)
    with torch.no_grad():
        next(of.model.parameters())[0, 0] = torch.nan
    with pytest.raises(TrainerError, match="is not finite"):
        publish(of, model_dir, tmp_path)
    assert list((tmp_path / "weights").iterdir()) == []


def ship(run: Path, ranks: int) -> None:
    """One batch of two samples, in a run of its own."""
    ids = np.arange(4, dtype=np.int32)
    sample = Sample(
        token_ids=ids,
        trainable=ids > 1,
        logprobs=np.where(ids > 1, -1.0, 0.0).astype(np.float32),
        versions=((0, 2),),
        rollout=RolloutId(0, 0),
        env="env",
        task_index=0,
        ending="completed",
        reward=1.0,
        temperature=1.0,
        advantage=1.0,
    )
    packed = pack_batch(Batch(1, (sample, sample), (sample.rollout,)), ranks=ranks, micro_batch_tokens=4)
    open_run(run, "test")
    asyncio.run(FilesystemBatches(run, "test").ship(packed))


def test_a_batch_for_several_ranks_is_refused_rather_than_trained_in_part(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(tmp_path, ranks=2)
    monkeypatch.setattr(loop, "_listen", lambda *_: None)  # this process keeps its signals
    with pytest.raises(TrainerError, match="packed for 2 ranks"):
        loop.train(tmp_path, str(model_dir), loop.Settings())
    assert not (tmp_path / "acks").exists()


def test_a_full_disk_is_waited_for_by_weights_and_by_the_acknowledgement(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(tmp_path, ranks=1)
    finish(tmp_path)  # the trainer's loop ends behind this batch
    refused = {"weights": 3, "acks": 3}
    flush = layout.flush_entry

    def full(path: Path) -> None:
        for place, left in refused.items():
            if left and tmp_path / place in path.parents:
                refused[place] -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    monkeypatch.setattr(layout, "flush_entry", full)
    monkeypatch.setattr(room, "RETRY_S", 0.0)
    monkeypatch.setattr(loop, "_listen", lambda *_: None)
    assert loop.train(tmp_path, str(model_dir), loop.Settings()) == 1
    assert [path.name for path in (tmp_path / "acks").iterdir()] == [layout.ack_file(tmp_path, 1).name]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [V1.name]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    waited = [each["for"] for each in told if each.get("event") == "no room"]
    assert waited == ["weights v1", "acknowledgement of step 1"], "each is said once"
    assert refused == {"weights": 0, "acks": 0}
