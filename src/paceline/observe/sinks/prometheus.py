"""A scrape endpoint for Prometheus, with a registry of its own.

Names: `paceline_train_<metric>{env}`, `paceline_eval_<metric>{env}`, `paceline_engine_<metric>{engine}`, else
`paceline_<path>`. On loopback it is open; beyond it, every request must carry `Authorization: Bearer <token>`.
"""

from __future__ import annotations

import hmac
import math
import re
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import make_wsgi_app

from paceline.errors import ConfigError
from paceline.observe.metrics import metric_of
from paceline.observe.rows import Row
from paceline.observe.sinks import TOKEN_VARIABLE, is_loopback

_LABELLED = {"train": "env", "eval": "env", "engine": "engine"}


class PrometheusSink:
    """Serves the newest value of every metric. `url` says where.

    ConfigError when `host` is not loopback and there is no token, or the port is taken.
    """

    name = "prometheus"

    def __init__(self, host: str, port: int, *, token: str | None = None) -> None:
        if not is_loopback(host) and not token:
            raise ConfigError(
                f"metrics.prometheus.host {host!r} is reachable from other machines, but there is no token: set "
                f"{TOKEN_VARIABLE}, or listen on 127.0.0.1"
            )
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        app = make_wsgi_app(self._registry)
        try:
            kind = _Server6 if ":" in host else _Server
            self._server = make_server(host, port, _guard(app, token), kind, _Quiet)
        except OSError as error:
            raise ConfigError(
                f"metrics.prometheus cannot listen on {host}:{port}: {error}; choose another port, or 0"
            ) from error
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="paceline-prometheus", daemon=True).start()

    def write(self, row: Row) -> None:
        if row.kind == "step":
            self._set("step", row.step)
        for path, value in row.values.items():
            if math.isfinite(value):
                self._set(path, value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, path: str, value: float) -> None:
        name, labels = series_of(path)
        gauge = self._gauges.get(name)
        if gauge is None:
            metric = metric_of(path)
            text = metric.help if metric else path
            gauge = Gauge(name, text, list(labels), registry=self._registry)
            self._gauges[name] = gauge
        (gauge.labels(**labels) if labels else gauge).set(value)


def series_of(path: str) -> tuple[str, dict[str, str]]:
    """The Prometheus name and labels of a metric."""
    head, _, rest = path.partition("/")
    labels = {}
    if head in _LABELLED and rest:
        # An environment's name may hold slashes: the documented pattern says where it ends.
        scope, rest = _scope_and_rest(path, head)
        labels[_LABELLED[head]] = scope
        path = f"{head}/{rest}"
    return "paceline_" + re.sub(r"[^a-zA-Z0-9]+", "_", path).strip("_"), labels


def _scope_and_rest(path: str, head: str) -> tuple[str, str]:
    metric = metric_of(path)
    parts = path.split("/")
    tail = len(metric.name.split("/")) - 2 if metric else len(parts) - 2
    cut = len(parts) - tail
    return "/".join(parts[1:cut]), "/".join(parts[cut:])


Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _guard(app: Any, token: str | None) -> Wsgi:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
            return []
        body: Iterable[bytes] = app(environ, start_response)
        return body

    return guarded


class _Server(WSGIServer):
    def server_bind(self) -> None:
        # The standard one asks DNS for the machine's name, which may take seconds where there is none.
        # Else the port is taken for a minute after a run that was scraped, by connections that have ended.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = 10  # a client that says nothing must not hold the only thread

    def log_message(self, format: str, *args: Any) -> None:
        pass
