"""Makes the benchmarks' checkpoints: one set of experts on disk, and two models that use it.

random: routes are uniform, the worst case of every cache. programmed: greedy decoding walks a trace with the locality that was
published (see programmed.py). Both are directories in the usual form; experts and everything else that is alike is linked.

    DIR/shared/experts-00.safetensors …    DIR/shared/dense.safetensors
    DIR/random/    DIR/programmed/         config.json, model.safetensors.index.json, own.safetensors, links to shared/
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu.files import Planned, normal, whole, write
from benchmarks.gpu.geometry import Shape
from benchmarks.gpu.programmed import OTHERS, SIZE, Programme
from benchmarks.routing import sources
from benchmarks.routing.trace import Trace

VARIANTS = ("random", "programmed")
THREADS = 8
ROUTES = "routes.npz"
_FORMAT = 1


def programmed_trace(shape: Shape) -> Trace:
    """One long answer with the published locality; the walk goes around."""
    return sources.local(
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        turns=1,
        prompt=0,
        output=shape.states,
        name="programmed",
    )


def place_for(shape: Shape, wanted: Path | None, memory: Path = Path("/dev/shm"), disks: Sequence[Path] | None = None) -> Path:
    """Where the files go: as asked for, or where they are already; else into `memory` if there is room for them and the bank
    as well, else on the first of `disks` (/tmp, /var/tmp, .scratch here) with room.

    Raises OSError if there is none.
    """
    if wanted is not None:
        return wanted
    disks = (Path("/tmp"), Path("/var/tmp"), Path.cwd()) if disks is None else disks
    name, needed = f".scratch/agentserve-bench-{shape.layers}x{shape.experts}", 1.05 * file_bytes(shape)
    roomy = []
    for place in (memory, *disks):
        if (place / name).is_dir():
            return place / name
        if place.is_dir() and shutil.disk_usage(place).free > needed and (place != memory or _available() > 2.5 * needed):
            roomy.append(place / name)
    if not roomy:
        raise OSError(f"{needed / 1e9:.0f} GB are needed, and none of {', '.join(map(str, disks))} has room; name a --dir")
    return roomy[0]


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def file_bytes(shape: Shape) -> int:
    """About what both variants take together."""
    tables = 2 * shape.vocab * shape.hidden * 2
    mixers = shape.layers * shape.hidden * 2 * (shape.conv_dim + 3 * shape.v_heads * shape.d_v)
    return shape.bank_bytes + 2 * tables + mixers


def make(shape: Shape, directory: Path, device: torch.device, tell: Callable[[str], None] = lambda line: None) -> float:
    """Make what is missing. Files are written whole or not at all, so it goes on where it was stopped. Returns GB/s of writing.

    Raises OSError if the disk is too small (nothing is written then).
    """
    (directory / "shared").mkdir(parents=True, exist_ok=True)
    _same(directory / "shape.json", {"format": _FORMAT, **shape.described()})
    trace_path = directory / ROUTES
    if not trace_path.exists():
        tell("choosing routes of the programmed trace")
        trace = programmed_trace(shape)
        trace.save(directory / "routes.part.npz")
        (directory / "routes.part.npz").rename(trace_path)
    jobs = _jobs(shape, directory, device)
    todo = {path: tensors for path, tensors in jobs.items() if not path.exists()}
    needed = sum(planned.nbytes for tensors in todo.values() for planned in tensors.values())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(f"{directory}: {needed / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free")
    began, done = time.perf_counter(), 0
    with ThreadPoolExecutor(THREADS) as pool:
        for path, size in zip(todo, pool.map(lambda item: write(*item), todo.items()), strict=True):
            done += size
            tell(f"wrote {path.parent.name}/{path.name}, {done / 1e9:.1f} of {needed / 1e9:.1f} GB")
    for variant in VARIANTS:
        _link(shape, directory, variant, jobs)
    return done / 1e9 / max(1e-9, time.perf_counter() - began)


def _same(path: Path, described: Mapping[str, int]) -> None:
    if path.exists() and json.loads(path.read_text()) != described:
        raise ValueError(f"{path.parent} holds a checkpoint of another shape; delete it or name another directory")
    path.write_text(json.dumps(described))


def _jobs(shape: Shape, directory: Path, device: torch.device) -> dict[Path, dict[str, Planned]]:
    """Every file and what is in it."""
    shared = directory / "shared"
    jobs = {shared / f"experts-{i:02d}.safetensors": _experts(shape, i, device) for i in range(shape.layers)}
    jobs[shared / "dense.safetensors"] = _dense(shape, device)
    for variant in VARIANTS:
        (directory / variant).mkdir(exist_ok=True)
    jobs[directory / "random" / "own.safetensors"] = _random(shape, device)
    jobs[directory / "programmed" / "own.safetensors"] = _programmed(shape, directory, device)
    return jobs


def _experts(shape: Shape, layer: int, device: torch.device) -> dict[str, Planned]:
    """Scaled so that an expert's output is about a third of its input's size."""
    e, i, h = shape.experts, shape.inter, shape.hidden
    name = f"model.layers.{layer}.mlp.experts"
    return {
        f"{name}.gate_up_proj": normal(1000 + 2 * layer, h**-0.5, device, e, 2 * i, h),
        f"{name}.down_proj": normal(1001 + 2 * layer, i**-0.5, device, e, h, i),
    }


def _dense(shape: Shape, device: torch.device) -> dict[str, Planned]:
    """What both variants have alike: norms (stored minus one), mixers' inputs, shared experts."""
    h, si = shape.hidden, shape.shared_inter
    tensors: dict[str, Planned] = {}
    seed = [2000]

    def random(name: str, *size: int, std: float = h**-0.5) -> None:
        seed[0] += 1
        tensors[name] = normal(seed[0], std, device, *size)

    def filled(name: str, value: float, *size: int) -> None:
        tensors[name] = whole(lambda: torch.full(size, value), *size)

    filled("model.norm.weight", 0.0, h)
    for i, kind in enumerate(shape.kinds()):
        layer = f"model.layers.{i}"
        filled(f"{layer}.input_layernorm.weight", 0.0, h)
        filled(f"{layer}.post_attention_layernorm.weight", 0.0, h)
        if kind == "full_attention":
            random(f"{layer}.self_attn.q_proj.weight", 2 * shape.heads * shape.head_dim, h)
            random(f"{layer}.self_attn.k_proj.weight", shape.kv_heads * shape.head_dim, h)
            random(f"{layer}.self_attn.v_proj.weight", shape.kv_heads * shape.head_dim, h)
            filled(f"{layer}.self_attn.q_norm.weight", 0.0, shape.head_dim)
            filled(f"{layer}.self_attn.k_norm.weight", 0.0, shape.head_dim)
        else:
            name = f"{layer}.linear_attn"
            random(f"{name}.in_proj_qkv.weight", shape.conv_dim, h)
            random(f"{name}.in_proj_z.weight", shape.v_heads * shape.d_v, h)
            random(f"{name}.in_proj_b.weight", shape.v_heads, h)
            random(f"{name}.in_proj_a.weight", shape.v_heads, h)
            random(f"{name}.conv1d.weight", shape.conv_dim, 1, shape.conv_kernel, std=0.5)
            filled(f"{name}.A_log", 0.0, shape.v_heads)
            filled(f"{name}.dt_bias", 1.0, shape.v_heads)
            filled(f"{name}.norm.weight", 1.0, shape.d_v)
        random(f"{layer}.mlp.shared_expert_gate.weight", 1, h)
        random(f"{layer}.mlp.shared_expert.gate_proj.weight", si, h)
        random(f"{layer}.mlp.shared_expert.up_proj.weight", si, h)
        random(f"{layer}.mlp.shared_expert.down_proj.weight", h, si, std=si**-0.5)
    return tensors


def _out_projections(shape: Shape) -> dict[str, tuple[int, int]]:
    out = {}
    for i, kind in enumerate(shape.kinds()):
        if kind == "full_attention":
            out[f"model.layers.{i}.self_attn.o_proj.weight"] = (shape.hidden, shape.heads * shape.head_dim)
        else:
            out[f"model.layers.{i}.linear_attn.out_proj.weight"] = (shape.hidden, shape.v_heads * shape.d_v)
    return out


def _random(shape: Shape, device: torch.device) -> dict[str, Planned]:
    h = shape.hidden
    tensors = {
        "model.embed_tokens.weight": normal(1, 1.0, device, shape.vocab, h),
        "lm_head.weight": normal(2, h**-0.5, device, shape.vocab, h),
    }
    for index, (name, (rows, columns)) in enumerate(_out_projections(shape).items()):
        tensors[name] = normal(100 + index, 0.5 * columns**-0.5, device, rows, columns)
    for i in range(shape.layers):
        tensors[f"model.layers.{i}.mlp.gate.weight"] = normal(200 + i, h**-0.5, device, shape.experts, h)
    return tensors


def _programmed(shape: Shape, directory: Path, device: torch.device) -> dict[str, Planned]:
    from benchmarks.routing.trace import load

    programme = Programme(load(directory / ROUTES), shape.hidden, device)
    h, vocab = shape.hidden, shape.vocab

    def table(seed: int, std: float, write_states: Callable[[torch.Tensor], None]) -> Callable[[], torch.Tensor]:
        def build() -> torch.Tensor:
            generator = torch.Generator(device=device).manual_seed(seed)
            rows = torch.empty(vocab, h, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=generator)
            write_states(rows)
            return rows

        return build

    tensors = {
        "model.embed_tokens.weight": whole(table(3, SIZE, programme.embed), vocab, h),
        "lm_head.weight": whole(table(4, OTHERS, programme.head), vocab, h),
    }
    for name, (rows, columns) in _out_projections(shape).items():
        tensors[name] = whole(lambda size=(rows, columns): torch.zeros(size, dtype=torch.bfloat16), rows, columns)
    for i in range(shape.layers):
        tensors[f"model.layers.{i}.mlp.gate.weight"] = whole(lambda i=i: programme.router(i), shape.experts, h)
    return tensors


def _link(shape: Shape, directory: Path, variant: str, jobs: Mapping[Path, Mapping[str, Planned]]) -> None:
    """Make a variant's directory whole: its config, the index, and links to the shared files."""
    target = directory / variant
    weight_map: dict[str, str] = {}
    for path, tensors in jobs.items():
        if path.parent.name not in ("shared", variant):
            continue
        weight_map |= dict.fromkeys(tensors, path.name)
        if path.parent.name == "shared" and not (target / path.name).exists():
            os.link(path, target / path.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "config.json").write_text(json.dumps(shape.config(), indent=1))
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
