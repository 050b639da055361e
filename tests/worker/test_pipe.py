"""The pipe keeps every frame, whatever the cuts of the byte stream, and both ends notice the other's death."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.worker.messages import CancelTurn, Drain, FromWorker, TokenLogprob, Tokens, TurnFailed
from agentserve.worker.pipe import (
    HEADER,
    MAX_FRAME_BYTES,
    FrameSplitter,
    FrameTooLong,
    PipeClosed,
    WorkerPipe,
    append_frame,
    connect,
)


@given(payloads=st.lists(st.binary(max_size=300), max_size=20), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_cutting_of_the_stream(payloads: list[bytes], cuts: list[int]) -> None:
    stream = bytearray()
    for payload in payloads:
        append_frame(stream, payload)
    splitter, got, at, turn = FrameSplitter(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        got += [bytes(view) for view in splitter.feed(bytes(stream[at : at + step]))]
        at, turn = at + step, turn + 1
    assert got == payloads


def test_the_rest_of_a_frame_that_looks_like_a_whole_one_is_its_rest() -> None:
    inner = HEADER.pack(3) + b"abc"
    frame = HEADER.pack(2 + len(inner)) + b"xy" + inner
    splitter = FrameSplitter()
    assert splitter.feed(frame[:-7]) == []
    assert [bytes(view) for view in splitter.feed(frame[-7:])] == [b"xy" + inner]


def test_a_wild_length_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(FrameTooLong, match=str(MAX_FRAME_BYTES + 1)):
        FrameSplitter().feed(HEADER.pack(MAX_FRAME_BYTES + 1))


async def test_server_and_worker_end_exchange_frames_one_by_one() -> None:
    ours, theirs = socket.socketpair()
    got: list[FromWorker] = []
    closed = asyncio.Event()
    server = await connect(ours, got.append, lambda _: closed.set())
    worker = WorkerPipe(theirs)
    sent = [Tokens(turn_id="t", ids=(i,)) for i in range(500)]
    for frame in sent:
        worker.send(frame)
    worker.flush()
    while len(got) < len(sent):
        await asyncio.sleep(0)
    assert got == sent
    server.send(CancelTurn("t"))
    server.send(Drain())
    assert await asyncio.to_thread(worker.receive, None) == [CancelTurn("t"), Drain()]
    worker.close()
    await asyncio.wait_for(closed.wait(), 60)
    with pytest.raises(PipeClosed):
        server.send(Drain())


SAID = st.one_of(
    st.builds(Tokens, turn_id=st.sampled_from("abc"), ids=st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple)),
    st.builds(Tokens, turn_id=st.sampled_from("abc"), ids=st.just((1,)), logprobs=st.just((TokenLogprob(-0.5, ((2, -1.0),)),))),
    st.builds(TurnFailed, st.sampled_from("abc"), st.just("server_error"), st.just("why")),
)


@given(frames=st.lists(st.tuples(SAID, st.booleans()), max_size=30))
async def test_tokens_that_travel_together_arrive_apart_and_in_their_place(frames: list[tuple[FromWorker, bool]]) -> None:
    ours, theirs = socket.socketpair()
    got: list[FromWorker] = []
    server = await connect(ours, got.append, lambda _: None)
    worker = WorkerPipe(theirs)
    for frame, flushes in frames:
        worker.send(frame)
        if flushes:
            worker.flush()
    worker.flush()
    while len(got) < len(frames):
        await asyncio.sleep(0)
    server.close()
    worker.close()
    assert got == [frame for frame, _ in frames]


def test_a_step_of_many_turns_is_one_frame_on_the_wire() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        worker = WorkerPipe(theirs)
        for turn in range(200):
            worker.send(Tokens(turn_id=f"t{turn}", ids=(turn,)))
        worker.flush()
        assert len(FrameSplitter().feed(ours.recv(1 << 16))) == 1
        worker.close()


def test_worker_end_reports_a_vanished_server() -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerPipe(theirs)
    assert worker.receive(0.0) == []
    ours.close()
    with pytest.raises(PipeClosed):
        worker.receive(None)
    worker.send(Tokens(turn_id="t", ids=(1,)))
    with pytest.raises(PipeClosed):
        worker.flush()
    worker.close()


async def test_garbage_from_the_worker_closes_the_pipe_with_the_error() -> None:
    ours, theirs = socket.socketpair()
    ends: list[Exception | None] = []
    await connect(ours, lambda _: None, ends.append)
    buffer = bytearray()
    append_frame(buffer, msgspec.msgpack.encode({"type": "no such frame"}))
    theirs.sendall(buffer)
    while not ends:
        await asyncio.sleep(0.01)
    assert isinstance(ends[0], msgspec.ValidationError)
    theirs.close()
