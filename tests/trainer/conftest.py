from __future__ import annotations

from pathlib import Path

import pytest

from .packed import VOCABULARY


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand parameters, and files such as a tokenizer brings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(out)
    (out / "tokenizer.json").write_text("{}")
    (out / "chat_template.jinja").write_text("{{ messages }}")
    return out
