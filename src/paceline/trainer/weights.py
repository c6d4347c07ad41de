"""A version of the model as a Hugging Face directory.

What a reader needs beside the weights (config, tokenizer, chat template) is copied from the directory the run started
from, unchanged. `paceline.transport.reader.publish_weights` makes the directory appear whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from paceline.errors import TrainerError
from paceline.transport.layout import VERSION_FILE

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


def write_model(model: Any, source: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Write `model` into the directory `out` in Hugging Face form. `source` gives config and tokenizer.

    TrainerError if a weight is not finite: an engine that loads it would sample noise without a word.
    """
    if dtype not in _DTYPES:
        raise TrainerError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise TrainerError(f"weight {name} is not finite: not published")
    to = _DTYPES[dtype]
    state = {
        name: t.detach().to(to) if t.is_floating_point() else t for name, t in model.state_dict().items()
    }
    model.save_pretrained(out, state_dict=state)
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600; an engine may run as someone else
    # save_pretrained writes its own config and may cut up a tokenizer it does not know: the source's are right.
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    stated = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config.update(dict.fromkeys(stated, dtype))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / VERSION_FILE).write_text(json.dumps({"dtype": dtype}) + "\n", encoding="utf-8")
