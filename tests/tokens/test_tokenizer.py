"""A tokenizer, its template and its end tokens are read from a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import ConfigError
from paceline.testing.tokens import CHATML, byte_tokenizer
from paceline.tokens import ChatTokenizer, resolve_model_dir, user


def model_dir(root: Path, **files: Any) -> Path:
    byte_tokenizer()._tokenizer.save(str(root / "tokenizer.json"))
    for name, content in files.items():
        path = root / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def test_a_directory_gives_tokenizer_template_and_every_end_token(tmp_path: Path) -> None:
    root = model_dir(
        tmp_path,
        tokenizer_config__json={"eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML},
        generation_config__json={"eos_token_id": [3, 4]},
        config__json={"eos_token_id": 5},
    )
    tokenizer = ChatTokenizer.load(root)
    assert tokenizer.stop_ids == (3, 4, 5, tokenizer.id_of("<|im_end|>"))
    assert tokenizer.render([user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_file_wins_over_the_config_and_an_override_over_both(tmp_path: Path) -> None:
    root = model_dir(
        tmp_path,
        tokenizer_config__json={"eos_token": "<|im_end|>", "chat_template": "from config"},
        chat_template__jinja="from file",
        mine__jinja="from override {{ eos_token }}",
    )
    assert ChatTokenizer.load(root).render([]) == "from file"
    assert ChatTokenizer.load(root, root / "mine.jinja").render([]) == "from override <|im_end|>"


def test_the_default_of_several_named_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    root = model_dir(tmp_path, tokenizer_config__json={"eos_token": "<|im_end|>", "chat_template": named})
    assert ChatTokenizer.load(root).render([]) == "d"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "has no chat template"),
        ({"chat_template__jinja": "{% if %}"}, "names no end token"),
        (
            {"chat_template__jinja": "{% if %}", "config__json": {"eos_token_id": 1}},
            "is not valid Jinja",
        ),
        ({"config__json": "{"}, "config.json is not valid JSON|no chat template"),
    ],
)
def test_what_a_directory_lacks_is_named(tmp_path: Path, files: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ChatTokenizer.load(model_dir(tmp_path, **files))


def test_a_directory_without_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        ChatTokenizer.load(tmp_path)


def test_tools_are_printed_without_html_escapes_and_with_unicode() -> None:
    tokenizer = byte_tokenizer("{{ tools | tojson }}{% generation %}x{% endgeneration %}")
    assert tokenizer.render([], [{"name": "<ü&>"}]) == '[{"name": "<ü&>"}]x'


def test_the_fingerprint_changes_with_the_template_and_the_vocabulary() -> None:
    same = byte_tokenizer().fingerprint
    assert byte_tokenizer().fingerprint == same
    assert byte_tokenizer(CHATML + " ").fingerprint != same
    assert byte_tokenizer(merges=[("a", "b")]).fingerprint != same


def test_a_model_name_is_a_directory_or_lies_in_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model_dir(tmp_path.name) == tmp_path  # whole: whoever is told of it may stand elsewhere
    assert paceline.model_dir(tmp_path.name) == tmp_path
    assert resolve_model_dir("pkg:paceline/tokens").name == "tokens"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./nowhere", "no such directory"),
        ("a/b/c", "hub id of the form owner/model"),
        ("pkg:no_such_package/x", "'no_such_package' is not installed"),
        ("pkg:paceline/nowhere", "has no directory 'nowhere'"),
        (__file__, "is a file"),
    ],
)
def test_a_model_name_that_leads_nowhere_says_what_to_give(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve_model_dir(name)


def test_a_hub_id_without_the_hub_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        resolve_model_dir("owner/model")
