"""The evaluation's engine: a session that goes on from its kept state says what one that is computed whole says."""

from pathlib import Path

import pytest

from engine.engine import Engine
from examples.demo_model import engine_backend as backend
from examples.demo_model.evaluate import dialogues, evaluate
from examples.demo_model.rows import Encoder

MODEL = Path(__file__).parents[2] / "agentserve" / "demo_model"


@pytest.mark.parametrize("kept", [40, 0])
def test_a_session_goes_on_from_its_kept_state(kept, monkeypatch):
    encoder, restored = Encoder(str(MODEL / "tokenizer.json")), []
    submit = Engine.submit

    def watched(engine, request):
        restored.append(request.restore is not None)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", watched)
    monkeypatch.setattr(backend, "KEPT", kept)
    sessions = dialogues(2, 2, seed=5, shapes=("single",))
    _, counts = evaluate(backend.engine_backend(MODEL, encoder.token("<|im_end|>")), encoder, sessions)
    assert counts["turns"] == counts["answered_right"] == 4
    assert sum(restored) == (len(restored) - len(sessions) if kept else 0)
