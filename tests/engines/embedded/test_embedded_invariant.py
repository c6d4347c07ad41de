"""With `batch_invariant`, what a sequence samples is the same to the last bit, whatever shares its steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch
from embedded_kit import KINDS, Driver, prompt_of, worst_error

from paceline.engines.embedded.options import EngineOptions
from paceline.engines.embedded.scheduler import Request
from paceline.errors import ConfigError
from paceline.tokens.tokenizer import resolve_model_dir

pytestmark = pytest.mark.torch
ModelMaker = Callable[..., Path]
POLICY = "pkg:paceline/assets/small_policy"


def asked(number: int) -> tuple[list[int], dict[str, object]]:
    """The n-th of some sequences of all kinds: short and long prompts, some with a prefix in common."""
    chance = random.Random(number)
    prompt = prompt_of(chance.choice((1, 2, 15, 16, 17, 40, 64, 90)), number % 5)
    if number % 3 == 0:
        prompt = prompt_of(48, 99) + prompt
    temperature = (1.0, 0.7, 1.3, 0.0)[number % 4]
    cut = {"top_p": 0.9} if number % 7 == 3 else {"top_k": 20} if number % 7 == 5 else {}
    return prompt, {"temperature": temperature, "max_tokens": chance.randint(4, 24), "seed": number, **cut}


def told(request: Request) -> tuple[list[int], list[str]]:
    return request.output, [float.hex(value) for value in request.logprobs]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_logprobs_are_the_same_to_the_last_bit_whatever_shares_the_step(
    model_of: ModelMaker, kind: str
) -> None:
    same_whatever_shares_the_step(model_of(kind), 8)


def test_so_are_those_of_the_policy_that_comes_with_it() -> None:
    same_whatever_shares_the_step(resolve_model_dir(POLICY), 8)


def same_whatever_shares_the_step(model: Path, sequences: int) -> None:
    alone: dict[int, tuple[list[int], list[str]]] = {}
    for number in range(sequences):
        prompt, params = asked(number)
        alone[number] = told(Driver(model, batch_invariant=True).ask("a", prompt, **params))
    preemptions = 0
    for seed, (kv_tokens, step_tokens) in enumerate(((272, 512), (4096, 16), (512, 37))):
        chance = random.Random(seed)
        # Little room, so that sequences are preempted; small steps, so that prompts come in chunks.
        driver = Driver(
            model,
            batch_invariant=True,
            kv_tokens=kv_tokens,
            max_model_len=200,
            max_batched_tokens=step_tokens,
        )
        for number in chance.sample(range(sequences), sequences):
            prompt, params = asked(number)
            driver.add(str(number), prompt, **params)
            driver.run(steps=chance.randint(0, 4))
        driver.run()
        assert {n: told(driver.done[str(n)]) for n in range(sequences)} == alone, f"seed {seed}"
        preemptions += driver.engine.scheduler.counters.preemptions
    assert preemptions


def test_a_sequence_that_is_cut_anywhere_goes_on_to_the_same_bits(model_of: ModelMaker) -> None:
    model = model_of()
    prompt, params = prompt_of(30), {"seed": 5, "temperature": 1.0}
    whole = told(Driver(model, batch_invariant=True).ask("a", prompt, **params, max_tokens=40))
    for cut in (1, 2, 17, 31, 39):
        driver = Driver(model, batch_invariant=True)
        first = driver.ask("b", prompt, **params, max_tokens=cut)
        rest = driver.ask("c", first.ids, **params, max_tokens=40 - cut)
        assert told(first)[0] + told(rest)[0] == whole[0]
        assert told(first)[1] + told(rest)[1] == whole[1]


def test_its_logprobs_are_those_of_a_plain_forward_pass(model_of: ModelMaker) -> None:
    for kind in KINDS:
        driver = Driver(model_of(kind), batch_invariant=True, max_batched_tokens=24)
        for number in range(8):
            driver.add(str(number), prompt_of((3, 40, 90)[number % 3], number), temperature=1.0)
        driver.run()
        assert max(worst_error(model_of(kind), request) for request in driver.done.values()) < 1e-4


def test_without_it_the_last_bits_depend_on_who_shares_the_step(model_of: ModelMaker) -> None:
    """Else the tests above would show nothing."""
    model = model_of()
    alone = [told(Driver(model).ask("a", prompt_of(40, number), seed=number)) for number in range(12)]
    driver = Driver(model)
    for number in range(12):
        driver.add(str(number), prompt_of(40, number), seed=number)
    driver.run()
    assert [told(driver.done[str(n)]) for n in range(12)] != alone


def test_it_is_kept_in_float32_only(model_of: ModelMaker) -> None:
    with pytest.raises(ConfigError, match="in float32 only"):
        EngineOptions(model=model_of(), batch_invariant=True, dtype="bfloat16")
    options = EngineOptions(model=model_of(), batch_invariant=True)
    parsed = EngineOptions.parser().parse_args(options.arguments())
    assert parsed.batch_invariant
    assert torch.get_num_threads() == 1
