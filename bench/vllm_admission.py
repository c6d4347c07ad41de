"""Goodput of the admission controllers against the best fixed cap, on a real vLLM with little KV cache.

vLLM's CPU build (`make vllm-env`) serves a model of 3M parameters with random weights and 16,384 tokens of KV cache.
Agents as in `bench/_agents.py`: contexts grow from 400 to about 2,000 tokens over ten turns; a tool takes 1 s (short)
or 6 s (long) by the median of the slow calls. The controllers run as they are configured by default; the best fixed
cap is the best of a sweep, known only afterwards. Beside them: the adaptive rules started at the best fixed cap, and
rollouts paused at tool boundaries by what they hold (`bench/_programs.py`).

    make bench ONLY=vllm_admission                       the rows; about two hours
    .venv/bin/python -m bench.vllm_admission --help      the table, or parts of it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench._agents import LONGEST, PROMPT, Agents, run_agents, window
from bench._programs import ProgramCap
from paceline.core.admission import AdaptiveCap, Admission, Bounds, FixedCap, PredictiveCap
from paceline.engines.http import Limits, connect
from paceline.ports import GenerateRequest, SamplingParams
from paceline.runtime import parent

ONLY_BY_NAME = "it takes two hours, and a real vLLM (make vllm-env)"
ROOT = Path(__file__).parents[1]
VLLM = Path(os.environ.get("PACELINE_VLLM", ROOT / ".venv-vllm" / "bin" / "python"))
KV_TOKENS = 16384
WAITS = {"short": 1.0, "long": 6.0}
SECONDS = {"short": (120.0, 480.0), "long": (60.0, 240.0)}
"""From when on a cell is measured, and until when. At short waits the peak is narrow, and a few dozen rollouts, whose
lengths differ, say little of it; a controller has two minutes to find it."""
SWEEP = {"short": (6, 7, 8, 9, 11), "long": (8, 11, 14, 18, 24)}
GUIDED = ("adaptive", "predictive", "programs")
SEEDS = (1,)
POLL_S = 1.0
"""`metrics.load_interval_s`, as it is by default."""
LIMITS = Limits(admin_s=120.0, metrics_s=10.0)
"""The first request compiles for a while."""
RAMP_S, WASTED = 120.0, 0.005
"""What `predictive` has to keep to: seconds until it holds nine tenths of what it will, and tokens of rollouts that were
cancelled, of all that were sampled."""
ROWS = (
    *(f"admission_{kind}_vs_best_{name}" for kind in ("predictive", "adaptive") for name in WAITS),
    *(f"admission_predictive_{what}_{name}" for what in ("ramp_s", "wasted") for name in WAITS),
)

Cell = dict[str, Any]


def controller(kind: str) -> Admission:
    """`adaptive@12` begins with 12 rollouts; a number is a fixed cap."""
    bounds = Bounds(longest=LONGEST, group=4)
    if kind.startswith("adaptive"):
        _, _, start = kind.partition("@")
        return AdaptiveCap(Bounds(longest=LONGEST, group=4, initial=int(start)) if start else bounds)
    if kind == "predictive":
        return PredictiveCap(bounds)
    if kind == "programs":
        return ProgramCap(reserve=32, first=PROMPT)
    return FixedCap(int(kind))


# ── the server ──


def make_model(directory: Path) -> None:
    """3M parameters, random. Its vocabulary ends before the stop id of the tokenizer, so no turn ends early."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for file in (ROOT / "src" / "paceline" / "assets" / "small_policy").glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())


class Server:
    """A server under way, with all its processes."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self._process = psutil.Process(pid)

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of all its processes; seconds that the thread that computes was ready and had no processor."""
        total, most, waited = 0.0, 0.0, 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                total += times.user + times.system
                for thread in process.threads():
                    path = Path(f"/proc/{process.pid}/task/{thread.id}/schedstat")
                    ran, delayed, _ = path.read_text().split()
                    if float(ran) > most:
                        most, waited = float(ran), float(delayed) / 1e9
        return total, waited

    def post(self, path: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", method="POST"), timeout=30):
            pass


@contextmanager
def serving(model: Path | None = None) -> Iterator[Server]:
    """A server of `model`, or of that of `make_model` with `KV_TOKENS`; gone after the block, however that ends."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, socket.socket() as free:
        log = Path(folder) / "server.log"
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # Processors without instructions for bfloat16 take twenty times as long for it.
        wide = "avx512_bf16" not in Path("/proc/cpuinfo").read_text()
        limits: list[str] = []
        if model is None:
            model = Path(folder) / "model"
            make_model(model)
            limits = ["--max-model-len", "4096", "--kv-cache", f"{KV_TOKENS * (8 if wide else 4) // 1024}M"]
        argv = [str(VLLM), str(ROOT / "tools" / "vllm_serve.py"), str(model), "--port", str(port)]
        argv += ["--dtype", "float32" if wide else "bfloat16", *limits]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", parent.__file__, *argv],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _await_up(url, process, log)
            yield Server(url, process.pid)
        except BaseException:
            print(log.read_text(errors="replace")[-20000:], file=sys.stderr)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _await_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=2):
            return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not come up:\n{log.read_text(errors='replace')[-3000:]}")


# ── cells ──


async def measure(server: Server, name: str, kind: str, seed: int, share: float = 1.0) -> Cell:
    """One cell: a controller, a workload, a seed. `share` shortens it, to try things out."""
    since, until = (share * s for s in SECONDS[name])
    engine = await connect(server.url, id="vllm-0", served_name="policy", start_s=60.0, limits=LIMITS)
    try:
        if engine.info.kv_tokens != KV_TOKENS:
            raise RuntimeError(f"the server has {engine.info.kv_tokens} tokens of KV cache, not {KV_TOKENS}")
        server.post("/reset_prefix_cache")
        watch = await run_agents(
            engine,
            controller(kind),
            environment=Agents(WAITS[name], seed),
            seed=seed,
            seconds=until,
            cpu_s=server.cpu_s,
            poll_s=POLL_S,
            pause_at_boundaries=kind == "programs",
        )
    finally:
        await engine.close()
    if watch.errors:
        raise RuntimeError(f"{len(watch.errors)} calls failed, the first: {watch.errors[0]}")
    return {"wait": name, "kind": kind, "seed": seed, "ended": watch.ended, **window(watch, since, until)}


def run_all(
    names: list[str], seeds: list[int], kinds: list[str], share: float, out: Path | None
) -> list[Cell]:
    """Every cell, one after the other: the sweep, then the controllers, then adaptive with what the sweep found."""
    cells: list[Cell] = []
    with serving() as server:
        asyncio.run(warm_up(server))
        for name in names:
            jobs = [(kind, seed) for seed in seeds for kind in kinds or (*map(str, SWEEP[name]), *GUIDED)]
            for kind, seed in jobs:
                cells.append(_one(server, name, kind, seed, share, out))
            if not kinds:
                best, _ = best_fixed(cells, name)
                cells += [_one(server, name, f"adaptive@{best}", seed, share, out) for seed in seeds]
    return cells


async def warm_up(server: Server) -> None:
    """A server's first requests are slow: it compiles for each shape of batch it has not met."""
    engine = await connect(server.url, id="vllm-0", served_name="policy", start_s=60.0, limits=LIMITS)
    try:
        for calls in (1, 4, 16, 32):
            ids = np.random.default_rng(calls).integers(0, 256, (calls, PROMPT), dtype=np.int32)
            await asyncio.gather(
                *(
                    engine.generate(GenerateRequest(f"warm-{calls}-{n}", row, SamplingParams(max_tokens=16)))
                    for n, row in enumerate(ids)
                )
            )
    finally:
        await engine.close()


def _one(server: Server, name: str, kind: str, seed: int, share: float, out: Path | None) -> Cell:
    cell = asyncio.run(measure(server, name, kind, seed, share))
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(cell) + "\n")
    print(line(cell), file=sys.stderr, flush=True)
    return cell


# ── what comes of it ──


def mean(cells: list[Cell], name: str, kind: str, what: str = "goodput") -> float:
    found = [cell[what] for cell in cells if (cell["wait"], cell["kind"]) == (name, kind)]
    return sum(found) / len(found)


def best_fixed(cells: list[Cell], name: str) -> tuple[int, float]:
    caps = sorted({int(c["kind"]) for c in cells if c["wait"] == name and c["kind"].isdigit()})
    best = max(caps, key=lambda cap: mean(cells, name, str(cap)))
    return best, mean(cells, name, str(best))


HEAD = (
    f"{'wait':>6} {'':>12} {'seed':>4} {'tok/s':>7} {'tok/cpu-s':>9} {'cores':>6} {'starved':>7} {'hits':>5} {'active':>6} {'cap':>6} "
    f"{'preempt':>7} {'parked':>6} {'wasted':>7} {'ramp s':>6}"
)


def line(cell: Cell) -> str:
    return (
        f"{cell['wait']:>6} {cell['kind']:>12} {cell['seed']:>4} {cell['goodput']:>7.1f} {cell['per_cpu_s']:>9.1f} "
        f"{cell['cores']:>6.2f} {cell['starved']:>7.2f} {cell['hits']:>5.2f} {cell['active']:>6.1f} {cell['cap']:>6.1f} "
        f"{cell['preemptions']:>7.0f} {cell['parked']:>6.0f} {cell['wasted']:>7.2%} {cell['ramp_s']:>6.0f}"
    )


def rows_of(cells: list[Cell]) -> list[dict[str, Any]]:
    result = []
    for kind, target in (("predictive", 0.97), ("adaptive", None)):
        for name, wait in WAITS.items():
            cap, best = best_fixed(cells, name)
            value = mean(cells, name, kind) / best
            note = (
                f"vLLM on a CPU, tool wait {wait:g} s: {mean(cells, name, kind):.0f} of {best:.0f} tokens/s at a fixed "
                f"cap of {cap}; ramp {mean(cells, name, kind, 'ramp_s'):.0f} s, "
                f"{mean(cells, name, kind, 'wasted'):.2%} wasted"
            )
            ok = None if target is None else value >= target
            result.append(
                {"name": f"admission_{kind}_vs_best_{name}", "value": value, "unit": "of best"}
                | {"target": target, "ok": ok, "note": note}
            )
    for what, unit, most in (("ramp_s", "s", RAMP_S), ("wasted", "of tokens", WASTED)):
        for name, wait in WAITS.items():
            value = mean(cells, name, "predictive", what)
            row = {
                "name": f"admission_predictive_{what}_{name}",
                "value": value,
                "unit": unit,
                "target": most,
            }
            result.append(row | {"ok": value <= most, "note": f"of the cells at a tool wait of {wait:g} s"})
    return result


def table(cells: list[Cell]) -> str:
    """Every cell: the sweep of fixed caps, the controllers, and the baselines beside them."""
    return "\n".join([HEAD, *map(line, cells)])


def rows() -> list[dict[str, Any]]:
    if not VLLM.exists():
        print("vllm_admission: left out, there is no vLLM: make vllm-env", file=sys.stderr)
        return []
    print(HEAD, file=sys.stderr, flush=True)
    cells = run_all(list(WAITS), list(SEEDS), [], 1.0, None)
    print(table(cells), flush=True)
    return rows_of(cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_admission", description=__doc__)
    parser.add_argument("--waits", nargs="*", default=list(WAITS), choices=list(WAITS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--kinds", nargs="*", default=[], help="caps and controllers; all when none is named")
    parser.add_argument("--share", type=float, default=1.0, help="of the time of a cell")
    parser.add_argument("--out", type=Path, help="append each cell to this file, as JSON")
    args = parser.parse_args()
    print(HEAD, file=sys.stderr)
    cells = run_all(args.waits, args.seeds, args.kinds, args.share, args.out)
    print(table(cells))


if __name__ == "__main__":
    main()
