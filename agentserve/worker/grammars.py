"""Grammars → token masks, by llguidance. Compiled in a thread of its own, and each next mask while the engine computes.

The only file that runs grammars; who writes them is agentserve/constraints. Knows no turns and no engine loop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.errors import MaskFailed

COMPILE_S = 10.0
"""A grammar that is not compiled by then is refused. Its thread goes on to the limits below, which end it."""
MASK_S = 30.0
"""One mask takes microseconds, milliseconds at most; the engine waits for no longer than this."""
KEPT_GRAMMARS = 64
LIMITS = LLParserLimits(max_grammar_size=200_000, initial_lexer_fuel=2_000_000, verbose_errors=False)
"""Without verbose errors, since those quote the grammar, and an error may reach a log."""


class GrammarRefused(Exception):
    """llguidance does not take the grammar; the message is its reason."""


class Vocabulary(Protocol):
    """What is needed of a tokenizer. agentserve.text.tokenizer.Tokenizer has it."""

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def control_ids(self) -> Sequence[int]:
        """Ids that no text may produce."""
        ...

    def encode(self, text: str) -> np.ndarray: ...


class _Tokens:
    """A vocabulary as llguidance wants it."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, size: int, end: int) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = end
        self.tokens = [vocabulary.token_bytes(i) for i in range(size)]
        self.special_token_ids = [i for i in vocabulary.control_ids if i < size]

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text).tolist()


class Grammars:
    """Compiled grammars of one model.

    load: reads the tokenizer; called once, in a thread, for the first grammar. vocab_size: of the engine's logits.
    ready: called from that thread whenever a compilation has ended.
    """

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int, ready: Callable[[], None] = lambda: None) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._ready = ready
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._vocabulary: Vocabulary | None = None
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, ends: Sequence[int]) -> Future[GrammarMask]:
        """Begin to compile. ends: ids that end an answer. The future may raise GrammarRefused, or what `load` raises."""
        future = self._compilers.submit(self._compile, grammar, tuple(sorted(set(ends))))
        future.add_done_callback(lambda _: self._ready())
        return future

    def _compile(self, grammar: str, ends: tuple[int, ...]) -> GrammarMask:
        key = (grammar, ends)
        with self._lock:
            matcher = self._kept.get(key)
            if matcher is not None:
                self._kept.move_to_end(key)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer(ends), grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarRefused(_reason(matcher))
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():  # rules that only lead back to themselves, or too many at once, are found here
                raise GrammarRefused(_reason(first))
            with self._lock:
                self._kept[key] = matcher
                while len(self._kept) > KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
        return GrammarMask(matcher.deep_copy(), frozenset(ends), self._masks)

    def _tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        if ends not in self._tokenizers:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            tokens = _Tokens(self._vocabulary, self._vocab_size, ends[0])
            self._tokenizers[ends] = LLTokenizer(tokens, n_vocab=self._vocab_size, eos_token=list(ends))  # type: ignore[arg-type]
        return self._tokenizers[ends]

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)


class GrammarMask:
    """One answer's place in its grammar. Implements engine.types.TokenMask.

    The next mask is computed while the forward pass runs: llguidance and torch both let go of the interpreter lock.
    """

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], pool: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._ends = ends
        self._pool = pool
        self._next: Future[np.ndarray] = pool.submit(self._compute)

    def words(self) -> np.ndarray:
        try:
            return self._next.result(MASK_S)
        except FutureTimeout:
            raise MaskFailed(f"the grammar's next mask took over {MASK_S:.0f} s") from None

    def accept(self, token_id: int) -> None:
        if token_id not in self._ends:
            self._next = self._pool.submit(self._advance, token_id)

    def _advance(self, token_id: int) -> np.ndarray:
        self._matcher.consume_token(token_id)
        return self._compute()

    def _compute(self) -> np.ndarray:
        words = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise MaskFailed(f"the grammar is too complex to go on: {_reason(self._matcher)}")
        return np.frombuffer(words, "<u4")


def _reason(matcher: LLMatcher) -> str:
    """Why it failed, in a line."""
    reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "no answer can have this form" if reason == "NoExtensionBias" else reason
