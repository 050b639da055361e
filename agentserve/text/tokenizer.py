"""Text ↔ token ids of the served model. No template, no sessions; see renderer.py for what is done with it.

Two rules hold here. Text that came from outside is encoded with every marker of the tokenizer switched off, so a marker
inside it stays ordinary text. And only `encode_batch_fast` is used: it releases the interpreter lock, while `encode` held
it for 255 ms on 400 kB.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer as BaseTokenizer

from agentserve.text.bytetable import byte_table
from agentserve.text.errors import TokenizerError, TooManyTokens

BATCH_CHARS = 1 << 18
"""Characters encoded at a time where a limit holds: the library needs about 200 bytes for each token while it encodes."""
RUN_IDS = 1 << 15
"""Ids made an array of at a time, in about a millisecond: the interpreter lock is held meanwhile."""
CACHE_BYTES = 16 << 20
"""Of the encoding cache: four million ids, fewer where texts are short."""
_ENTRY_BYTES = 270
"""What a text takes there beside its ids: its digest, an array, a place in the dict. Most of what short texts take."""


@dataclass(frozen=True, slots=True)
class Marker:
    """An added token that a template may write. lstrip/rstrip: it swallows the white space beside it."""

    text: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer:
    """One model's tokenizer.

    definition: content of tokenizer.json. config: content of tokenizer_config.json (names of bos, eos …).
    Raises TokenizerError if a marker would still come out of plain text.
    """

    def __init__(self, definition: str, config: Mapping[str, Any] | None = None) -> None:
        try:
            spec = json.loads(definition)
            added = spec.get("added_tokens") or []
            # White space runs are ordinary vocabulary of some tokenizers; everything else that was added is a marker.
            self.markers: Mapping[str, Marker] = {
                t["content"]: Marker(t["content"], t["id"], t["special"], t.get("lstrip", False), t.get("rstrip", False))
                for t in added
                if t["content"].strip()
            }
            # `encode_special_tokens` leaves alone only tokens flagged special, and Qwen's <tool_call> is not one of them.
            for token in added:
                token["special"] = bool(token["content"].strip())
            self._plain = BaseTokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()
        self.config: Mapping[str, Any] = dict(config or {})
        self.vocab_size: int = self._plain.get_vocab_size(with_added_tokens=True)
        self.marker_by_id: Mapping[int, Marker] = {m.id: m for m in self.markers.values()}
        self._bytes = byte_table(self._plain, spec, self.marker_by_id)
        self._texts: dict[int, str | None] = {}
        self._unmarked: dict[int, str | None] = {}
        """Of tokens that were asked for."""
        self._cache: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self.kept_bytes = 0
        """What the encoding cache takes now."""
        self._lock = threading.Lock()
        self._anchor: np.ndarray | None = None
        self._anchor = self._find_anchor()
        self._broken = self._find_broken()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and, if there, tokenizer_config.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing; only models with a tokenizer.json are supported")
        config_path = directory / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        return cls(path.read_text(encoding="utf-8"), config)

    def special(self, name: str) -> str | None:
        """Text of `bos_token`, `eos_token` … as the config has it."""
        value = self.config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def marker_ids(self, *texts: str) -> tuple[int, ...]:
        """Ids of those texts that are one token here."""
        return tuple(self.markers[t].id for t in texts if t in self.markers)

    @property
    def control_ids(self) -> list[int]:
        """Ids of all markers."""
        return sorted(self.marker_by_id)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, which may be part of a character; empty for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str | None:
        """Text of one token, None if it has bytes of an unfinished or broken character."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def plain_text(self, token_id: int) -> str | None:
        """The same of a token that is no marker either; None for a marker. A look-up where each streamed token passes."""
        try:
            return self._unmarked[token_id]
        except KeyError:
            text = self._unmarked[token_id] = None if token_id in self.marker_by_id else self.token_text(token_id)
            return text

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, markers included; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", "replace")

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str], limit: int | None = None) -> list[np.ndarray]:
        """Encode each text on its own, with markers as plain text. Returns uint32 arrays (shared: do not write).

        Raises TooManyTokens as soon as it is sure that they are more than `limit` together.
        """
        digests = [xxhash.xxh3_128_digest(t.encode("utf-8", "surrogatepass")) for t in texts]
        missing: dict[bytes, str] = {}
        with self._lock:
            found = {d: self._cache[d] for d in digests if d in self._cache}
        for digest, text in zip(digests, texts, strict=True):
            if digest not in found:
                missing[digest] = text
        if missing:
            left = None if limit is None else limit - sum(map(len, found.values()))
            try:
                found.update(zip(missing, self._encode(list(missing.values()), left), strict=True))
            except TooManyTokens as error:
                raise TooManyTokens(error.tokens + (limit or 0) - (left or 0)) from None
        with self._lock:
            for digest, ids in found.items():
                self._keep(digest, ids)
        return [found[d] for d in digests]

    def _keep(self, digest: bytes, ids: np.ndarray) -> None:
        old = self._cache.pop(digest, None)
        self._cache[digest] = ids
        self.kept_bytes += _weight(ids) - (0 if old is None else _weight(old))
        while self.kept_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self.kept_bytes -= _weight(dropped)

    def _encode(self, texts: list[str], limit: int | None) -> list[np.ndarray]:
        pieces: list[str] = []
        counts: list[int] = []
        for text in texts:
            # A lone surrogate has no UTF-8; JSON can carry one.
            clean = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
            parts = self._break_up(clean)
            pieces += parts
            counts.append(len(parts))
        ids = self._encode_raw(pieces) if limit is None else self._encode_within(pieces, limit)
        out: list[np.ndarray] = []
        at = 0
        for count in counts:
            run = ids[at : at + count]
            out.append(run[0] if count == 1 else np.concatenate(run) if run else np.empty(0, np.uint32))
            at += count
        for array in out:
            array.flags.writeable = False
        return out

    def _encode_within(self, pieces: list[str], limit: int) -> list[np.ndarray]:
        """Like _encode_raw, a batch at a time; what is far too long costs no more memory than what just fits."""
        out: list[np.ndarray] = []
        count = start = 0
        while start < len(pieces):
            end, chars = start + 1, len(pieces[start])
            while end < len(pieces) and chars + len(pieces[end]) <= BATCH_CHARS:
                chars += len(pieces[end])
                end += 1
            if chars > BATCH_CHARS:
                self._refuse_long(pieces[start], limit - count, count)
            batch = self._encode_raw(pieces[start:end])
            out += batch
            count += sum(map(len, batch))
            if count > limit:
                raise TooManyTokens(count)
            start = end
        return out

    def _refuse_long(self, text: str, limit: int, before: int) -> None:
        """Count a long text by its parts, which are a few tokens more than the whole at each cut."""
        count = 0
        for start in range(0, len(text), BATCH_CHARS):
            count += max(0, len(self._encode_raw([text[start : start + BATCH_CHARS]])[0]) - 16)
            if count > limit:
                raise TooManyTokens(before + count)

    def _encode_raw(self, pieces: list[str]) -> list[np.ndarray]:
        anchor = self._anchor
        if anchor is None:
            batch = self._plain.encode_batch_fast(pieces, add_special_tokens=False)
            return [_array(e.ids) for e in batch]
        batch = self._plain.encode_batch_fast(["\n" + p for p in pieces], add_special_tokens=False)
        out = [_array(e.ids) for e in batch]
        n = len(anchor)
        return [a[n:] if np.array_equal(a[:n], anchor) else a for a in out]

    def _find_anchor(self) -> np.ndarray | None:
        """Ids of a line break if this tokenizer puts a space before the start of a text, else None.

        Such a tokenizer must see every text after something, because all our texts are pieces of a longer one.
        """
        newline, alone, after = self._encode_raw(["\n", "a", "\na"])
        if np.array_equal(after[len(newline) :], alone):
            return None
        return newline

    def _find_broken(self) -> re.Pattern[str] | None:
        """Markers that plain text would still produce (their text is also a word of the model): cut in two before encoding."""
        texts = list(self.markers)
        encoded = self._encode_raw(texts) if texts else []
        guilty = [t for t, ids in zip(texts, encoded, strict=True) if self.markers[t].id in ids.tolist()]
        if any(len(t) < 2 for t in guilty):
            short = next(t for t in guilty if len(t) < 2)
            raise TokenizerError(
                f"marker {short!r} is one character of plain text; contents cannot be told from control tokens"
            )
        if not guilty:
            return None
        return re.compile("|".join(re.escape(t) for t in sorted(guilty, key=len, reverse=True)))

    def _break_up(self, text: str) -> list[str]:
        if self._broken is None:
            return [text]
        pieces: list[str] = []
        start = 0
        for match in self._broken.finditer(text):
            middle = match.start() + 1
            pieces.append(text[start:middle])
            start = middle
        pieces.append(text[start:])
        return pieces


def _weight(ids: np.ndarray) -> int:
    return ids.nbytes + _ENTRY_BYTES


def _array(ids: list[int]) -> np.ndarray:
    if len(ids) <= RUN_IDS:
        return np.array(ids, np.uint32)
    return np.concatenate([np.array(ids[at : at + RUN_IDS], np.uint32) for at in range(0, len(ids), RUN_IDS)])
