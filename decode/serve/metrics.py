"""The figures of a running server, in the text format of Prometheus, at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STEP_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)  # the upper ends of the histogram's buckets


class Metrics:
    """Counters and gauges of one server. Their names begin with `medusa_`."""

    def __init__(
        self,
        running: Callable[[], float],
        waiting: Callable[[], float],
        drafted: Callable[[], Iterable[tuple[int, int]]],
    ) -> None:
        """Make counters at zero; `running` and `waiting` return the number of such texts whenever they are asked.

        `drafted` returns the sizes of drafts among which the server chooses, each with its number of steps."""
        kept = self.registry = CollectorRegistry()
        self.requests = Counter("medusa_requests", "answered HTTP requests", ["path", "status"], registry=kept)
        self.prompt_tokens = Counter("medusa_prompt_tokens", "tokens of all prompts", registry=kept)
        self.new_tokens = Counter("medusa_new_tokens", "tokens written to all texts", registry=kept)
        self.steps = Counter("medusa_steps", "decoding steps, each for all running texts", registry=kept)
        self.step_tokens = Histogram(
            "medusa_step_tokens",
            "tokens of one step in one text, before any cut: the root and the accepted guesses; their mean is tau",
            buckets=STEP_TOKENS,
            registry=kept,
        )
        Gauge("medusa_running_texts", "texts that are being decoded", registry=kept).set_function(running)
        Gauge("medusa_waiting_texts", "texts that wait to be decoded", registry=kept).set_function(waiting)
        kept.register(DraftSteps(drafted))

    def add_step(self, written: Iterable[int], lengths: Iterable[int]) -> None:
        """Count one decoding step, with the tokens `written` to each text and the `lengths` of its steps, uncut."""
        self.steps.inc()
        self.new_tokens.inc(sum(written))
        for length in lengths:
            self.step_tokens.observe(length)

    def response(self) -> Response:
        """All figures, as Prometheus reads them."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class DraftSteps(Collector):
    """Counts decoding steps by the nodes of their drafts, as far as the server chooses among several."""

    def __init__(self, counts: Callable[[], Iterable[tuple[int, int]]]) -> None:
        self.counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        about = "decoding steps by the nodes of their draft; 1 is a step of plain decoding"
        found = CounterMetricFamily("medusa_draft_steps", about, labels=["nodes"])
        for nodes, steps in self.counts():
            found.add_metric([str(nodes)], steps)
        yield found


class CountRequests:
    """ASGI middleware that counts requests by path and status when their answers begin."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        """Count the requests to `app`. All paths other than `paths` are counted as `other`."""
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        def count(status: int) -> None:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()

        async def counting(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                count(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counting)
        except Exception:
            if not began:  # the answer to an error of the server is made outside of this middleware
                count(500)
            raise
