"""One turn, from an accepted request to its terminal event: run_turn() reads as the line that data follows.

Knows no sockets and no SQL; see interfaces.py for what it stands on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial

import msgspec
import numpy as np

from agentserve.audience import Audience, Nowhere, Sink, on_lane
from agentserve.cache_report import cache_report
from agentserve.constraints.output import OutputRule
from agentserve.context import Context, LocalResponses, resolve
from agentserve.deadlines import DeadlineReport, DeadlineTracker
from agentserve.errors import ServerError, TurnFailure
from agentserve.events import ResponseEvents
from agentserve.idempotency import known_answer
from agentserve.interfaces import StoredResponse
from agentserve.outcome import nothing, stored_row, why_incomplete
from agentserve.prompt import Prompt, output_rule, render, start_turn
from agentserve.protocol.items import Compaction, Message
from agentserve.protocol.responses import ResponseBody, usage
from agentserve.protocol.server_events import Event
from agentserve.replay import history, send, stored_history, whole_history
from agentserve.request import TurnRequest
from agentserve.room import make_room
from agentserve.services import Services
from agentserve.token_stream import TokenStream
from agentserve.worker.messages import Matched, Progress, Saved, Tokens, TurnFailed, TurnFinished

log = logging.getLogger(__name__)


async def run_turn(request: TurnRequest, services: Services, sink: Sink, local: LocalResponses | None = None) -> ResponseBody:
    """Run one turn and return the final response object; its terminal event has been put into `sink`.

    local: responses of the connection that are not stored.
    Raises ApiError before the response is created, nothing afterwards but CancelledError: a failure ends as `response.failed`.
    Cancelling it means that the client leaves: unless others follow the turn or it is detached, it stops within one step.
    """
    running = await services.claims.claim(request)
    if running is None:
        turn: Turn | None = None
        counted = False
        try:
            known = await known_answer(request, services.store)
            if known is not None:
                body, events = stored_history(known)
                await send([on_lane(event, request.stream_id) for event in events], sink)
                return body
            services.quotas.begin(request.principal.id, services.served(request.model).worker.load)
            counted = True
            if request.store:
                await services.quotas.check_stored(request.principal.id, services.store)
            kept = LocalResponses() if local is None else local
            context = await resolve(request, services, kept)
            running = turn = Turn(request, context, services, kept, await output_rule(request, context, services))
        finally:
            services.claims.settle(request, turn)
            if counted and turn is None:
                services.quotas.end(request.principal.id)
    return await running.sink.attend(sink, request.stream_id)


class Turn:
    """State of one running turn. sink: those who follow it. local: where its response is kept if it is not to be stored.

    rule: what the answer must be, None = anything.
    """

    def __init__(
        self,
        request: TurnRequest,
        context: Context,
        services: Services,
        local: LocalResponses,
        rule: OutputRule | None = None,
    ) -> None:
        self.request = request
        self.rule = rule
        self.context = context
        self.services = services
        self.model = services.served(request.model)
        self.local = local
        self.sink = Audience(
            history=self.history,
            task=self._begin,
            detached=request.options.detach,
        )
        self.events = ResponseEvents(
            request.body(services.config),
            self.sink.put,
            request.stream_id,
            seal=partial(services.seal.seal, request.principal.id, "reasoning") if request.sealed_reasoning else None,
        )
        self.cancelled = False
        self._queued = False
        self._at_worker: str | None = None
        self._settled = False
        self._steered = False
        self._broken: Exception | None = None
        self._stream: TokenStream | None = None
        self._deadline = DeadlineTracker(request.options.ttft_deadline_ms or int(services.config.turn.ttft_deadline_s * 1000))

    def _begin(self) -> asyncio.Task[ResponseBody]:
        task = asyncio.create_task(self.run(), name=f"turn-{self.request.id}")
        task.add_done_callback(self._gone)  # also of a task that was cancelled before it ran at all
        return task

    def _gone(self, _: asyncio.Task[ResponseBody]) -> None:
        self.services.claims.release(self.request)
        self.services.quotas.end(self.request.principal.id)

    async def run(self) -> ResponseBody:
        """The whole turn, up to its terminal event. Raises ApiError if it cannot begin."""
        request, services = self.request, self.services
        if request.create.background:
            await services.store.begin_background(request.principal.id, self.events.body)
        self.announce()
        with self.running():
            try:
                prompt = await self.make_room(await self.render())
                outcome = await self.generate(prompt)
                stored = self.finish(prompt, outcome)
                if request.store:
                    await services.store.commit(stored)
                else:
                    self.local.add(stored, memoryview(request.create.input).nbytes)
                    if not request.aside:
                        services.unstored.add(stored, outcome.reused_tokens)
                self.end()
            except TurnFailure as failure:
                self.fail(failure)
            except Exception as exc:
                log.exception("turn broke response=%s error=%s", request.id, type(exc).__name__)
                self.fail(TurnFailure("server_error", "the server failed in this turn; its context is unchanged, retry"))
        if request.create.background and self.events.body.status == "failed":
            with suppress(ServerError):  # then the next start says that it failed
                await services.store.fail_background(self.events.body)
        return self.events.body

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
            if self._settled:
                return
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
        if services.beginning.pop(self.request.id, False):
            self.cancel()
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
        self._stop()

    def steer(self) -> None:
        """Stop at the next item boundary; before the first token that is now."""
        self._steered = True
        if self._stream is not None:
            self._stream.stop_at_boundary()
        if self._stream is None or not self._stream.generated:
            self._stop()

    def _stop(self) -> None:
        if self._at_worker is not None:
            self.model.worker.cancel(self._at_worker)

    def history(self, next_number: int) -> list[Event]:
        """The events so far, from a number on."""
        events = self.events
        if not events.order.started:
            return []
        if events.order.ended:
            sent = whole_history(events.body, events.cuts)
        else:
            sent = history(events.begun, events.written, events.cuts, self.request.stream_id)
        return sent[next_number:]

    @property
    def body(self) -> ResponseBody:
        """The response object as it stands."""
        events = self.events
        return events.body if events.order.ended else msgspec.structs.replace(events.body, output=events.output)

    # ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def render(self) -> Prompt:
        return await render(self.request, self.context, self.services, self.rule)

    async def make_room(self, prompt: Prompt) -> Prompt:
        """The prompt to go on from, after `context_management`. Raises TurnFailure."""
        made = await make_room(self.request, self.context, prompt, self.services, self._said)
        if made is None or self.cancelled or self._steered:
            return prompt
        item, self.context = made
        self.events.compacted(item)
        return await self.render()

    async def _said(self, request: TurnRequest, prompt: Prompt) -> str:
        """What the model says in a pass of its own, which the client does not see. Raises TurnFailure."""
        events = ResponseEvents(request.body(self.services.config), Nowhere().put)
        events.created()
        await self._pass(request, prompt, self._token_stream(request, prompt, events, Nowhere()))
        events.close_item()
        return "".join(item.text for item in events.output if isinstance(item, Message)).strip()

    async def generate(self, prompt: Prompt) -> TurnFinished:
        """Send the turn to the worker and its tokens to the client. Raises TurnFailure."""
        self._stream = self._token_stream(self.request, prompt, self.events, self.sink)
        if self._steered:
            self._stream.stop_at_boundary()
        return await self._pass(self.request, prompt, self._stream)

    def _token_stream(self, request: TurnRequest, prompt: Prompt, events: ResponseEvents, sink: Sink) -> TokenStream:
        text, rendered = self.model.text, prompt.rendered
        return TokenStream(
            events,
            sink,
            text.parser(prompt.request, rendered),
            rendered.markers,
            text.token_text,
            one_call=request.create.parallel_tool_calls is False,
            stops=request.stops,
        )

    async def _pass(self, request: TurnRequest, prompt: Prompt, stream: TokenStream) -> TurnFinished:
        """One prompt through the worker. Raises TurnFailure."""
        if self.cancelled or self._steered:
            return nothing(request.id, len(prompt.rendered.ids))
        self._at_worker = request.id
        session, deadline_ms = self.context.session, self._deadline.deadline_ms
        start = start_turn(request, prompt.rendered, self.services, session=session, deadline_ms=deadline_ms)
        async with aclosing(self.model.worker.run(start, self._take(stream))) as frames:
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
                    self._matched(frame, prompt)
                elif type(frame) is TurnFinished:
                    stream.finish()
                    self._ended(frame, stream)
                    return frame
                elif type(frame) is TurnFailed:
                    self._ended(frame, stream)
                    raise TurnFailure(frame.code, frame.message, frame.param)
                else:
                    assert type(frame) is Saved
        raise TurnFailure("server_error", "the worker ended the turn without a result; retry")

    def finish(self, prompt: Prompt, outcome: TurnFinished) -> StoredResponse:
        """Close the output, remember the exact ids, and build the row to store."""
        stream = self._stream
        assert stream is not None
        reason = why_incomplete(outcome, stream, cancelled=self.cancelled, steered=self._steered)
        self._settled = True
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
        if (
            len(generated) and stream.stop_sequence is None and not stream.steered
        ):  # what was cut off is no part of what the client sends back
            said = tuple(item for item in body.output if not isinstance(item, Compaction))
            self.model.text.learn(prompt.request, prompt.rendered, said, generated)
        self.model.contexts.remember(prompt.request, prompt.rendered, generated, prompt.as_sent)
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
        return stored_row(self.request, self.context, prompt, body, generated, self.events.cuts)

    def end(self) -> None:
        self.events.end()

    def fail(self, failure: TurnFailure) -> None:
        if self._stream is not None:
            self._stream.drop()
        self.services.metrics.error(failure.code)
        log.info("turn failed response=%s session=%s code=%s", self.request.id, self.context.session, failure.code)
        self.events.failed(failure)
        if self.request.store:
            self.services.endings.add(self.request.principal.id, self.events.body, self.events.cuts)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────

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
        if stream is self._stream and not stream.generated:
            self._report_deadline(self._deadline.first_token(self._elapsed_ms()))
        if not stream.enough:
            stream.push(frame)
            if stream.enough:
                self._stop()

    def _progress(self, frame: Progress) -> None:
        self._queued = frame.queued > 0
        self._report_deadline(self._deadline.foretold(self._elapsed_ms(), frame.eta_s, frame.cautious_s))
        if self.request.options.events:
            self.events.progress(
                processed=frame.processed,
                total=frame.total,
                cached=frame.cached,
                queued=frame.queued,
                eta_ms=int(frame.eta_s * 1000),
            )

    def _matched(self, frame: Matched, prompt: Prompt) -> None:
        self._report_deadline(self._deadline.foretold(self._elapsed_ms(), frame.predicted_ttft_s, frame.cautious_ttft_s))
        if self.request.options.events:
            report = None
            if frame.divergence is not None:
                report = self.model.contexts.explain(
                    prompt.request, prompt.rendered, frame.divergence, frame.cause, self.model.text.token_text
                )
                if report.cause == "appended":
                    # What it parts from is no context that the client knows: tokens that were generated and not delivered.
                    report = None
            self.events.cache_report(**cache_report(frame, prompt, self.request, self.model.contexts, report))

    def _ended(self, frame: TurnFinished | TurnFailed, stream: TokenStream) -> None:
        metrics = self.services.metrics
        metrics.turn_ended(frame)
        if stream is not self._stream:
            return
        if not self._deadline.final:
            self._report_deadline(self._deadline.ended(self._elapsed_ms()))
        if self._deadline.status is not None:
            metrics.deadline(self._deadline.status, self._deadline.warned)

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
