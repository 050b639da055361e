"""One turn, from an accepted request to its terminal event: run_turn() reads as the line that data follows.

Knows no sockets and no SQL; see interfaces.py for what it stands on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import numpy as np

from agentserve.cache_report import cache_report
from agentserve.config import Config
from agentserve.deadlines import DeadlineReport, DeadlineTracker
from agentserve.errors import TurnFailure
from agentserve.events import ResponseEvents
from agentserve.interfaces import Rendered, RenderRequest, Store, StoredResponse, Text, Worker
from agentserve.metrics import Metrics
from agentserve.protocol.responses import ResponseBody, encode_body, usage
from agentserve.replay import known_answer, replay
from agentserve.request import Context, LocalResponses, TurnRequest, resolve
from agentserve.session.divergence import Contexts
from agentserve.session.lineage import first_words
from agentserve.token_stream import Sink, TokenStream
from agentserve.worker.messages import Matched, Progress, Saved, StartTurn, Tokens, TurnFailed, TurnFinished

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Services:
    """What turns share.

    threads: runs rendering, which takes long for long contexts. contexts: the newest ones, to say why the next differ.
    active: running turns by response id.
    """

    config: Config
    text: Text
    store: Store
    worker: Worker
    threads: Executor
    metrics: Metrics = field(default_factory=Metrics)
    contexts: Contexts = field(default_factory=Contexts)
    active: dict[str, Turn] = field(default_factory=dict)


MOST_CONTEXT = 4 << 20
"""Tokens that are rendered at most while no worker has said how many its model takes."""


async def run_turn(request: TurnRequest, services: Services, sink: Sink, local: LocalResponses | None = None) -> ResponseBody:
    """Run one turn and return the final response object; its terminal event has been put into `sink`.

    local: responses of the connection that are not stored.
    Raises ApiError before the response is created, nothing afterwards but CancelledError: a failure ends as `response.failed`.
    Cancelling the task stops generation within one step.
    """
    kept = LocalResponses() if local is None else local
    known = await known_answer(request, (t.request for t in services.active.values()), services.store)
    if known is not None:
        return replay(known, request, sink)
    context = await resolve(request, services.store, kept)
    turn = Turn(request, context, services, sink)
    turn.announce()
    with turn.running():
        try:
            rendered = await turn.render()
            outcome = await turn.generate(rendered)
            stored = turn.finish(rendered, outcome)
            if request.store:
                await services.store.commit(stored)
            else:
                kept.add(stored)
            turn.end()
        except TurnFailure as failure:
            turn.fail(failure)
        except Exception as exc:
            log.exception("turn broke response=%s error=%s", request.id, type(exc).__name__)
            turn.fail(TurnFailure("server_error", "the server failed in this turn; its context is unchanged, retry"))
    return turn.events.body


class Turn:
    """State of one running turn."""

    def __init__(self, request: TurnRequest, context: Context, services: Services, sink: Sink) -> None:
        self.request = request
        self.context = context
        self.services = services
        self.sink = sink
        self.events = ResponseEvents(request.body(services.config), sink.put, request.stream_id)
        self.cancelled = False
        self._queued = False
        self._started = False
        self._broken: Exception | None = None
        self._render_request: RenderRequest | None = None
        self._stream: TokenStream | None = None
        self._deadline = DeadlineTracker(request.options.ttft_deadline_ms or int(services.config.turn.ttft_deadline_s * 1000))

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def announce(self) -> None:
        self.events.created()
        self.events.in_progress()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While a turn runs it can be found by its id, and its client hears from it at least every `keepalive_s`."""
        services, loop = self.services, asyncio.get_running_loop()
        every_s = services.config.turn.keepalive_s * 0.75

        def sign_of_life() -> None:
            nonlocal timer
            if self.events.waiting:
                if self._queued:
                    self.events.queued()
                else:
                    self.events.in_progress()
            self._report_deadline(self._deadline.tick(self._elapsed_ms()))
            if self._stream is not None:
                self._stream.flush()
            timer = loop.call_later(every_s, sign_of_life)

        timer = loop.call_later(every_s, sign_of_life)
        services.active[self.request.id] = self
        services.metrics.active_responses(len(services.active))
        try:
            yield
        finally:
            timer.cancel()
            services.active.pop(self.request.id, None)
            services.metrics.active_responses(len(services.active))

    def cancel(self) -> None:
        """Stop at the next step; the response ends as incomplete."""
        self.cancelled = True
        if self._started:
            self.services.worker.cancel(self.request.id)

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def render(self) -> Rendered:
        self._render_request = render_request(self.request, self.context, self.services)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.services.threads, self.services.text.render, self._render_request)

    async def generate(self, rendered: Rendered) -> TurnFinished:
        """Send the turn to the worker and its tokens to the client. Raises TurnFailure."""
        assert self._render_request is not None
        text = self.services.text
        stream = self._stream = TokenStream(
            self.events,
            self.sink,
            text.parser(self._render_request, rendered),
            rendered.markers,
            text.token_text,
            one_call=self.request.create.parallel_tool_calls is False,
            stops=self.request.stops,
        )
        if self.cancelled:
            return _nothing(self.request.id, len(rendered.ids))
        self._started = True
        async with aclosing(self.services.worker.run(self._start(rendered), self._take(stream))) as frames:
            async for frame in frames:
                if type(frame) is Tokens:
                    if self._broken is not None:
                        raise self._broken
                    self._tokens(frame, stream)
                    if self.sink.full:
                        await self.sink.room()
                elif type(frame) is Progress:
                    self._progress(frame)
                elif type(frame) is Matched:
                    self._matched(frame, rendered)
                elif type(frame) is TurnFinished:
                    stream.finish()
                    self._ended(frame)
                    return frame
                elif type(frame) is TurnFailed:
                    self._ended(frame)
                    raise TurnFailure(frame.code, frame.message, frame.param)
                else:
                    assert type(frame) is Saved
        raise TurnFailure("server_error", "the worker ended the turn without a result; retry")

    def finish(self, rendered: Rendered, outcome: TurnFinished) -> StoredResponse:
        """Close the output, remember the exact ids, and build the row to store."""
        stream, render_request = self._stream, self._render_request
        assert stream is not None
        assert render_request is not None
        reason = {"length": "max_output_tokens", "cancelled": "cancelled"}.get(outcome.reason)
        if stream.enough and not self.cancelled:
            reason = None
        body = self.events.finished(
            usage=usage(
                prompt=outcome.prompt_tokens,
                cached=outcome.reused_tokens,
                written=outcome.written_tokens,
                output=len(stream.generated),
                reasoning=stream.reasoning_tokens,
            ),
            incomplete=reason,
            now=int(time.time()),
            cancelled=reason == "cancelled",
            stop_sequence=stream.stop_sequence,
        )
        generated = np.asarray(stream.generated, dtype="<u4")
        if len(generated) and stream.stop_sequence is None:  # what was cut off is no part of what the client sends back
            self.services.text.learn(render_request, rendered, body.output, generated)
        self.services.contexts.remember(render_request, rendered, generated)
        log.info(
            "turn finished response=%s session=%s status=%s prompt=%d reused=%d written=%d output=%d ttft_ms=%s",
            body.id,
            self.context.session,
            body.status,
            outcome.prompt_tokens,
            outcome.reused_tokens,
            outcome.written_tokens,
            len(generated),
            "-" if outcome.ttft_s is None else round(outcome.ttft_s * 1000, 1),
        )
        return self._row(body, rendered, generated)

    def end(self) -> None:
        self.events.end()

    def fail(self, failure: TurnFailure) -> None:
        if self._stream is not None:
            self._stream.drop()
        self.services.metrics.error(failure.code)
        log.info("turn failed response=%s session=%s code=%s", self.request.id, self.context.session, failure.code)
        self.events.failed(failure)

    def _row(self, body: ResponseBody, rendered: Rendered, generated: np.ndarray) -> StoredResponse:
        request, parent = self.request, self.context.parent
        inherited = request.tools is None and parent is not None
        return StoredResponse(
            id=request.id,
            principal=request.principal.id,
            session=self.context.session,
            parent=request.create.previous_response_id,
            model=request.model,
            status=body.status,
            created_at=float(request.created_at),
            completed_at=time.time(),
            instructions=request.create.instructions,
            tools=parent.tools if inherited and parent is not None else encode_body(request.tools_echo),
            input=request.items,
            output=body.output,
            body=encode_body(body),
            prompt_ids=rendered.ids.astype("<u4").tobytes(),
            generated_ids=generated.tobytes(),
            idempotency_key=request.idempotency_key,
            request_digest=request.digest if request.idempotency_key is not None else None,
            context_items=len(self.context.items),
            own_tokens=first_words(self.context.items, rendered),
        )

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, rendered: Rendered) -> StartTurn:
        request, services = self.request, self.services
        hello = services.worker.hello
        room = None if hello is None else hello.max_context - len(rendered.ids)
        asked_ms = request.options.ttft_deadline_ms
        return StartTurn(
            turn_id=request.id,
            ids=rendered.ids.astype("<u4").tobytes(),
            cuts=rendered.cuts,
            markers=rendered.markers,
            salt=request.principal.salt,
            session=self.context.session,
            sampling=request.sampling(services.config, room),
            accepted_at=request.accepted_at,
            deadline_s=None if asked_ms is None else asked_ms / 1000,
            on_miss=request.options.on_miss,
            priority=request.options.priority,
            generate=request.generate,
        )

    def _take(self, stream: TokenStream) -> Callable[[Tokens], bool]:
        """Tokens on their short way. What cannot be handled there (a full sink, an error) takes the long one."""

        def take(frame: Tokens) -> bool:
            if self._broken is not None or self.sink.full:
                return False
            try:
                self._tokens(frame, stream)
            except Exception as exc:
                self._broken = exc
                return False
            return True

        return take

    def _tokens(self, frame: Tokens, stream: TokenStream) -> None:
        if not stream.generated:
            self._report_deadline(self._deadline.first_token(self._elapsed_ms()))
        if not stream.enough:
            stream.push(frame)
            if stream.enough:
                self.services.worker.cancel(self.request.id)

    def _progress(self, frame: Progress) -> None:
        self._queued = frame.queued > 0
        self._report_deadline(self._deadline.predicted(self._elapsed_ms(), int(frame.eta_s * 1000)))
        if self.request.options.events:
            self.events.progress(
                processed=frame.processed,
                total=frame.total,
                cached=frame.cached,
                queued=frame.queued,
                eta_ms=int(frame.eta_s * 1000),
            )

    def _matched(self, frame: Matched, rendered: Rendered) -> None:
        assert self._render_request is not None
        self._report_deadline(self._deadline.predicted(self._elapsed_ms(), int(frame.predicted_ttft_s * 1000)))
        if self.request.options.events:
            report = None
            if frame.divergence is not None:
                report = self.services.contexts.explain(
                    self._render_request, rendered, frame.divergence, frame.cause, self.services.text.token_text
                )
                if report.cause == "appended":
                    # What it parts from is no context that the client knows: tokens that were generated and not delivered.
                    report = None
            self.events.cache_report(**cache_report(frame, rendered, self.request, report))

    def _ended(self, frame: TurnFinished | TurnFailed) -> None:
        metrics = self.services.metrics
        metrics.turn_ended(frame)
        if not self._deadline.final:
            self._report_deadline(self._deadline.ended(self._elapsed_ms()))
        if self._deadline.status is not None:
            metrics.deadline(self._deadline.status)

    def _report_deadline(self, report: DeadlineReport | None) -> None:
        if report is not None and self.request.options.events:
            self.events.deadline(
                deadline_ms=report.deadline_ms,
                predicted_ttft_ms=report.predicted_ttft_ms,
                elapsed_ms=report.elapsed_ms,
                status=report.status.value,
            )

    def _elapsed_ms(self) -> int:
        return int((time.monotonic() - self.request.accepted_at) * 1000)


def render_request(request: TurnRequest, context: Context, services: Services) -> RenderRequest:
    """The whole context of a turn, as it is rendered."""
    hello = services.worker.hello
    return RenderRequest(
        instructions=request.create.instructions,
        tools=context.tools if request.tool_choice == "auto" else (),
        items=context.items,
        retain=request.options.retain,
        thinking=request.thinking,
        salt=request.principal.salt,
        prompt=request.generate,
        max_tokens=MOST_CONTEXT if hello is None else hello.max_context,
    )


async def count_tokens(request: TurnRequest, services: Services) -> int:
    """Tokens of the context that a turn of this request would have. Raises ApiError, TurnFailure."""
    context = await resolve(request, services.store, LocalResponses())
    loop = asyncio.get_running_loop()
    rendered = await loop.run_in_executor(services.threads, services.text.render, render_request(request, context, services))
    return len(rendered.ids)


def _nothing(turn_id: str, prompt_tokens: int) -> TurnFinished:
    return TurnFinished(
        turn_id=turn_id,
        reason="cancelled",
        prompt_tokens=prompt_tokens,
        output_tokens=0,
        reused_tokens=0,
        written_tokens=0,
        queue_s=0.0,
        restore_s=0.0,
        prefill_s=0.0,
        ttft_s=None,
        decode_s=0.0,
    )
