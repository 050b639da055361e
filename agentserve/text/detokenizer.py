"""Incremental ids → text. Holds back bytes of an unfinished character; loses nothing."""

from __future__ import annotations

import codecs

from agentserve.text.tokenizer import Tokenizer


class Detokenizer:
    """One stream. `push` returns the characters that are complete, `flush` the rest (broken UTF-8 as U+FFFD).

    unfinished: bytes are held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.unfinished = False

    def push(self, token_id: int) -> str:
        if not self.unfinished:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self.unfinished = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.unfinished = False
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
