"""A tokenizer made in memory: every byte is a token, every markup a special one. Nothing is loaded or trained."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.tokens.tokenizer import ChatTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The plainest append-only chat template."""

MARKUP = ("<|im_start|>", "<|im_end|>")


def byte_tokenizer(
    template: str = CHATML,
    *,
    markup: Sequence[str] = MARKUP,
    end: str = "<|im_end|>",
    merges: Sequence[tuple[str, str]] = (),
) -> ChatTokenizer:
    """A byte-level tokenizer: ids of the 256 bytes first, then of `merges`, then of `markup`.

    A merge joins two tokens into one, earlier ones first: `("a", "l")` makes "al" one token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markup])
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise ValueError(f"end {end!r} is not among the markup {tuple(markup)}")
    return ChatTokenizer(tokenizer, template, stop_ids=(end_id,), name="byte tokenizer")
