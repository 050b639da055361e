"""Weight formats by name, and which one serves a checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError, Unsupported
from engine.quant.base import Format

FORMATS: Mapping[str, str] = {"bf16": "engine.quant.bf16", "f32": "engine.quant.f32"}
_BY_DTYPE = {"bfloat16": "bf16", "float32": "f32"}
_BY_STORED = {"BF16": "bf16", "F32": "f32"}


def get(name: str) -> Format:
    """Raises Unsupported, listing what is registered."""
    if name not in FORMATS:
        raise Unsupported(f"weight format {name!r} is unknown; known: {', '.join(sorted(FORMATS))}")
    return importlib.import_module(FORMATS[name]).FORMAT


def choose(config: Mapping[str, Any], stored_dtype: str, wanted: str) -> Format:
    """The format for a checkpoint. stored_dtype: of its embedding. wanted: EngineConfig.dtype.

    Raises Unsupported if the checkpoint is quantized in a way that is not registered, CheckpointError for a dtype that is not.
    """
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "?") if isinstance(quantized, Mapping) else quantized
        raise Unsupported(f"config.json: quantization_config {method!r}; supported formats: {', '.join(sorted(FORMATS))}")
    if wanted != "auto":
        return get(_BY_DTYPE[wanted])
    if stored_dtype not in _BY_STORED:
        raise CheckpointError(f"weights are stored as {stored_dtype}, accepted: {', '.join(_BY_STORED)}")
    return get(_BY_STORED[stored_dtype])
