"""`paceline capacity`: the KV arithmetic of a model and a GPU, before anything is rented.

paceline capacity MODEL --gpu H100
paceline capacity run.toml        # the run's model, its contexts and, where it has one, its embedded engine's cache
paceline capacity --layers 36 --kv-heads 8 --head-dim 128 --weights-gb 16 --gpu H100 --context 8000 32000
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import EmbeddedEngine
from paceline.config.engine import EngineSection
from paceline.core.capacity import (
    GPUS,
    Capacity,
    KvShape,
    capacity,
    dtype_bytes,
    kv_shape,
    kv_shape_of,
    weight_bytes_of,
)
from paceline.errors import ConfigError

_CONTEXTS = (8_000, 32_000, 128_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a run's TOML config, or a model directory, its config.json, or pkg:PACKAGE/PATH",
    )
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)} (default H100)")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs that one engine spans (default 1)"
    )
    parser.add_argument("--memory-gb", type=float, metavar="GB", help="memory of one GPU, instead of --gpu")
    parser.add_argument(
        "--utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share the engine may take (default 0.9)",
    )
    parser.add_argument(
        "--reserve-gb",
        type=float,
        default=0.0,
        metavar="GB",
        help="of it, for activations on each GPU (default 0)",
    )
    parser.add_argument(
        "--weights-gb", type=float, metavar="GB", help="weights; else from the model's files or config"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers, where there is no MODEL")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="KV heads of a layer")
    parser.add_argument("--head-dim", type=int, metavar="N", help="dimension of a head")
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help="what the cache keeps: bfloat16 (default: the model's), fp8, …"
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="contexts of a rollout (default: those of the run's config, else 8000 32000 128000)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    section = _take_config(args) if (args.model or "").endswith(".toml") else None
    args.context = args.context or list(_CONTEXTS)
    _check(args)
    shape, weights_gb, origin = _model(args)
    if isinstance(section, EmbeddedEngine) and args.gpu is None and args.memory_gb is None:
        return _embedded(args, section, shape)
    gpu = args.gpu or "H100"
    if args.memory_gb is not None:
        memory_gb, name = args.memory_gb, f"{args.memory_gb:g} GB GPU"
    elif gpu in GPUS:
        memory_gb, name = GPUS[gpu].memory_gb, gpu
    else:
        raise ConfigError(f"unknown GPU {gpu!r}; there are {', '.join(GPUS)}, or give --memory-gb")
    found = capacity(
        shape,
        memory_gb=memory_gb,
        weights_gb=weights_gb,
        gpus=args.gpus,
        utilization=args.utilization,
        reserve_gb=args.reserve_gb,
    )
    if args.json:
        print(json.dumps(_as_json(found, shape, memory_gb, weights_gb, args.context)))
        return 0
    _print_shape(shape)
    print(f"weights           {weights_gb:>9.1f} GB   {origin}")
    print(
        f"for the KV cache  {found.kv_bytes / 1e9:>9.1f} GB   {args.gpus} x {name}, {memory_gb:g} GB, {args.utilization:.0%} used"
    )
    print(f"KV tokens         {found.kv_tokens:>12,}")
    _print_rollouts(found, args.context)
    return 0


def _take_config(args: argparse.Namespace) -> EngineSection:
    """Put what a run's config says where the command line says nothing; returns the config's engine."""
    from paceline.cli.options import load_config

    config = load_config(argparse.Namespace(config=[Path(args.model)], overrides=[])).value
    args.model = config.model.name
    if not args.context:
        limits = [env.limits.max_context for env in config.env] + [
            env.limits.max_context for env in config.eval
        ]
        args.context = sorted({config.batch.seq_len, *(limit for limit in limits if limit is not None)})
    return config.engine


def _embedded(args: argparse.Namespace, section: EmbeddedEngine, shape: KvShape) -> int:
    """What the run's own engine holds: its cache is as large as the config says, not what a GPU leaves."""
    shape = msgspec.structs.replace(shape, dtype_bytes=dtype_bytes(args.kv_dtype or section.dtype))
    found = Capacity(shape.bytes_per_token, shape.bytes_per_token * section.kv_tokens, section.kv_tokens)
    if args.json:
        told = {
            "bytes_per_token": shape.bytes_per_token,
            "kv_gb": found.kv_bytes / 1e9,
            "kv_tokens": found.kv_tokens,
        }
        print(json.dumps(told | {"rollouts": {str(n): found.rollouts(n) for n in args.context}}))
        return 0
    _print_shape(shape)
    each = f", in each of {section.replicas} engines" if section.replicas > 1 else ""
    print(f"for the KV cache  {found.kv_bytes / 1e9:>9.2f} GB   of memory{each}")
    print(f"KV tokens         {found.kv_tokens:>12,}   engine.kv_tokens")
    _print_rollouts(found, args.context)
    return 0


def _print_shape(shape: KvShape) -> None:
    print(
        f"bytes per token   {shape.bytes_per_token:>12,}   {shape.layers} layers x {shape.per_layer} x {shape.dtype_bytes} bytes"
    )
    if shape.note:
        print(f"                               {shape.note}")


def _print_rollouts(found: Capacity, contexts: list[int]) -> None:
    print()
    for context in contexts:
        rollouts = found.rollouts(context)
        print(f"{context:>9,} tokens: {int(rollouts):>6,} whole rollouts ({rollouts:.1f})")


def _model(args: argparse.Namespace) -> tuple[KvShape, float, str]:
    if args.model is None:
        if args.weights_gb is None:
            raise ConfigError("give --weights-gb: without a MODEL the weights are not known")
        return (
            kv_shape(args.layers, args.kv_heads, args.head_dim, args.kv_dtype or "bfloat16"),
            args.weights_gb,
            "as given",
        )
    folder, config = _read(args.model)
    shape = kv_shape_of(config, args.kv_dtype)
    if args.weights_gb is not None:
        return shape, args.weights_gb, "as given"
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if files:
        return shape, files / 1e9, "its safetensors files"
    return shape, weight_bytes_of(config) / 1e9, "from config.json"


def _read(model: str) -> tuple[Path, dict[str, Any]]:
    from paceline.tokens.tokenizer import resolve_model_dir

    path = Path(model).expanduser()
    if not path.is_file():
        if not path.is_dir() and not model.startswith("pkg:") and not (path := _fetched(model)).is_dir():
            raise ConfigError(
                f"no model directory or config.json at {model!r}; models are not fetched for this"
            )
        path = (path if path.is_dir() else resolve_model_dir(model)) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return path.parent, config


def _fetched(model: str) -> Path:
    """Where a hub model is, if it is on this machine already."""
    from paceline.cli.checks.model import local_model_dir

    try:
        return local_model_dir(model) or Path(model)
    except ConfigError:  # it is no hub model either
        return Path(model)


def _check(args: argparse.Namespace) -> None:
    numbers = (args.layers, args.kv_heads, args.head_dim)
    if args.model is None and None in numbers:
        raise ConfigError("name a MODEL, or give --layers, --kv-heads, --head-dim and --weights-gb")
    if args.kv_dtype is not None:
        dtype_bytes(args.kv_dtype)
    counts = [n for n in (*numbers, args.gpus, *args.context) if n is not None]
    if min(counts) < 1 or not 0 < args.utilization <= 1:
        raise ConfigError("counts are at least 1, and --utilization is above 0 and at most 1")


def _as_json(
    found: Capacity, shape: KvShape, memory_gb: float, weights_gb: float, contexts: list[int]
) -> dict[str, Any]:
    return {
        "bytes_per_token": shape.bytes_per_token,
        "memory_gb": memory_gb,
        "weights_gb": weights_gb,
        "kv_gb": found.kv_bytes / 1e9,
        "kv_tokens": found.kv_tokens,
        "rollouts": {str(context): found.rollouts(context) for context in contexts},
    }
