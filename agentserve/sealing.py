"""Texts that a client carries for the server and cannot read or change: thinking (`encrypted_content`) and compactions.

AES-256-GCM under a key of this server, bound to what the text is and to whom it was given. Its state directory keeps the key,
so seals hold across restarts; without that file, what clients carry can no longer be opened.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agentserve.errors import ConfigError, InvalidValue
from agentserve.paths import make_private
from agentserve.protocol.items import Compaction, InputItem, InputText, Item, Message, Reasoning, ReasoningText

KEY_BYTES = 32
_NONCE_BYTES = 12
_VERSION = "as1."
_CONTEXT = "context"
"""Kind of a compaction that was made within a turn."""
_SUMMARY = "Summary of the conversation before this point, which was left out to make room:\n\n"


class Carried(msgspec.Struct, frozen=True):
    """What a compaction carries that was made within a turn: the context that goes on, and whose it is."""

    session: str
    items: tuple[Item, ...]


_carried = msgspec.json.Decoder(Carried)


class Seal:
    """Seals and opens texts of principals."""

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = AESGCM(key or secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: Path) -> Seal:
        """With the key in a file, which is made if it is not there. Raises ConfigError if that cannot be done."""
        try:
            if not path.exists():
                make_private(path, secrets.token_bytes(KEY_BYTES))
            key = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot use key file {path}: {error.strerror}") from error
        if len(key) != KEY_BYTES:
            raise ConfigError(f"key file {path} has {len(key)} bytes, not {KEY_BYTES}; delete it and a new key is made")
        return cls(key)

    def seal(self, principal: str, kind: str, text: str) -> str:
        """An opaque string for this principal. kind: type of the item that carries it."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), _bound(principal, kind))
        return _VERSION + base64.urlsafe_b64encode(nonce + sealed).decode()

    def open(self, principal: str, kind: str, sealed: str) -> str | None:
        """The text; None if this is no seal of ours for this principal and kind, or was changed."""
        if not sealed.startswith(_VERSION):
            return None
        try:
            raw = base64.b64decode(sealed[len(_VERSION) :].encode(), altchars=b"-_", validate=True)
            if _VERSION + base64.urlsafe_b64encode(raw).decode() != sealed:
                return None  # the last letter has bits that mean nothing
            text = self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], _bound(principal, kind))
        except (ValueError, InvalidTag):
            return None
        return text.decode("utf-8", "surrogatepass")

    def seal_context(self, principal: str, carried: Carried) -> str:
        return self.seal(principal, _CONTEXT, msgspec.json.encode(carried).decode())

    def open_context(self, principal: str, sealed: str) -> Carried | None:
        """None if it is no seal of ours, see open."""
        text = self.open(principal, _CONTEXT, sealed)
        return None if text is None else _carried.decode(text)


def _bound(principal: str, kind: str) -> bytes:
    return b"agentserve\0" + kind.encode() + b"\0" + principal.encode()


def summary_message(name: str | None, summary: str) -> Message:
    """A summary as the model sees it. name: id of the compaction."""
    return Message(id=name, role="user", content=(InputText(_SUMMARY + summary),))


def is_summary(item: Message) -> bool:
    """Whether this message is not the user's own but a summary."""
    return item.role == "user" and item.text.startswith(_SUMMARY)


def going_on_from(items: Sequence[InputItem], seal: Seal, principal: str) -> tuple[tuple[Item, ...], str | None]:
    """Items as they are rendered: from what the newest compaction carries on, and the session that this names.

    One that does not open, because the key is another one by now, is passed over: what it stands for is before it.
    """
    for at in range(len(items) - 1, -1, -1):
        item = items[at]
        if isinstance(item, Compaction) and (carried := seal.open_context(principal, item.encrypted_content)) is not None:
            return (*carried.items, *_plain(items[at + 1 :])), carried.session
    return _plain(items), None


def _plain(items: Sequence[InputItem]) -> tuple[Item, ...]:
    return tuple(item for item in items if not isinstance(item, Compaction))


def opened(items: Sequence[InputItem], seal: Seal, principal: str, where: str = "input") -> tuple[InputItem, ...]:
    """Items as they are stored. Sealed thinking gets its text; the compaction of a conversation that a client asked for becomes
    a message with its summary, one that was made within a turn stays (see going_on_from).

    Raises InvalidValue that names the item whose seal does not hold.
    """
    out: list[InputItem] = []
    for i, item in enumerate(items):
        if not isinstance(item, Reasoning | Compaction):
            out.append(item)
            continue
        if not item.encrypted_content:
            if isinstance(item, Compaction):
                raise InvalidValue("missing; accepted: what this server made", f"{where}[{i}].encrypted_content")
            out.append(item)
            continue
        kind = "compaction" if isinstance(item, Compaction) else "reasoning"
        text = seal.open(principal, kind, item.encrypted_content)
        if text is None and kind == "compaction" and seal.open_context(principal, item.encrypted_content) is not None:
            out.append(item)
            continue
        if text is None:
            what = "it was changed, or another server or principal got it; accepted: what this server sent, or leave it out"
            raise InvalidValue(what, f"{where}[{i}].encrypted_content")
        if isinstance(item, Compaction):
            out.append(summary_message(item.id, text))
        elif item.content is None:
            out.append(msgspec.structs.replace(item, content=(ReasoningText(text),)))
        else:
            out.append(item)
    return tuple(out)
