"""A context that comes back belongs to the session that it began, also after an upgrade: these ids are in databases."""

from __future__ import annotations

from agentserve.normalise import Normalisers
from agentserve.protocol.items import InputText, Message
from agentserve.session_ids import begun_session, conversation_session, named_session


def said(role: str, text: str) -> Message:
    return Message(role=role, content=(InputText(text),))  # type: ignore[arg-type]


def test_ids_are_those_that_were_stored() -> None:
    items = (said("developer", "d"), said("user", "u"), said("user", "later"))
    assert begun_session("p", "i", items, Normalisers()) == "ses_ee2a336b4e36deb8e2ff416fe8cce9"
    assert named_session("p", "key:k") == "ses_02aff65719398addad0dfdfc03af8d"
    assert conversation_session("p", "conv_1") == "ses_0937f237d60bd274f216dcc76f9aea"


def test_a_context_is_known_by_what_comes_up_to_its_first_user_message() -> None:
    first = (said("developer", "d"), said("user", "u"))
    begun = begun_session("p", "i", first, Normalisers())
    assert begun_session("p", "i", (*first, said("user", "more")), Normalisers()) == begun
    others = [("q", "i", first), ("p", "j", first), ("p", "i", (said("developer", "d"), said("user", "v")))]
    assert begun not in [begun_session(principal, text, items, Normalisers()) for principal, text, items in others]
