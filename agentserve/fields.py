"""What another API's body asks is checked as a Responses body; what is refused there is named as its own client calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentserve.errors import ApiError


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """names: of Responses fields, in the other API; those that are not in it have the same name in both."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        ours = next((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), None)
        if ours is not None:
            error.param = names[ours] + param[len(ours) :]
        raise
