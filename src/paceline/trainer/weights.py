"""Publishing a version: a Hugging Face directory that is either whole or not there.

    <parent>/.<name>.<pid>.tmp/    written and flushed to disk, file by file
    <parent>/<name>/               the same directory, renamed

Whoever sees the name sees every file, after a power cut too. What a reader needs beside the weights (config,
tokenizer, chat template) is copied from the directory the run started from, unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from paceline.errors import TrainerError

VERSION_FILE = "version.json"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


def model_directory(name: str) -> Path:
    """The local directory of `name`: a directory as it is, else the hub's snapshot, fetched if need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", *(f"*{suffix}" for suffix in _COPIED)]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated kinds; all mean: no such model here
        raise TrainerError(f"model {name!r} is no directory here and cannot be fetched: {error}") from error


def publish_weights(model: Any, source: Path, out: Path, version: int, dtype: str = "bfloat16") -> None:
    """Write `model` as version `version` to `out`, atomically. `source` gives config and tokenizer.

    An older directory of that name (from before a resume) is replaced. TrainerError if a weight is not finite:
    an engine that loads it would sample noise without a word.
    """
    if dtype not in _DTYPES:
        raise TrainerError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise TrainerError(f"weight {name} of version {version} is not finite: not published")
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write(model, source, temporary, version, dtype)
        commit_directory(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commit_directory(temporary: Path, out: Path) -> None:
    """Flush `temporary` to disk and give it the name `out`, replacing a directory of that name."""
    for path in [*temporary.rglob("*"), temporary]:
        _flush(path)
    if out.exists():
        # A directory cannot be renamed over one that is not empty. Between these two lines there is none,
        # which a reader sees as not yet published.
        replaced = out.parent / f".{out.name}.{os.getpid()}.old.tmp"
        out.rename(replaced)
        temporary.rename(out)
        shutil.rmtree(replaced)
    else:
        temporary.rename(out)
    _flush(out.parent)


def _write(model: Any, source: Path, out: Path, version: int, dtype: str) -> None:
    to = _DTYPES[dtype]
    state = {
        name: t.detach().to(to) if t.is_floating_point() else t for name, t in model.state_dict().items()
    }
    model.save_pretrained(out, state_dict=state)
    # save_pretrained writes its own config and may cut up a tokenizer it does not know: the source's are right.
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    stated = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config.update(dict.fromkeys(stated, dtype))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / VERSION_FILE).write_text(json.dumps({"version": version, "dtype": dtype}) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
