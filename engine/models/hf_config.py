"""Typed access to config.json, with the field's name in every error. transformers leaves out fields that equal its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError, Unsupported


class HfConfig:
    """The part of config.json that describes the text model (`text_config` where it is nested).

    generation: generation_config.json, which overrides the end-of-sequence ids.
    """

    def __init__(self, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> None:
        nested = config.get("text_config")
        self.fields: dict[str, Any] = dict(nested) if isinstance(nested, Mapping) else dict(config)
        for key in ("eos_token_id", "tie_word_embeddings"):
            if self.fields.get(key) is None and config.get(key) is not None:
                self.fields[key] = config[key]
        self._generation = generation or {}

    def integer(self, name: str, default: int | None = None, at_least: int = 1) -> int:
        """Raises CheckpointError if it is missing (and has no default), no integer, or too small."""
        value = self.fields.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise CheckpointError(f"config.json: {name}: got {value!r}, accepted: an integer of at least {at_least}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json: {name}: got {value!r}, accepted: a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        return default if value is None else bool(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.fields.get(name)
        return tuple(value) if isinstance(value, list) else ()

    def require(self, name: str, default: str, accepted: str) -> None:
        """Raises Unsupported unless the field has the one value that is built."""
        value = self.fields.get(name) or default
        if value != accepted:
            raise Unsupported(f"config.json: {name} {value!r}; supported: {accepted!r}")

    def check_heads(self, heads: int, shared: int, name: str, shared_name: str) -> None:
        """Raises CheckpointError unless every one of the shared heads serves the same number of heads."""
        if heads % shared:
            raise CheckpointError(f"config.json: {name}: got {heads}, accepted: a multiple of {shared_name} ({shared})")

    def check_top_k(self, top_k: int, experts: int) -> None:
        if top_k > experts:
            raise CheckpointError(f"config.json: num_experts_per_tok: got {top_k}, accepted: at most num_experts ({experts})")

    def eos_token_ids(self) -> tuple[int, ...]:
        """From generation_config.json, else config.json; empty if neither says."""
        value = self._generation.get("eos_token_id")
        value = self.fields.get("eos_token_id") if value is None else value
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)
