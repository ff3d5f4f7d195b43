"""Prometheus metrics of one server. A leaf: imports nothing of ours.

Each server has a registry of its own, so that several can live in one process (tests do).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_GAUGES = {
    "running": "Choices that have a slot in the engine's steps now.",
    "waiting": "Choices in the engine's queue now, preempted ones among them.",
    "pages_total": "KV pages that requests can use.",
    "pages_free": "KV pages that hold nothing now.",
    "pages_cached": "KV pages that only the prefix cache holds now; they can be evicted.",
    "pages_held": "KV pages that running requests hold now.",
}
_COUNTERS = {
    "steps_decode": "Steps in which each request got one token.",
    "steps_extend": "Steps with chunks of prompts in them.",
    "eager_steps": "Steps that ran without a recorded or compiled graph.",
    "recompiles": "Frames that Dynamo compiled after the start.",
    "preemptions": "Times that a running request lost its KV pages to another.",
    "prompt_tokens": "Prompt tokens of choices that got a slot, cached ones among them.",
    "cached_prompt_tokens": "Prompt tokens that were found in the prefix cache.",
    "generated_tokens": "Tokens that the engine drew.",
}


class _EngineCollector(Collector):
    """The engine's own numbers, as it last reported them."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterable[Metric]:
        for family, texts in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text in texts.items():
                if name in self.stats:
                    yield family(f"fullgraph_engine_{name}", text, self.stats[name])


class Metrics:
    """Everything that /metrics shows. Times are in seconds, lengths in tokens."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._engine = _EngineCollector()
        registry.register(self._engine)
        counter = functools.partial(Counter, registry=registry)
        seconds = functools.partial(Histogram, registry=registry, buckets=_SECONDS)
        self._http = counter(
            "fullgraph_http_requests", "HTTP requests answered.", ["endpoint", "status"]
        )
        self._finished = counter("fullgraph_choices", "Choices ended, by reason.", ["reason"])
        self._prompt_tokens = counter("fullgraph_prompt_tokens", "Prompt tokens accepted.")
        self._generated_tokens = counter("fullgraph_generated_tokens", "Tokens given to clients.")
        self._first_token = seconds(
            "fullgraph_time_to_first_token_seconds",
            "Seconds from a request's arrival to a choice's first token.",
        )
        self._per_token = seconds(
            "fullgraph_time_per_output_token_seconds",
            "Mean seconds between a choice's tokens, once per choice.",
            buckets=_TOKEN_SECONDS,
        )
        self._whole = seconds(
            "fullgraph_request_seconds", "Seconds from a request's arrival to a choice's end."
        )
        self._open = Gauge("fullgraph_open_requests", "Choices in flight.", registry=registry)

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request got its status."""
        self._http.labels(endpoint, str(status)).inc()

    def accepted(self, num_prompt_tokens: int) -> None:
        """A request went to the engine."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """A choice got its first token."""
        self._first_token.observe(seconds)

    def finished(
        self, reason: str, num_tokens: int, seconds: float, since_first_s: float | None
    ) -> None:
        """A choice ended ("stop", "length", "abort" or "error"), with what it gave the client."""
        self._finished.labels(reason).inc()
        self._generated_tokens.inc(num_tokens)
        self._whole.observe(seconds)
        if since_first_s is not None and num_tokens > 1:
            self._per_token.observe(since_first_s / (num_tokens - 1))

    def render(self, num_open: int, stats: Mapping[str, Any]) -> bytes:
        """The text of /metrics.

        Args:
            num_open: choices in flight.
            stats: the engine's numbers by name; empty where it did not answer.
        """
        self._open.set(num_open)
        self._engine.stats = stats
        return generate_latest(self._registry)
