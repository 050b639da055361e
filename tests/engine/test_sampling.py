"""Choosing tokens, against a plain float64 computation of the distribution."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Sampler, StopStrings, choose_tokens, finite_rows, uniform
from engine.types import SamplingParams

VOCAB = 50


def sampler(prompt: tuple[int, ...] = (1, 2), vocab: int = VOCAB, **fields) -> Sampler:
    return Sampler(SamplingParams(**({"max_tokens": 9} | fields)), np.array(prompt), vocab)


def random_logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """Token → probability after all filters, written as plainly as possible."""
    x = [v / temperature for v in logits.double().tolist()]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    if top_k:
        order = order[:top_k]
    weight = {i: math.exp(x[i] - x[order[0]]) for i in order}
    total = sum(weight.values())
    p = {i: w / total for i, w in weight.items()}
    nucleus, mass = [], 0.0
    for i in order:
        if mass >= top_p:
            break
        nucleus.append(i)
        mass += p[i]
    nucleus = [i for i in nucleus if p[i] >= min_p * p[order[0]]]
    total = sum(p[i] for i in nucleus)
    return {i: p[i] / total for i in nucleus}


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(filters):
    logits = random_logits(3)
    want = kept(logits, **filters)
    count = 3000
    drawn = Counter(sampler(seed=11, **filters).choose(logits, i).token_id for i in range(count))
    assert set(drawn) <= set(want)
    for token, p in want.items():
        assert abs(drawn[token] / count - p) < 5 * math.sqrt(p * (1 - p) / count) + 1e-3


@pytest.mark.parametrize("vocab", [2000, 6000, 12000])
def test_a_nucleus_wider_than_the_prefilters_is_still_exact(vocab):
    logits = torch.zeros(vocab) + torch.linspace(0, 0.1, vocab)
    want = kept(logits, top_p=0.5)
    drawn = {sampler(vocab=vocab, seed=1, top_p=0.5).choose(logits, i).token_id for i in range(300)}
    assert len(want) > 0.45 * vocab
    assert drawn <= set(want)
    assert len(drawn) > 200


@given(seed=st.integers(0, 1000), index=st.integers(0, 100), neighbour=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_draw_depends_on_seed_index_and_own_logits_only(seed, index, neighbour):
    mine = random_logits(seed)
    params = {"seed": seed, "top_p": 0.9, "temperature": 0.8}
    alone = choose_tokens(mine[None], [sampler(**params)], [index])
    others = torch.stack([random_logits(neighbour), mine, random_logits(neighbour + 1)])
    greedy = sampler(temperature=0.0)
    beside = choose_tokens(others, [greedy, sampler(**params), sampler(seed=neighbour)], [3, index, 4])
    assert beside[1] == alone[0]
    assert beside[0].token_id == int(others[0].argmax())


def test_no_seed_means_another_draw_each_time():
    logits = torch.zeros(VOCAB)
    drawn = {tuple(s.choose(logits, i).token_id for i in range(8)) for s in (sampler() for _ in range(5))}
    assert len(drawn) == 5


def test_uniform_matches_the_published_generator():
    """First outputs of SplitMix64 with seed 1234567 (reference values of the algorithm's authors)."""
    raw = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [uniform(1234567, i) for i in range(3)] == [(z >> 11) * 2.0**-53 for z in raw]
    values = [uniform(7, i) for i in range(1000)]
    assert 0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(VOCAB)
    logits[[7, 9, 30]] = 1.0
    assert sampler(temperature=0.0).choose(logits, 0).token_id == 7
    assert choose_tokens(logits[None], [sampler(temperature=0.0)], [0])[0].token_id == 7
    assert sampler(temperature=1e-9, seed=1, top_k=1).choose(random_logits(4), 0).token_id == int(random_logits(4).argmax())


def test_penalties_follow_their_definitions():
    logits = random_logits(5)
    s = sampler(
        prompt=(3,), temperature=0.0, logprobs=VOCAB, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3
    )
    for token in (8, 8, 9):
        s.observe(token)
    want = logits.clone()
    for token in (3, 8, 9):
        want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
    want[8] -= 0.4 + 2 * 0.3
    want[9] -= 0.4 + 0.3
    choice = s.choose(logits, 3)
    assert choice.token_id == int(want.argmax())
    expected = want.log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected.max()), abs=1e-6)
    assert len(choice.top) == VOCAB - 1
    assert all(p == pytest.approx(float(expected[i]), abs=1e-6) for i, p in choice.top)


def test_logprobs_are_before_temperature_and_leave_out_the_chosen_token():
    logits = random_logits(6)
    choice = sampler(seed=2, temperature=3.0, logprobs=2).choose(logits, 0)
    expected = logits.log_softmax(-1)
    assert choice.logprob == pytest.approx(float(expected[choice.token_id]), abs=1e-6)
    best = [i for i in expected.argsort(descending=True).tolist() if i != choice.token_id][:2]
    assert [i for i, _ in choice.top] == best
    assert sampler(temperature=0.0, logprobs=0).choose(logits, 0).top == ()


def test_rows_that_are_not_finite_are_found():
    logits = torch.randn(5, VOCAB)
    logits[1, 3] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, 7] = -float("inf")
    logits[4] = 3e38
    assert finite_rows(logits) == [True, False, False, False, True]


@given(
    pieces=st.lists(st.binary(max_size=4), max_size=12),
    stop=st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_are_found_at_the_first_token_that_completes_one(pieces, stop):
    found = StopStrings(stop)
    text = b""
    for piece in pieces:
        text += piece
        hit = found.feed(piece)
        assert hit == any(s in text for s in stop)
        if hit:
            break


@given(data=st.data())
def test_stop_strings_over_a_small_alphabet(data):
    """Few letters, so that overlaps and near misses are common."""
    small = st.text("ab", max_size=3).map(str.encode)
    pieces = data.draw(st.lists(small, max_size=15))
    stop = data.draw(st.lists(st.text("ab", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=2))
    found, text = StopStrings(stop), b""
    for piece in pieces:
        text += piece
        if any(s in text for s in stop):
            assert found.feed(piece)
            return
        assert not found.feed(piece)


@pytest.mark.parametrize("filters", [{"top_p": 5e-324}, {"top_p": 5e-324, "top_k": 1}, {"temperature": 5e-324}, {"min_p": 1.0}])
def test_the_smallest_settings_leave_the_likeliest_token(filters):
    """Also on a processor that takes denormal numbers for zero, as it does once the kernels have run."""
    logits = torch.linspace(-1, 1, 300)
    before = torch.set_flush_denormal(True)
    try:
        sampler = Sampler(SamplingParams(1, **{"temperature": 2.0, "seed": 3, **filters}), np.arange(3), 300)
        assert sampler.choose(logits, 0).token_id == 299
    finally:
        torch.set_flush_denormal(False)
    assert before


def test_settings_that_leave_nothing_end_only_their_own_choice(monkeypatch):
    good, bad = (Sampler(SamplingParams(1, temperature=1.0, seed=1), np.arange(3), 8) for _ in range(2))
    monkeypatch.setattr(bad, "_draw", lambda logits, u: [][-1])
    first, nothing, last = choose_tokens(torch.ones(3, 8), [good, bad, good], [0, 0, 0])
    assert isinstance(nothing, str)
    assert not isinstance(first, str)
    assert first == last


class Allowed:
    """A mask that always allows the same tokens; remembers what was drawn."""

    def __init__(self, tokens: set[int], vocab: int) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        self._words = np.packbits(bits, bitorder="little").view("<u4")
        self.drawn: list[int] = []

    def words(self) -> np.ndarray:
        return self._words

    def accept(self, token_id: int) -> None:
        self.drawn.append(token_id)


@given(
    vocab=st.integers(2, 90),
    allowed=st.sets(st.integers(0, 89), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([0.3, 1.0]),
    seed=st.integers(0, 1 << 32),
)
def test_a_masked_token_is_never_drawn(
    vocab: int, allowed: set[int], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    allowed = {token % vocab for token in allowed}
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 30
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, logprobs=3)
    mask = Allowed(allowed, vocab)
    chooser = Sampler(params, np.arange(1), vocab, mask)
    for index in range(5):
        choice = chooser.choose(logits, index)
        assert choice.token_id in allowed
        assert {token for token, _ in choice.top} <= allowed
        assert choice.logprob is not None
        assert choice.logprob <= 0
        chooser.observe(choice.token_id)
    assert len(mask.drawn) == 5
    if temperature == 0.0:
        assert mask.drawn[0] == max(sorted(allowed), key=lambda token: float(logits[token]))


def test_a_mask_that_allows_nothing_ends_only_its_own_choice() -> None:
    params = SamplingParams(1, temperature=0.0)
    stuck, free = Sampler(params, np.arange(1), 8, Allowed(set(), 8)), Sampler(params, np.arange(1), 8)
    none, some = choose_tokens(torch.ones(2, 8), [stuck, free], [0, 0])
    assert isinstance(none, str)
    assert "allows 0 of" in none
    assert not isinstance(some, str)
