"""What is computed before the engine is ready compiles every kernel that prompts and batches of other shapes will meet."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from engine.batch import StateCut
from engine.kernels.triton import base
from tests.engine.checkpoints import Lane, make, save, step
from tests.engine.gpu.models import device_pools, offloaded, tokens

PAGE, PAGES, ROWS, LONGEST = 16, 1024, 12, 1024


class Kinds:
    """Stands for Triton's launching and computes nothing: which kernels would have been compiled, and for what."""

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def __call__(self, kernel, grid: tuple[int, ...], *args: object, **options: object) -> None:
        plain = set(kernel.kwargs["do_not_specialize"] or ())
        kinds = [
            tuple(base._kinds((value,))) if name not in plain or not isinstance(value, int) else "int"
            for name, value in zip(kernel.arg_names, args, strict=False)
        ]
        self.seen.add((kernel.__name__, *sorted(options.items()), *zip(kernel.arg_names, kinds, strict=False)))


@pytest.fixture
def kinds(monkeypatch) -> Kinds:
    found = Kinds()
    monkeypatch.setattr(base, "_launches", found)
    monkeypatch.setattr(base, "reuse_compiled", True)
    return found


def told(new: set[tuple[object, ...]]) -> str:
    return "\n".join(str(one) for one in sorted(new, key=str))


@pytest.mark.parametrize(("model_type", "slots"), [("qwen3_5_moe", 7), ("qwen3_moe", 16)])
def test_nothing_is_compiled_after_the_rehearsal(model_type, slots, kinds, tmp_path):
    rng = random.Random(slots)
    where = save(make(model_type, dtype=torch.bfloat16, max_position_embeddings=4096, num_attention_heads=16), tmp_path)
    with offloaded(where, kernels="triton", slots=slots, max_context=4096, pass_tokens=LONGEST) as model:
        own = device_pools(model, pages=PAGES, page_size=PAGE, rows=ROWS)
        with torch.inference_mode():
            model.warm_up(own, own)
            model.rehearse(own, own, LONGEST)
        known = set(kinds.seen)
        assert known
        for _ in range(20):
            lanes = [Lane(range(256 * i, 256 * i + 256), i) for i in range(rng.choice((1, 1, 2, 3)))]
            for turn in range(3):
                work, cuts, room = [], [], LONGEST
                for lane in lanes:
                    most = min(room - 4, 4000 - lane.context, rng.choice((2, 7, 70, 700)))
                    length = rng.randint(2, max(2, most))  # one token is a decode step: a graph that was captured
                    room -= length
                    lane.pages = range(lane.pages[0], lane.pages[0] + -(-(lane.context + length) // PAGE))
                    work.append((lane, tokens(length, turn)))
                    at = sorted(rng.sample(range(1, length + 1), min(length, rng.choice((0, 0, 1, 2)))))
                    cuts.append([StateCut(offset, 8 + i) for i, offset in enumerate(at)])
                step(model, own, work, cuts)
                new = kinds.seen - known
                assert not new, f"{[(lane.context, len(ids)) for lane, ids in work]}:\n{told(new)}"
