"""A trainer of the user's own: numpy alone. `python e2e_trainer.py RUN RANK MODEL [HOW]`."""

import shutil
import sys
import time
from pathlib import Path

import numpy as np

import paceline


def main(run_dir: Path, rank: int, model: Path, how: str = "well") -> None:
    while not (run_dir / "status.json").exists():
        time.sleep(0.02)
    for batch in paceline.read_batches(run_dir, rank=rank):
        assert batch.ranks == int(how.removeprefix("ranks=")) if how.startswith("ranks=") else True
        tokens = 0
        for micro in batch.micro_batches:
            assert micro.token_ids.dtype == np.int32
            assert len(micro.token_ids) == len(micro.logprobs) == len(micro.trainable)
            assert np.isfinite(micro.logprobs).all()
            assert (micro.advantages[~micro.trainable] == 0).all()
            tokens += int(micro.trainable.sum())
        if rank or how == "mute":
            continue
        version = {"beyond": batch.step + 5, "stale": 1}.get(how, batch.step)
        if how == "torn":  # by a program that does not rename, killed half way
            folder = run_dir / "weights" / f"v{version:06d}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
        else:
            paceline.publish_weights(run_dir, version, lambda folder: publish(model, folder, how))
        batch.ack({"tokens": tokens})
    assert "torch" not in sys.modules


def publish(model: Path, folder: Path, how: str) -> None:
    for file in model.iterdir():
        shutil.copyfile(file, folder / file.name)
    if how == "garbage":
        (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
