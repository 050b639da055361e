"""Prometheus metrics of the server process: one object, one method per thing that happens. No HTTP here; see `render`.

The worker's own figures arrive with its Load reports and are shown as they were last reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from agentserve.deadlines import DeadlineStatus
from agentserve.worker.messages import Load, TurnFailed, TurnFinished

if TYPE_CHECKING:
    from agentserve.worker.fleet import Fleet
    from agentserve.worker.supervisor import Supervisor

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = CONTENT_TYPE_LATEST
disable_created_metrics()  # a second series for each counter that says when it began


class Metrics:
    """All metrics of one server. Each has its own registry, so that several servers fit in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"agentserve_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"agentserve_{name}", text, labels, registry=registry)

        self._ttft = Histogram(
            "agentserve_ttft_seconds",
            "Time from accepting a turn to its first generated token, by where its state came from",
            ("tier",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._predicted = Histogram(
            "agentserve_predicted_ttft_seconds", "The same as predicted at its start", buckets=TTFT_BUCKETS_S, registry=registry
        )
        self._error = Histogram(
            "agentserve_ttft_error_ratio",
            "Absolute error of the prediction over the TTFT",
            buckets=(0.02, 0.05, 0.1, 0.15, 0.25, 0.4, 0.7, 1, 2, 5),
            registry=registry,
        )
        self._reuse = Histogram(
            "agentserve_reuse_ratio",
            "Restored share of a turn's prompt",
            buckets=(0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1),
            registry=registry,
        )
        self._restore = Histogram(
            "agentserve_restore_seconds", "Time to restore a checkpoint", buckets=TTFT_BUCKETS_S, registry=registry
        )
        self._turns = counter("turns", "Turns by how they ended", ("outcome",))
        self._deadlines = counter("deadlines", "Turns by the final status of their deadline", ("status",))
        self._warnings = counter(
            "deadline_warnings", "Turns by what was said at their start and how it came", ("first", "status")
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens by where their state came from", ("source",))
        self._output_tokens = counter("output_tokens", "Generated tokens")
        self._written_tokens = counter("checkpoint_tokens_written", "Tokens whose state was newly saved")
        self._restarts = gauge("worker_restarts", "Times the worker was started again", ("worker",))
        self._ready = gauge("worker_ready", "1 while a worker is ready", ("worker",))
        self._pid = gauge("worker_pid", "Process of the worker, 0 while there is none; SIGTERM drains it", ("worker",))
        self._spilled = gauge("turns_spilled", "Turns that left their session's worker, since another was sooner", ("model",))
        self._moved = gauge("turns_moved", "Turns that ran again on another worker, since theirs had ended", ("model",))
        self._sockets = gauge("open_sockets", "Open WebSocket connections")
        self._refused = counter("connections_refused", "Connections refused before they were accepted", ("reason",))
        self._active = gauge("active_responses", "Responses that have not ended")
        self._errors = counter("errors", "Error events and responses by code", ("code",))
        self._kept = gauge("kept_bytes", "Bytes that each cache of the server says it takes", ("what",))
        self._worker_turns = gauge("worker_turns", "Turns in the worker", ("state", "worker"))
        self._waiting_tokens = gauge("worker_waiting_prefill_tokens", "Prompt tokens that wait for prefill", ("worker",))
        self._rate = gauge(
            "worker_tokens_per_second",
            "Speed that deadlines are predicted with: measured, before that assumed",
            ("phase", "worker"),
        )
        self._pages = gauge("worker_kv_pages", "KV pages", ("state", "worker"))
        self._cache_bytes = gauge("checkpoint_bytes", "Bytes of saved state", ("tier", "worker"))
        self._cache_count = gauge("checkpoints", "Saved checkpoints", ("tier", "worker"))
        self._tier = gauge("checkpoint_tier", "Counts of a tier since the worker started", ("tier", "what", "worker"))
        self._write_back = gauge(
            "checkpoint_write_back", "Checkpoints that wait for the disk, or were evicted before", ("what", "worker")
        )
        self._prefetch = gauge(
            "checkpoint_prefetch",
            "Checkpoints brought from disk before their turn came, and what became of them",
            ("what", "worker"),
        )
        self._worker_counters = gauge("worker_counter", "Further counts that the worker reports", ("name", "worker"))

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn_ended(self, frame: TurnFinished | TurnFailed) -> None:
        if isinstance(frame, TurnFailed):
            self._turns.labels(outcome=frame.code).inc()
            return
        self._turns.labels(outcome=frame.reason).inc()
        self._prompt_tokens.labels(source="restored").inc(frame.reused_tokens)
        self._prompt_tokens.labels(source="prefilled").inc(max(0, frame.prompt_tokens - frame.reused_tokens))
        self._output_tokens.inc(frame.output_tokens)
        self._written_tokens.inc(frame.written_tokens)
        if frame.prompt_tokens:
            self._reuse.observe(frame.reused_tokens / frame.prompt_tokens)
        if frame.ttft_s is not None:
            self._ttft.labels(tier=frame.tier or "none").observe(frame.ttft_s)
            if frame.predicted_ttft_s is not None:
                self._predicted.observe(frame.predicted_ttft_s)
                self._error.observe(abs(frame.predicted_ttft_s - frame.ttft_s) / max(frame.ttft_s, 1e-6))
        if frame.reused_tokens:
            self._restore.observe(frame.restore_s)

    def deadline(self, status: DeadlineStatus, warned: bool | None = None) -> None:
        """The final status of one turn (met or missed). warned: whether its first prediction was late; None without one."""
        self._deadlines.labels(status=status.value).inc()
        if warned is not None:
            self._warnings.labels(first="at_risk" if warned else "on_track", status=status.value).inc()

    def active_responses(self, count: int) -> None:
        self._active.set(count)

    def error(self, code: str) -> None:
        self._errors.labels(code=code).inc()

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def socket_opened(self) -> None:
        self._sockets.inc()

    def socket_closed(self) -> None:
        self._sockets.dec()

    def refused(self, reason: str) -> None:
        """reason: one of a few words such as `origin`, `host`, `token`, never text from the client."""
        self._refused.labels(reason=reason).inc()

    def watch_kept(self, what: str, size_bytes: Callable[[], int]) -> None:
        """Ask it whenever the metrics are read. what: a word for the cache whose size it tells."""
        self._kept.labels(what=what).set_function(lambda: float(size_bytes()))

    # ── worker ───────────────────────────────────────────────────────────────────────────────────────────────────

    def watch_worker(self, worker: str, supervisor: Supervisor) -> None:
        """Ask these whenever the metrics are read. worker: label of one of them, its model's name and its number."""
        client = supervisor.client
        self._ready.labels(worker=worker).set_function(lambda: float(client.ready))
        self._restarts.labels(worker=worker).set_function(lambda: float(supervisor.restarts))
        self._pid.labels(worker=worker).set_function(lambda: float(supervisor.pid or 0))
        client.on_load = partial(self.load, worker)

    def load(self, worker: str, load: Load) -> None:
        self._worker_turns.labels(state="running", worker=worker).set(load.running)
        self._worker_turns.labels(state="waiting", worker=worker).set(load.waiting)
        self._waiting_tokens.labels(worker=worker).set(load.waiting_prefill_tokens)
        self._rate.labels(phase="prefill", worker=worker).set(load.prefill_tokens_per_s)
        self._rate.labels(phase="decode", worker=worker).set(load.decode_tokens_per_s)
        self._pages.labels(state="free", worker=worker).set(load.free_pages)
        self._pages.labels(state="total", worker=worker).set(load.total_pages)
        for tier, size in load.cache_bytes.items():
            self._cache_bytes.labels(tier=tier, worker=worker).set(size)
        for tier, count in load.cache_checkpoints.items():
            self._cache_count.labels(tier=tier, worker=worker).set(count)
        for name, value in load.counters.items():
            self._worker_counters.labels(name=name, worker=worker).set(value)
            tier, _, what = name.partition("_")
            if tier in load.cache_bytes:
                self._tier.labels(tier=tier, what=what, worker=worker).set(value)
            elif name.startswith("write_back_"):
                self._write_back.labels(what=name.removeprefix("write_back_"), worker=worker).set(value)
            elif name.startswith("prefetch"):
                self._prefetch.labels(what=name.removeprefix("prefetch_"), worker=worker).set(value)

    def watch_fleet(self, model: str, fleet: Fleet) -> None:
        """The same for the workers of one model together."""
        self._spilled.labels(model=model).set_function(lambda: float(fleet.spilled))
        self._moved.labels(model=model).set_function(lambda: float(fleet.moved))

    def render(self) -> bytes:
        """The text for `/metrics`, of type CONTENT_TYPE."""
        return generate_latest(self.registry)
