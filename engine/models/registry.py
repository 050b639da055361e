"""Which file serves which HF model_type. Modules are imported only when a checkpoint asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import CheckpointError
from engine.models.decoder import Decoder
from engine.models.hf_config import HfConfig
from engine.weights.loader import Weights

Build = Callable[[HfConfig, Weights], Decoder]

MODELS: Mapping[str, str] = {
    "qwen3_moe": "engine.models.qwen3_moe",
    "qwen3_5_moe": "engine.models.qwen3_5_moe",
    "qwen3_5_moe_text": "engine.models.qwen3_5_moe",
}


def find(config: Mapping[str, Any]) -> tuple[str, Build]:
    """The model_type of a config.json and the function that builds it.

    Raises CheckpointError, listing what is registered, for any other model_type or none.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise CheckpointError(f"config.json: model_type {model_type!r} is unknown; known: {', '.join(sorted(MODELS))}")
    return model_type, importlib.import_module(MODELS[model_type]).build
