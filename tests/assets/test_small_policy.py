"""The policy that ships with Paceline: standard files, any text, and a template that only appends."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import paceline

POLICY = Path(paceline.__file__).parent / "assets" / "small_policy"
TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, ROLES, st.text(max_size=20))
)


def read(name: str) -> dict:
    return json.loads((POLICY / name).read_text(encoding="utf-8"))


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(read("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def refuse(message: str) -> None:
    raise ValueError(message)


@given(st.text())
def test_any_text_goes_through_the_tokenizer_unharmed(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_ids_are_bytes_then_marks_then_roles() -> None:
    assert TOKENIZER.encode("aé\n").ids == list("aé\n".encode())
    assert TOKENIZER.encode("<|im_start|>assistant\n<|im_end|>").ids == [257, 261, 10, 258]
    assert TOKENIZER.get_vocab_size() == read("config.json")["vocab_size"]
    assert TOKENIZER.token_to_id("<|im_end|>") == read("generation_config.json")["eos_token_id"]


@given(MESSAGES, MESSAGES)
def test_a_longer_conversation_extends_a_shorter_one(head: list, tail: list) -> None:
    assert render(head + tail).startswith(render(head))
    assert render(head, add_generation_prompt=True) == render(head) + "<|im_start|>assistant\n"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown role: judge"):
        render([{"role": "judge", "content": "x"}])


def test_it_is_about_two_megabytes() -> None:
    assert 1.9e6 < (POLICY / "model.safetensors").stat().st_size < 2.2e6


@pytest.mark.torch
def test_transformers_loads_it_as_any_other_model() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY)
    assert model.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    messages = [{"role": "user", "content": "Reverse: abcdef"}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    ids = list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)
    assert ids == TOKENIZER.encode(render(messages, add_generation_prompt=True)).ids
    said = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=258)
    assert said[0, -1] == 258
