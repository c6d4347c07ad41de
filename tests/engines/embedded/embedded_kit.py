"""Tiny random models, and what plain transformers says about a sequence."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from paceline.engines.embedded.engine import Engine
from paceline.engines.embedded.options import EngineOptions
from paceline.engines.embedded.sampling import SamplingParams
from paceline.engines.embedded.scheduler import Request

PAD, EOS, VOCAB = 0, 1, 258
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}


def make_model(
    directory: Path, kind: str = "qwen3", *, tied: bool = True, seed: int = 0, **settings: Any
) -> Path:
    """Random in every parameter, biases and norms too, and peaked enough that an error shows."""
    config, own = KINDS[kind]
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    if kind == "qwen2":
        shape["head_dim"] = 12  # qwen2 has no such option: hidden size over heads
    model = AutoModelForCausalLM.from_config(config(**{**shape, **own, **settings}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)
    alphabet = {char: id + 2 for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": PAD, "<eos>": EOS, **alphabet}, merges=[]))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@functools.cache
def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def plain_logprobs(
    directory: Path, ids: Sequence[int], prompt_tokens: int, temperature: float = 1.0
) -> torch.Tensor:
    """Of the tokens after the prompt, by one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = plain(directory)(torch.tensor([list(ids)])).logits[0, prompt_tokens - 1 : -1].double()
    chosen = torch.tensor(list(ids[prompt_tokens:])).unsqueeze(1)
    return (logits / (temperature or 1.0)).log_softmax(-1).gather(1, chosen).squeeze(1)


def worst_error(directory: Path, request: Request) -> float:
    expected = plain_logprobs(directory, request.ids, request.prompt_tokens, request.params.temperature)
    return float((torch.tensor(request.logprobs, dtype=torch.float64) - expected).abs().max())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
    return drawn


class Driver:
    """An engine stepped by hand, with what has finished."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.engine = Engine(EngineOptions(model=model, **settings))
        self.done: dict[str, Request] = {}

    def add(self, id: str, prompt: Sequence[int], salt: str | None = None, **params: Any) -> Request:
        defaults = {"max_tokens": 24, "ignore_eos": True, "seed": 7}
        sampling = SamplingParams(**{**defaults, **params})
        request = self.engine.request(id, prompt, sampling, self._finished, salt)
        self.engine.add(request)
        return request

    def _finished(self, request: Request) -> None:
        assert request.id not in self.done
        self.done[request.id] = request

    def run(self, steps: int | None = None) -> None:
        while self.engine.has_work and steps != 0:
            self.engine.step()
            steps = None if steps is None else steps - 1

    def ask(self, id: str, prompt: Sequence[int], salt: str | None = None, **params: Any) -> Request:
        request = self.add(id, prompt, salt, **params)
        self.run()
        return request


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
