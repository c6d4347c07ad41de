"""Serve a small model with vLLM on a CPU, set up as Paceline needs it. Run with the Python of tools/vllm_env.sh.

    .venv-vllm/bin/python tools/vllm_serve.py MODEL [--port 8000] [--name policy] [--kv-cache 16M] [any vllm option]

What each setting is for:

  VLLM_SERVER_DEV_MODE        pause, abort, and weights from a directory: without it no training
  --logprobs-mode             logprobs of the distribution sampled from; vLLM's own are those at temperature 1
  --enable-scale-out          the route that says which version sampled each token; without it the plain one is used
  --enable-prompt-tokens-details   how much of a prompt came from the prefix cache
  --no-enable-chunked-prefill      a request with a seed whose prompt is prefilled in parts kills vLLM 0.32 on CPUs, whose
                                   random generators have no offset to set back; on GPUs it does not
  one thread, one process     on two shared cores this is three times faster than vLLM's own choice for CPUs
  --worker-extension-cls      mends the reload of tied embeddings on CPUs (vllm_cpu_worker.py); GPUs need nothing of it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def command(argv: list[str]) -> list[str]:
    """The whole `vllm serve` command for what was asked. Options that vLLM knows are handed on."""
    ours = {"--port": "8000", "--name": "policy", "--kv-cache": "16M"}
    switches = {"--raw-logprobs", "--completions-only"}
    given, rest, asked = argv[:1], argv[1:], set()
    if not given or given[0].startswith("-"):
        raise SystemExit(__doc__)
    theirs: list[str] = []
    while rest:
        word = rest.pop(0)
        if word in ours:
            ours[word] = rest.pop(0)
        elif word in switches:
            asked.add(word)
        else:
            theirs.append(word)
    line = [
        *("serve", given[0], "--served-model-name", ours["--name"]),
        *("--host", "127.0.0.1", "--port", ours["--port"]),
        *("--dtype", "bfloat16", "--enforce-eager", "--distributed-executor-backend", "uni"),
        *("--max-num-seqs", "64", "--block-size", "32", "--kv-cache-memory-bytes", ours["--kv-cache"]),
        *("--enable-prompt-tokens-details", "--no-enable-chunked-prefill"),
    ]
    if "--raw-logprobs" not in asked:
        line += ["--logprobs-mode", "processed_logprobs"]
    if "--completions-only" not in asked:
        line += ["--enable-scale-out"]
    return [*line, "--worker-extension-cls", "vllm_cpu_worker.Mended", *theirs]


def main() -> None:
    here = Path(__file__).resolve().parent
    vllm = Path(sys.executable).parent / "vllm"
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, str(vllm), *command(sys.argv[1:])], environment)


if __name__ == "__main__":
    main()
