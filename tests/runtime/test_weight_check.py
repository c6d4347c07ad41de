"""The check after each load: what an engine samples against what the trainer computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.domain.load import EngineInfo
from paceline.errors import EngineError, TrainerError
from paceline.ports import GenerateReply, GenerateRequest
from paceline.runtime.weight_check import ProbeCheck
from paceline.transport.probes import read_probes

PROBES = [
    {"token_ids": [5, 6, 7], "next": [[42, -0.5], [7, -1.5]]},
    {"token_ids": [8, 9], "next": [[11, -0.2], [12, -3.0]]},
]


class Answers:
    """An engine that answers each prompt, by its length, with a token and a logprob."""

    info = EngineInfo(id="e0", kv_tokens=None, max_model_len=None)

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[int, tuple[int, float]] = {3: (42, -0.5), 2: (11, -0.2)}
        self.answers |= {int(key[1:]): value for key, value in answers.items()}
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.asked.append(request)
        token, logprob = self.answers[len(request.token_ids)]
        return GenerateReply(
            np.array([token], np.int32), np.array([logprob], np.float32), "length", ((1, 1),)
        )


@pytest.fixture
def published(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "probe.json").write_text(json.dumps({"probes": PROBES}))
    return str(tmp_path)


def check(tolerance: float = 0.15) -> ProbeCheck:
    return ProbeCheck(tolerance, read_probes)


async def after(engine: Answers, path: str, tolerance: float = 0.15) -> None:
    await check(tolerance).after(engine, 3, path)  # type: ignore[arg-type]


async def test_an_engine_that_agrees_within_rounding_is_believed(published: str) -> None:
    engine = Answers(n3=(42, -0.48), n2=(11, -0.25))
    await after(engine, published)
    assert {(r.sampling.temperature, r.sampling.max_tokens) for r in engine.asked} == {(0.0, 1)}


async def test_two_nearly_equal_tokens_may_change_places(published: str) -> None:
    await after(Answers(n3=(7, -1.4)), published)


async def test_other_logprobs_are_an_error_with_both_numbers(published: str) -> None:
    with pytest.raises(
        EngineError,
        match=r"engine e0 took v3 from .* token 42 has logprob -1.500 there and -0.500 in the trainer; mean gap 0.500",
    ):
        await after(Answers(n3=(42, -1.5)), published)


async def test_a_token_the_trainer_does_not_name_is_an_error_with_both_tokens(published: str) -> None:
    with pytest.raises(
        EngineError, match=r"most likely token is 99 at logprob -0.100, the trainer's 42 at -0.500"
    ):
        await after(Answers(n3=(99, -0.1)), published)


async def test_nothing_that_was_cached_before_can_answer_a_probe(published: str) -> None:
    engine, once = Answers(), check()
    for _ in range(2):
        await once.after(engine, 3, published)  # type: ignore[arg-type]
    assert len({request.cache_salt for request in engine.asked}) == 4


async def test_a_nan_is_a_disagreement(published: str) -> None:
    with pytest.raises(EngineError, match="nan"):
        await after(Answers(n3=(42, float("nan"))), published)


async def test_without_probes_or_with_tolerance_zero_the_engines_word_is_taken(
    published: str, tmp_path: Path
) -> None:
    await after(Answers(n3=(99, -9.0)), published, tolerance=0.0)
    (tmp_path / "probe.json").unlink()
    engine = Answers(n3=(99, -9.0))
    await after(engine, published)
    assert engine.asked == []


async def test_s65_weights_that_are_gone_are_refused_before_the_engine_hears_of_them(
    published: str, tmp_path: Path
) -> None:
    await check().before(published)
    with pytest.raises(EngineError, match=r"no weights at .*/gone: was the version removed"):
        await check().before(str(tmp_path / "gone"))


@pytest.mark.parametrize("text", ["", "{}", '{"probes": [{"token_ids": [], "next": [[1, -1]]}]}', "\xff"])
async def test_probes_that_cannot_be_read_name_their_file(published: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "probe.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TrainerError, match=r"probe.json"):
        await after(Answers(), published)
