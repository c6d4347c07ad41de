"""The Engine port over vLLM's HTTP routes; speaks to vLLM servers and to the embedded engine alike."""

from __future__ import annotations

from paceline.engines.http.client import HttpEngine, connect
from paceline.engines.http.dialect import Dialect
from paceline.engines.http.link import Limits, Link
from paceline.engines.http.probe import Problem, ServerFacts, probe
from paceline.engines.http.retry import Retry
from paceline.engines.http.router import RouterEngine, connect_router

__all__ = [
    "Dialect",
    "HttpEngine",
    "Limits",
    "Link",
    "Problem",
    "Retry",
    "RouterEngine",
    "ServerFacts",
    "connect",
    "connect_router",
    "probe",
]
