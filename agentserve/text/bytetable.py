"""Bytes of every token id, read once from the tokenizer's decoder.

A token may hold part of a character, so bytes are the only exact form; strings are made in detokenizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer as BaseTokenizer


class HasText(Protocol):
    @property
    def text(self) -> str: ...


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes are moved to U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(b): b for b in printable}
    moved = 0
    for b in range(256):
        if b not in printable:
            table[chr(0x100 + moved)] = b
            moved += 1
    return table


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    kinds = {decoder.get("type", "")}
    for inner in decoder.get("decoders", ()):
        kinds |= _decoder_types(inner)
    return kinds


def byte_table(tokenizer: BaseTokenizer, spec: Mapping[str, Any], markers: Mapping[int, HasText]) -> list[bytes]:
    """Bytes by id, for every id up to the highest one; holes are empty."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    kinds = _decoder_types(spec.get("decoder"))
    added = {t["id"]: t["content"] for t in spec.get("added_tokens") or ()}
    alphabet = _byte_level_alphabet()
    for token, i in vocab.items():
        if i in markers:
            table[i] = markers[i].text.encode()
        elif i in added:
            table[i] = added[i].encode()
        elif "ByteLevel" in kinds:
            table[i] = b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            match = _BYTE_FALLBACK.fullmatch(token)
            table[i] = bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
        else:
            # Whatever the decoder does between two tokens: what this one adds after another.
            both = tokenizer.decode([i, i], skip_special_tokens=False)
            one = tokenizer.decode([i], skip_special_tokens=False)
            table[i] = both[len(one) :].encode() if both.startswith(one) else one.encode()
    return table
