"""Whether an engine's server is there, and can do what a run asks of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.cli.checks.model import fits
from paceline.config import SglangEngine, VllmEngine
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.doctor import Check, Finding

if TYPE_CHECKING:
    from paceline.config import RunConfig
    from paceline.config.load import Loaded
    from paceline.engines.http import ServerFacts

PROBE_S = 3.0
"""Seconds that a server may take to be up, and for each answer."""


def server_check(
    loaded: Loaded[RunConfig], section: VllmEngine | SglangEngine, url: str, probe_s: float
) -> Check:
    async def check() -> list[Finding]:
        from paceline.engines import sglang
        from paceline.engines.http import Limits, Link, Retry, probe

        key = os.environ.get(section.api_key_env) if section.api_key_env else None
        if section.api_key_env and not key:
            raise ConfigError(
                f"engine.api_key_env names {section.api_key_env}, which is not set: set it to the server's key"
            )
        limits = Limits(admin_s=probe_s, metrics_s=probe_s, connect_s=probe_s)
        link = Link(url, f"engine {url}", limits, Retry(attempts=1), key)
        try:
            look = sglang.probe if isinstance(section, SglangEngine) else probe
            facts = await look(link, loaded.value.model.served_name, start_s=PROBE_S)
        except PacelineError as error:
            return [
                Finding(
                    "error", f"engine {url} cannot be used", str(error), "start it, or correct engine.urls"
                )
            ]
        finally:
            await link.close()
        return _server_findings(loaded, url, facts)

    return check


def _server_findings(loaded: Loaded[RunConfig], url: str, facts: ServerFacts) -> list[Finding]:
    config = loaded.value
    found = [
        Finding("error", f"engine {url} cannot be used", problem.text, problem.remedy)
        for problem in facts.problems
    ]
    scaled = [env for env in config.env if env.sampling.over(config.sampling).temperature != 1.0]
    if facts.processed_logprobs is False and scaled:
        temperatures = ", ".join(
            f"{env.label!r} samples at temperature {env.sampling.over(config.sampling).temperature:g}"
            for env in scaled
        )
        found.append(
            Finding(
                "error",
                f"engine {url} returns logprobs of the raw distribution, not of the one sampled from",
                f"env {temperatures}; the server's logprobs do not move with it",
                f"{facts.remedies.processed}, or sample at temperature 1",
            )
        )
    if facts.processed_logprobs is None and scaled and not facts.problems:
        found.append(
            Finding(
                "warning",
                f"engine {url}: whether its logprobs follow the temperature could not be told",
                remedy=f"make sure of it: {facts.remedies.processed}",
            )
        )
    if not facts.can_pause and not facts.problems:  # one that is paused can be
        found.append(
            Finding(
                "error",
                f"engine {url} cannot be paused, so it cannot take new weights",
                "it does not have the routes",
                facts.remedies.pause,
            )
        )
    if not facts.has_metrics:
        found.append(
            Finding(
                "warning",
                f"engine {url} has no /metrics",
                "admission cannot see how full it is",
                facts.remedies.metrics,
            )
        )
    if loaded.value.engine.type == "vllm" and loaded.value.engine.router == url:
        found.append(
            Finding(
                "warning",
                f"engine {url} is a router whose servers are not known",
                "admission goes by latency alone, and pauses and weights must be passed on to every server",
                "name the servers in engine.urls",
            )
        )
    if facts.max_model_len:
        found += [
            finding
            for finding in fits(loaded, facts.max_model_len, f"{url}'s max_model_len {facts.max_model_len}")
            if finding.level != "ok"
        ]
    if found:
        return found
    context, kv = facts.max_model_len or "unknown", facts.kv_tokens or "unknown"
    return [Finding("ok", f"engine {url}", f"{facts.route}, context {context}, KV cache {kv} tokens")]
