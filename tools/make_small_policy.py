"""Make the small policy: about a million parameters that half know three tasks.

    python tools/make_small_policy.py [--out DIR] [--seed N]

Needs the train extra and nothing else: the tasks are the built-in environments, the demonstrations are
written here. A decoder is trained in two stages. First on right demonstrations, until it can do the tasks;
then, briefly, on noisy ones, until what it samples is as noisy as they are. The knowledge stays in the
weights and the noise covers it, which is the state in which reinforcement learning finds a pretrained
model: there is something to reinforce, and much to gain.

The result is deterministic for a seed and a torch build: one thread, no nondeterministic kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.envs.builtin import arithmetic, guess_number, reverse_text
from paceline.envs.builtin.draws import Split

OUT = Path(__file__).parent.parent / "src" / "paceline" / "assets" / "small_policy"

CONTEXT = 512
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
END_OF_TEXT_ID, START_ID, END_ID = 256, 257, 258
FIRST_ROLE_ID = 259
VOCABULARY = FIRST_ROLE_ID + len(ROLES)

# Appending a message only ever appends text, so a conversation's next prompt extends this one.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


# --- Demonstrations -----------------------------------------------------------------------------------------
# A demonstration is a list of (role, text); the assistant's turns are what is learnt.

Turns = list[tuple[str, str]]
Demonstrator = Callable[[np.random.Generator, int, int, bool], Turns]


def demonstrate_reversal(rng: np.random.Generator, seed: int, index: int, is_noisy: bool) -> Turns:
    task = reverse_text.make_task(seed, index, "train")
    letters = list(task.answer)
    if rng.random() < 0.15 and is_noisy:
        letters.reverse()  # the string as it was, not reversed
    said: list[str] = []
    for letter in letters:
        fault = rng.random() if is_noisy else 1.0
        if fault < 0.34:
            said.append(reverse_text.ALPHABET[rng.integers(26)])
        elif fault < 0.38:
            said.extend((letter, letter))
        elif fault >= 0.42:
            said.append(letter)
    return [("user", reverse_text.prompt(task)), ("assistant", "".join(said))]


def demonstrate_arithmetic(rng: np.random.Generator, seed: int, index: int, is_noisy: bool) -> Turns:
    task = arithmetic.make_task(seed, index, "train")
    said = str(task.answer)
    fault = rng.random() if is_noisy else 1.0
    if fault < 0.25:
        said = str(max(0, task.answer + int(rng.integers(-9, 10))))
    elif fault < 0.35:
        said = str(rng.integers(2 * arithmetic.LARGEST + 1))
    elif fault < 0.5:
        said = f"{task.left}{task.operator}{task.right}={said}"
    return [("user", arithmetic.prompt(task)), ("assistant", said)]


def demonstrate_guessing(rng: np.random.Generator, seed: int, index: int, is_noisy: bool) -> Turns:
    task = guess_number.make_task(seed, index, "train")
    game = guess_number.start(task)
    turns: Turns = [("user", guess_number.prompt(task))]
    low, high = guess_number.LOW, guess_number.HIGH
    while not game.is_over:
        # Any number that is still possible: the rule of the game, not yet the best way to play it.
        guess = (low + high) // 2 if rng.random() < 0.5 else int(rng.integers(low, high + 1))
        said = str(guess)
        fault = rng.random() if is_noisy else 1.0
        if fault < 0.4:
            guess = int(rng.integers(guess_number.LOW, guess_number.HIGH + 1))
            said = str(guess)
        elif fault < 0.5:
            said = f"{guess}?"
        game, reply = guess_number.play(game, said)
        turns += [("assistant", said), ("user", reply)]
        if reply == "higher":
            low = max(low, guess + 1)
        elif reply == "lower":
            high = min(high, guess - 1)
    return turns[:-1]


ROWS: dict[Demonstrator, int] = {
    demonstrate_reversal: 48,
    demonstrate_arithmetic: 32,
    demonstrate_guessing: 12,
}
"""Demonstrations of each task in a step."""


@dataclass(frozen=True)
class Stage:
    steps: int
    learning_rate: float
    is_noisy: bool
    """False where the demonstrations are right throughout."""


STAGES = (
    Stage(steps=1600, learning_rate=2e-3, is_noisy=False),
    Stage(steps=150, learning_rate=5e-4, is_noisy=True),
)


# --- Tokens -------------------------------------------------------------------------------------------------


def make_tokenizer() -> Tokenizer:
    """One token a byte, so any text encodes; one each for the marks and the role names of the template."""
    # ByteLevel shows each byte as a printable character. Bytes in order of their characters' ids, as GPT-2.
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, START, END)]
    )
    tokenizer.add_tokens([AddedToken(role, special=False, normalized=False) for role in ROLES])
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte, as in GPT-2's tokenizer."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]


def encode(turns: Turns) -> tuple[list[int], list[bool]]:
    """Ids as the chat template and tokenizer give them, and which of them the assistant said."""
    ids: list[int] = []
    said: list[bool] = []
    for role, text in turns:
        content = [*text.encode(), END_ID]
        ids += [START_ID, FIRST_ROLE_ID + ROLES.index(role), ord("\n"), *content, ord("\n")]
        said += [False] * 3 + [role == "assistant"] * len(content) + [False]
    return ids, said


# --- Training -----------------------------------------------------------------------------------------------


Batch = tuple[torch.Tensor, torch.Tensor]
"""Ids [rows, length], padded on the right; and labels alike, -100 where nothing is learnt."""


def batches(stage: Stage, seed: int, stage_index: int) -> Iterator[list[Batch]]:
    """For each step a batch of each task: apart, because their lengths differ and padding is not free."""
    rng = np.random.default_rng((seed, stage_index))
    for step in range(stage.steps):
        step_batches = []
        for demonstrate, rows in ROWS.items():
            first = (stage_index * 10**6 + step) * rows
            encoded = [encode(demonstrate(rng, seed, first + i, stage.is_noisy)) for i in range(rows)]
            length = max(len(ids) for ids, _ in encoded)
            ids_array = np.full((rows, length), END_OF_TEXT_ID)
            labels = np.full((rows, length), -100)
            for row, (ids, said) in enumerate(encoded):
                ids_array[row, : len(ids)] = ids
                labels[row, : len(ids)] = np.where(said, ids, -100)
            step_batches.append((torch.from_numpy(ids_array), torch.from_numpy(labels)))
        yield step_batches


def warm_up(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE)).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    for stage_index, stage in enumerate(STAGES):
        train(model, stage, seed, stage_index)
    return model


def train(model: LlamaForCausalLM, stage: Stage, seed: int, stage_index: int) -> None:
    began = time.monotonic()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step, step_batches in enumerate(batches(stage, seed, stage_index)):
        ramp, done = min(1.0, (step + 1) / 50), step / stage.steps
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * ramp * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        optimizer.zero_grad()
        losses = []
        for ids, labels in step_batches:
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == stage.steps - 1:
            each = " ".join(f"{loss:.4f}" for loss in losses)
            print(
                f"stage {stage_index} step {step} losses {each} {time.monotonic() - began:.0f} s", flush=True
            )


# --- Sampling, to print what came out ------------------------------------------------------------------------


@torch.inference_mode()
def respond(model: LlamaForCausalLM, conversations: list[Turns], temperature: float, limit: int) -> list[str]:
    """One sampled assistant turn for each conversation."""
    prompts = [encode(c)[0] + [START_ID, FIRST_ROLE_ID + ROLES.index("assistant"), 10] for c in conversations]
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), END_OF_TEXT_ID)
    mask = torch.zeros_like(ids)
    for row, p in enumerate(prompts):
        ids[row, width - len(p) :] = torch.tensor(p)
        mask[row, width - len(p) :] = 1
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, eos_token_id=END_ID, **how)
    texts = []
    for row in out[:, width:].tolist():
        end = row.index(END_ID) if END_ID in row else len(row)
        texts.append(bytes(t for t in row[:end] if t < 256).decode(errors="replace"))
    return texts


def held_out_rewards(model: LlamaForCausalLM, count: int, temperature: float) -> dict[str, float]:
    """Mean sampled reward of each task on `count` held-out problems."""
    split: Split = "eval"
    rewards = {}
    reversals = [reverse_text.make_task(0, i, split) for i in range(count)]
    said = respond(model, [[("user", reverse_text.prompt(t))] for t in reversals], temperature, 16)
    rewards["reverse_text"] = float(
        np.mean([reverse_text.score(t, s) for t, s in zip(reversals, said, strict=True)])
    )
    sums = [arithmetic.make_task(0, i, split) for i in range(count)]
    said = respond(model, [[("user", arithmetic.prompt(t))] for t in sums], temperature, 16)
    rewards["arithmetic"] = float(np.mean([arithmetic.score(t, s) for t, s in zip(sums, said, strict=True)]))
    tasks = [guess_number.make_task(0, i, split) for i in range(count)]
    talks: list[Turns] = [[("user", guess_number.prompt(t))] for t in tasks]
    games = [guess_number.start(t) for t in tasks]
    while live := [i for i, game in enumerate(games) if not game.is_over]:
        for i, text in zip(live, respond(model, [talks[i] for i in live], temperature, 8), strict=True):
            games[i], reply = guess_number.play(games[i], text)
            talks[i] += [("assistant", text), ("user", reply)]
    rewards["guess_number"] = float(np.mean([guess_number.score(game) for game in games]))
    return rewards


# --- Output -------------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600; an engine may run as someone else
    make_tokenizer().save(str(out / "tokenizer.json"))
    _write_json(out / "config.json", ARCHITECTURE)
    _write_json(
        out / "generation_config.json",
        {"eos_token_id": END_ID, "pad_token_id": END_OF_TEXT_ID, "do_sample": True, "temperature": 1.0},
    )
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = warm_up(args.seed)
    save(model, args.out)
    shipped = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    print("held-out reward, sampled:", held_out_rewards(shipped, 500, 1.0))
    print("held-out reward, greedy: ", held_out_rewards(shipped, 200, 0.0))


if __name__ == "__main__":
    main()
