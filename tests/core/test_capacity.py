"""The KV arithmetic."""

from __future__ import annotations

import pytest

from paceline.core.capacity import capacity, kv_shape, kv_shape_of, weight_bytes_of
from paceline.errors import ConfigError

QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


def test_an_8b_model_on_80_gb_holds_380_000_tokens_or_47_rollouts_of_8_000() -> None:
    found = capacity(kv_shape(36, 8, 128), memory_gb=80, weights_gb=16, utilization=0.9)
    assert found.bytes_per_token == 147_456
    assert found.kv_bytes == pytest.approx(56e9)
    assert 379_000 < found.kv_tokens < 381_000
    assert int(found.rollouts(8_000)) == 47
    assert round(found.rollouts(32_000), 1) == 11.9


def test_config_json_gives_the_same_shape_and_about_the_weights() -> None:
    assert kv_shape_of(QWEN3_8B).bytes_per_token == 147_456
    assert weight_bytes_of(QWEN3_8B) / 1e9 == pytest.approx(16.4, rel=0.02)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_key_value_heads": None}, 36 * 2 * 32 * 128 * 2),
        ({"head_dim": None}, 147_456),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 27}, 31_104),
        ({"layer_types": ["full_attention", "linear_attention"] * 18}, 147_456 // 2),
        ({"torch_dtype": "float32"}, 2 * 147_456),
    ],
    ids=["no grouped heads", "head size from the width", "latent attention", "hybrid", "float32"],
)
def test_what_a_token_takes_follows_the_architecture(change: dict[str, object], expected: int) -> None:
    assert kv_shape_of(QWEN3_8B | change).bytes_per_token == expected


def test_an_8_bit_cache_holds_twice_as_much() -> None:
    assert kv_shape_of(QWEN3_8B, "fp8").bytes_per_token == 147_456 // 2


def test_several_gpus_share_one_copy_of_the_weights() -> None:
    one = capacity(kv_shape(36, 8, 128), memory_gb=80, weights_gb=16)
    two = capacity(kv_shape(36, 8, 128), memory_gb=80, weights_gb=16, gpus=2)
    assert two.kv_bytes == pytest.approx(2 * one.kv_bytes + 16e9)


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"141\.0 GB.*72\.0 GB.*more GPUs"):
        capacity(kv_shape(80, 8, 128), memory_gb=80, weights_gb=141)


def test_a_config_without_layers_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        kv_shape_of({"hidden_size": 8})
