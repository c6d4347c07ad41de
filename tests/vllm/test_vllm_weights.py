"""Whether weights that a real vLLM took are the weights it serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vllm_kit import (
    LIMITS,
    PROMPT,
    Reference,
    Server,
    assert_same,
    differs,
    engine_on,
    generating,
    request,
    versions_of,
)

from paceline.engines.http import Link, Retry
from paceline.errors import EngineError
from paceline.runtime.weight_check import ProbeCheck
from paceline.transport.probes import read_probes

TOLERANCE = 0.15  # the default of engine.probe_tolerance


@pytest.fixture(scope="session")
def probed(weights: list[Path]) -> list[Path]:
    """The weights, with the probes that the reference trainer publishes beside its own."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from paceline.trainer.probe import write_probe

    prompts = [PROMPT[: 20 + 7 * i].tolist() for i in range(8)]
    for directory in weights[1:]:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        write_probe(model, prompts, directory)
    return weights


async def mend(server: Server, on: bool) -> None:
    link = Link(server.url, "e0", LIMITS, Retry())
    try:
        await link.demand("POST", "/collective_rpc", {"method": "mend_reload", "args": [on]})
    finally:
        await link.close()


async def test_a_load_that_worked_passes_the_check(server: Server, probed: list[Path]) -> None:
    async with engine_on(server, check=ProbeCheck(TOLERANCE, read_probes)) as engine:
        for version in (1, 2):
            await engine.update_weights(version, str(probed[version]))
            assert engine.version == version


async def test_the_check_is_far_from_both_sides_of_its_tolerance(server: Server, probed: list[Path]) -> None:
    async with engine_on(server) as engine:
        await engine.update_weights(1, str(probed[1]))
        await ProbeCheck(TOLERANCE / 5, read_probes).after(engine, 1, str(probed[1]))
        with pytest.raises(EngineError):
            await ProbeCheck(TOLERANCE * 3, read_probes).after(engine, 1, str(probed[2]))


@pytest.mark.usefixtures("endless")
async def test_tied_embeddings_that_vllm_reloads_in_part_are_caught_and_train_no_token_of_a_call_in_flight(
    server: Server, probed: list[Path], references: list[Reference]
) -> None:
    async with engine_on(server, check=ProbeCheck(TOLERANCE, read_probes)) as engine:
        await engine.update_weights(0, str(probed[0]))
        running = asyncio.ensure_future(engine.generate(request(400, salt="v0")))
        await generating(engine)
        await mend(server, False)
        try:
            with pytest.raises(
                EngineError, match=r"engine e0 took v1 from .* and does not serve it: .* trainer"
            ):
                await engine.update_weights(1, str(probed[1]))
            assert engine.version == 0
            before = await running
            assert (before.finish, versions_of(before)) == ("abort", [0])
            assert 0 < len(before.token_ids) < 400
            assert_same(before.logprobs, references[0].logprobs(PROMPT, before.token_ids))
            # Its output has changed, its label is the new one, and it is neither the old policy nor the new.
            reply = await engine.generate(request(16, temperature=0.0, salt="mixture"))
            assert versions_of(reply) == [1]
            for reference in references:
                assert differs(reply.logprobs, reference.logprobs(PROMPT, reply.token_ids))
        finally:
            await mend(server, True)
        await engine.update_weights(1, str(probed[1]))
        reply = await engine.generate(request(16, temperature=0.0, salt="mended"))
        assert_same(reply.logprobs, references[1].logprobs(PROMPT, reply.token_ids))


async def test_weights_that_are_gone_never_reach_the_server(
    server: Server, weights: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    """vLLM 0.32 that is told to load a directory that is not there dies at its next request."""
    async with engine_on(server, check=ProbeCheck(TOLERANCE, read_probes)) as engine:
        await engine.update_weights(0, str(weights[0]))
        with pytest.raises(EngineError, match=r"no weights at .*v7: was the version removed"):
            await engine.update_weights(7, str(tmp_path / "v7"))
        reply = await engine.generate(request(8, salt="after"))
        assert versions_of(reply) == [0]
        assert_same(reply.logprobs, references[0].logprobs(PROMPT, reply.token_ids))
