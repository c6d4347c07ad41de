"""Where tokens come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.config.base import Section
from paceline.errors import without_password


class EmbeddedEngine(Section):
    """Paceline's own small engine, in a process of its own: laptops, tests, studies."""

    type: Literal["embedded"] = "embedded"
    """Which kind of engine."""
    replicas: int = Field(default=1, ge=1)
    """Engine processes."""
    kv_tokens: int = Field(default=32768, ge=64)
    """KV-cache capacity of each, in tokens; small enough and pressure is real."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of one KV block."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    max_batched_tokens: int = Field(default=512, ge=16)
    """Tokens of one step, decode and chunked prefill together."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context; none takes the model's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What it computes in."""
    start_s: float = Field(default=120.0, gt=0)
    """Seconds it may take to start."""
    probe_tolerance: float = Field(default=0.15, ge=0)
    """Mean difference, in nats, between its logprobs and the trainer's on a few prompts after each load of weights,
    above which it is not believed to hold them; 0 does not ask."""
    inflight: Literal["keep", "interrupt"] = "keep"
    """Requests in flight when new weights come: `keep` freezes them while the weights are loaded, then they go on;
    `interrupt` aborts them with the tokens they have, and they go on as new requests. No request then spans two
    versions, and its prompt is prefilled anew. Every token carries the version that sampled it either way."""
    load_s: float = Field(default=120.0, gt=0)
    """Seconds one update of weights may take, from the pause to the check; an engine that takes longer hangs, and is
    started again."""
    lost_s: float = Field(default=180.0, gt=0)
    """Seconds without any engine, or with none that takes a call, before the run ends; one that died is started again
    meanwhile."""


def _holds_no_secret(address: str) -> str:
    """An address ends up in configs, journals, logs and error messages: nothing secret may be in it."""
    if without_password(address) != address:
        raise ValueError(
            "an address may hold no user and no password: put the server's token into an environment variable and "
            "name that in api_key_env"
        )
    return address


class _Servers(Section):
    """What servers that run already have in common."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Base address of each server, without `/v1`."""
    api_key_env: str | None = None
    """Environment variable that holds the bearer token; the token itself never enters a config."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections kept to each server; at least the cap."""
    request_s: float = Field(default=600.0, gt=0)
    """Seconds one request may take."""
    start_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for the servers to answer."""
    probe_tolerance: float = Field(default=0.15, ge=0)
    """Mean difference, in nats, between its logprobs and the trainer's on a few prompts after each load of weights,
    above which it is not believed to hold them; 0 does not ask."""
    inflight: Literal["keep", "interrupt"] = "keep"
    """Requests in flight when new weights come: `keep` freezes them while the weights are loaded, then they go on;
    `interrupt` aborts them with the tokens they have, and they go on as new requests. No request then spans two
    versions, and its prompt is prefilled anew. Every token carries the version that sampled it either way."""
    load_s: float = Field(default=600.0, gt=0)
    """Seconds one update of weights may take, from the pause to the check; a server that takes longer is taken out until
    it answers again. As long as the largest model takes to be read from the slowest disk, and no longer."""
    lost_s: float = Field(default=600.0, gt=0)
    """Seconds without any server before the run ends; one that answers again meanwhile is used again. As long, at least half a
    minute, may servers refuse every call because they are busy (429)."""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_holds_no_secret, urls))


class VllmEngine(_Servers):
    """Running vLLM servers, reached over HTTP."""

    type: Literal["vllm"]
    """Which kind of engine."""
    router: str | None = None
    """Address of a router in front of `urls`: calls go through it, with the session in `X-Session-ID`; metrics, pauses and
    weights go to the servers themselves. Where their addresses are not known, name the router in `urls`, too: admission
    then goes by latency, and the router must pass pauses and weights on to every server."""

    @field_validator("router")
    @classmethod
    def _check_router(cls, router: str | None) -> str | None:
        return None if router is None else _holds_no_secret(router)


class SglangEngine(_Servers):
    """Running SGLang servers, reached over their native HTTP API. Not tried on a real one."""

    type: Literal["sglang"]
    """Which kind of engine."""


class ChatSection(Section):
    """An OpenAI-compatible chat endpoint, which algorithms ask for by its name: a judge, a teacher, a frozen policy."""

    url: str
    """Base address, with its `/v1`."""
    model: str
    """Which of its models."""
    api_key_env: str | None = None
    """Environment variable that holds the bearer token; the token itself never enters a config."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """Softmax temperature; none leaves it to the endpoint."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; none leaves it to the endpoint."""
    max_connections: int = Field(default=64, ge=1)
    """Calls at the same time."""
    request_s: float = Field(default=120.0, gt=0)
    """Seconds one call may take."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return _holds_no_secret(url)


EngineSection = Annotated[EmbeddedEngine | VllmEngine | SglangEngine, Field(discriminator="type")]
