"""Other block sizes for kernels of prefill, to time beside those that config.py chose: `benchmarks.gpu.kernels --variants`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.gpu.kernel_cases import Case
from engine.kernels.triton import config
from engine.kernels.triton.config import Tile


@dataclass(frozen=True, slots=True)
class Variant:
    """settings: names in config.py and what stands there instead. cases: a part of the names of those it is for."""

    label: str
    cases: str
    settings: dict[str, object]


def _attention(rows: int, keys: int, warps: int, stages: int) -> Variant:
    tile = Tile(rows, keys, 0, warps, stages)
    return Variant(f"{rows}x{keys} w{warps} s{stages}", "prefill_attention", {"attention": lambda *_: tile})


def _splits(tokens: int, number: int) -> Variant:
    return Variant(f"{number} parts", f"prefill_attention {tokens}", {"prefill_splits": lambda _: number})


def _scan(columns: int, warps: int, stages: int) -> Variant:
    tile = Tile(0, columns, 0, warps, stages)
    return Variant(f"scan {columns} w{warps} s{stages}", "delta ", {"delta_scan": lambda *_: tile})


VARIANTS = [
    _attention(128, 32, 8, 3),
    _attention(128, 32, 8, 4),
    _attention(64, 64, 4, 2),
    _attention(64, 32, 4, 2),
    _attention(64, 32, 8, 2),
    *(_splits(64, number) for number in (8, 16, 32, 64)),
    *(_splits(256, number) for number in (2, 4, 8)),
    *(_splits(1024, number) for number in (1, 2)),
    _scan(64, 4, 3),
    _scan(32, 2, 3),
    _scan(32, 4, 2),
    _scan(16, 4, 3),
    Variant("prepare w8", "delta ", {"DELTA_PREPARE_WARPS": 8}),
]


def with_variants(copies: Sequence[Case]) -> Iterator[tuple[Variant | None, list[Case]]]:
    """A case's copies as they are, then once for every variant of it, with the variant's label in the name."""
    yield None, list(copies)
    for variant in VARIANTS:
        if variant.cases in copies[0].name and not copies[0].name.endswith(("t1", "t4")):
            yield variant, [replace(copy, name=f"{copy.name} [{variant.label}]") for copy in copies]


@contextmanager
def applied(variant: Variant | None) -> Iterator[None]:
    """Within it config.py says what the variant does."""
    settings = {} if variant is None else variant.settings
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
