"""From a checkpoint to a model on the device: what goes where, how much of each, and why, said in one line each."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from engine import budget
from engine.config import EngineConfig, Machine
from engine.device.base import Device
from engine.device.host import HostDevice
from engine.elastic.boundary import Divided
from engine.elastic.memory import ElasticMemory, FixedMemory, Memory
from engine.elastic.plan import Bounds, Sizes, chunk_size
from engine.errors import DeviceError, OutOfDeviceMemory, Unsupported
from engine.gpu import calibrate
from engine.gpu.experts import ExpertPool
from engine.gpu.model import GpuModel
from engine.gpu.weights import device_bytes, to_device
from engine.models.base import ModelSpec
from engine.models.decoder import Decoder
from engine.moe import profile
from engine.moe.cost import ASSUMED, Rates
from engine.moe.host_bank import HostBank
from engine.moe.layer import Moe

log = logging.getLogger(__name__)
QUICK_SECONDS = 0.15
"""Of each measurement at the start; `agentserve calibrate` takes longer."""
CHUNK_ROWS = 2048
"""Tokens of a pass that go through one layer's operators together: bounds activations at about 30 kB a token."""
OPERATIONS = (
    *("gather", "add_norm", "linear", "silu_mul", "gated_norm", "attend_prepare", "decode_scratch", "decode_attention"),
    *("prefill_attention", "conv", "delta", "route", "admit", "fetch", "slot_experts", "publish", "wait_reply", "merge"),
    *("union", "group", "grouped_experts", "stamp", "begin", "guess"),
)
"""What a set of kernels must have; kernels/plain/ says what each does."""
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """config: with every size decided. lines: what was decided and why, for people. divided: memory that can change hands."""

    model: GpuModel
    config: EngineConfig
    lines: tuple[str, ...]
    divided: Divided


def open_device(config: EngineConfig) -> Device:
    """Raises Unsupported if there is none."""
    if config.host_device:
        return HostDevice(config.host_seed, config.vram_bytes)
    from engine.device.cuda import CudaDevice

    return CudaDevice()


def unusable() -> str | None:
    """Why the cuda backend cannot run here, None if it can."""
    try:
        open_device(EngineConfig(backend="cuda"))
        choose_kernels(EngineConfig(backend="cuda"))
    except Unsupported as error:
        return str(error)
    return None


def choose_kernels(config: EngineConfig) -> ModuleType:
    """Raises Unsupported if Triton is asked for and not installed, or lacks an operation."""
    name = config.kernels
    if name is None:
        name = "plain" if config.host_device else "triton"
    if name == "plain":
        return importlib.import_module("engine.kernels.plain")
    if importlib.util.find_spec("triton") is None:
        raise Unsupported("device: 'cuda' needs the package triton, which is not installed: pip install 'agentserve[cuda]'")
    ops = importlib.import_module("engine.kernels.triton")
    missing = [operation for operation in OPERATIONS if not hasattr(ops, operation)]
    if missing:
        raise Unsupported(f"device: the Triton kernels lack {', '.join(missing)}")
    return ops


def place(decoder: Decoder, bank: HostBank | None, config: EngineConfig, device: Device, tell: Progress) -> PlacedModel:
    """Put a loaded model on the device. Raises OutOfDeviceMemory, saying what did not fit, or Unsupported."""
    ops = choose_kernels(config)
    spec = decoder.spec
    memory = device.memory()
    allowed = budget.vram_budget(memory.free, memory.total, config.vram_bytes)
    dense = device_bytes(decoder)
    max_context = context_limit(spec, config)
    tokens = budget.pass_tokens(allowed, pass_token_bytes(spec), max_context)
    if config.pass_tokens is not None:
        tokens = config.pass_tokens
    chunk = min(CHUNK_ROWS, tokens)
    workspace = tokens * pass_token_bytes(spec) + (chunk + config.max_rows) * chunk_row_bytes(decoder)
    workspace += 2 * config.max_rows * spec.vocab_size * 4 + 2 * max_context * decoder.rope.rotated * 2
    if allowed < dense + workspace:
        raise OutOfDeviceMemory("weights that every token reads, and workspaces", dense + workspace, allowed)
    experts = 0 if bank is None else bank.rows
    sizes = budget.device_sizes(
        budget_bytes=allowed - dense - workspace,
        record_bytes=0 if bank is None else bank.record.nbytes,
        experts=experts,
        top_k=spec.top_k,
        layers=len(moe_layers(decoder)),
        kv_token_bytes=budget.kv_token_bytes(spec),
        state_row_bytes=budget.state_row_bytes(spec),
        page_size=config.page_size,
        max_rows=config.max_rows,
        max_context=max_context,
        kv_tokens=_given(config.kv_tokens),
        snapshot_rows=_given(config.snapshot_rows),
        slots=_given(config.slots),
        spare_rows=config.spare_rows,
    )
    decided = replace(
        config,
        chunk_tokens=tokens,
        step_tokens=tokens,
        pass_tokens=tokens,
        kv_tokens=sizes.pages * config.page_size,
        snapshot_rows=sizes.snapshot_rows,
        max_context=sizes.max_context,
    )
    try:
        tell(0.75, "copying weights to the device")
        moved = to_device(decoder, device.torch_device)
        pool = None
        if bank is not None and sizes.slots < experts:
            bank.pin(device, config.pin_bytes, lambda done, what: tell(0.75 + 0.15 * done, what))
        divided = Sizes(sizes.slots, sizes.pages)
        shared = reserve(device, spec, config, divided, bank, budget.vram_budget(memory.total, memory.total, config.vram_bytes))
        if bank is not None:
            per_layer = experts // len(moe_layers(decoder))
            rates = ASSUMED
            if sizes.slots < experts:
                tell(0.9, "measuring link and CPU")
                rates = find_rates(device, ops, bank, config)
            mode = config.expert_mode
            pool = ExpertPool(
                device,
                bank,
                shared.slots,
                per_layer,
                spec.top_k,
                config.max_rows,
                config.slot_policy,
                rates,
                mode,
                sizes.slots,
                config.divide_experts,
            )
            moved = replace(moved, spec=replace(moved.spec, slots=None if pool.resident else pool.slots))
    except torch.OutOfMemoryError as error:
        free = device.memory().free
        raise OutOfDeviceMemory(f"loading the model ({_first_line(error)})", dense + workspace, free) from error
    model = GpuModel(
        moved,
        device,
        ops,
        pool,
        max_rows=config.max_rows,
        max_context=sizes.max_context,
        pass_tokens=tokens,
        chunk_rows=chunk,
        memory=shared,
    )
    lines = _lines(device, memory.free, memory.total, allowed, config, dense, workspace, bank, pool, sizes, tokens, spec)
    watch = config.elastic == "auto" and shared.fixed is None
    trade = watch and config.slots == config.kv_tokens == "auto"  # a size that was set is not changed for what it is worth
    return PlacedModel(model, decided, lines, Divided(shared, divided, pool, device, watch, trade))


def reserve(
    device: Device, spec: ModelSpec, config: EngineConfig, sizes: Sizes, bank: HostBank | None, most_bytes: int
) -> Memory:
    """Memory for slots and pages, able to change hands where device and settings let it. most_bytes: what they could have if
    nobody else used the device. Raises OutOfDeviceMemory."""
    record = 0 if bank is None else bank.record.nbytes
    page = config.page_size * budget.kv_token_bytes(spec)
    try:
        if config.elastic == "off":
            raise Unsupported("engine.elastic is off")
        virtual = device.virtual()
    except Unsupported as error:
        log.info("slots and pages keep their memory reason=%s", error)
        bounds = Bounds(record, page, 1, min(sizes.slots, max(1, spec.top_k)), sizes.slots, 1, sizes.pages)
        return FixedMemory(device, bounds, str(error))
    chunk = chunk_size(virtual.granularity, record or page)
    resident = bank is not None and sizes.slots >= bank.rows
    most_slots = sizes.slots
    if bank is not None and config.slots == "auto":
        most_slots = max(sizes.slots, min(bank.rows, most_bytes // record))
    most_pages = max(sizes.pages, config.max_rows * -(-context_limit(spec, config) // config.page_size))
    if page:
        most_pages = max(sizes.pages, min(most_pages, most_bytes // page))
    bounds = Bounds(
        record_bytes=record,
        page_bytes=page,
        chunk_bytes=chunk,
        least_slots=sizes.slots if resident else min(sizes.slots, max(1, spec.top_k)),
        most_slots=most_slots,
        least_pages=min(sizes.pages, -(-context_limit(spec, config) // config.page_size)),
        most_pages=most_pages,
    )
    return ElasticMemory(device, virtual, bounds, sizes)


def context_limit(spec: ModelSpec, config: EngineConfig) -> int:
    return spec.max_context if config.max_context == "auto" else min(config.max_context, spec.max_context)


def find_rates(device: Device, ops: ModuleType, bank: HostBank, config: EngineConfig) -> Rates:
    """From the file of measured rates, or measured now and put there; assumed where neither can be."""
    if config.rates is None:
        return ASSUMED
    threads = int(config.resolve(Machine.here()).threads)
    name = str(bank.record.dtype).removeprefix("torch.")
    machine, record = profile.machine_key(device.name, threads), profile.record_key(bank.record.hidden, bank.record.inter, name)
    known = profile.load(config.rates, machine, record)
    if known is not None:
        return known
    try:
        rates = calibrate.measure(device, ops, bank, HostDevice(), QUICK_SECONDS)
    except DeviceError as error:
        log.warning("rates could not be measured and are assumed reason=%s", error)
        return ASSUMED
    try:
        profile.save(config.rates, machine, record, rates)
    except OSError as error:
        log.warning("measured rates could not be kept file=%s error=%s", config.rates, error)
    return rates


def moe_layers(decoder: Decoder) -> list[Moe]:
    return [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Moe)]


def pass_token_bytes(spec: ModelSpec) -> int:
    """Activations kept for each token of a pass: residual, the norm of it, a mixer's result, its experts."""
    return spec.hidden * (4 + 2 * spec.dtype.itemsize) + 12 * spec.top_k + 16


def chunk_row_bytes(decoder: Decoder) -> int:
    """Activations of each token of a chunk, over all operators: buffers are shared by layers, not by operators."""
    item = decoder.spec.dtype.itemsize
    widest = 0
    for layer in decoder.layers:
        mixer = layer.mixer
        stacked = mixer.qkv if hasattr(mixer, "qkv") else mixer.project  # type: ignore[union-attr]
        row = stacked.weight.shape[0] + 3 * mixer.out.weight.shape[1] + 4 * mixer.out.weight.shape[0]
        if isinstance(layer.mlp, Moe):
            inter = layer.mlp.bank.down.shape[2]
            row += layer.mlp.router.top_k * (inter + decoder.spec.hidden) + 4 * layer.mlp.router.scores.weight.shape[0]
            row += 0 if layer.mlp.shared is None else 3 * layer.mlp.shared.down.shape[1]
        else:
            row += 3 * layer.mlp.down.shape[1]
        widest = max(widest, row)
    return widest * max(item, 4) // 2 * 2


def _lines(
    device: Device,
    free: int,
    total: int,
    allowed: int,
    config: EngineConfig,
    dense: int,
    workspace: int,
    bank: HostBank | None,
    pool: ExpertPool | None,
    sizes: budget.DeviceSizes,
    tokens: int,
    spec: ModelSpec,
) -> tuple[str, ...]:
    why = "as set" if config.vram_bytes is not None else "what is free, less a reserve"
    lines = [
        f"device: {device.name}, {_gb(free)} of {_gb(total)} free; budget {_gb(allowed)} ({why})",
        f"weights: {_gb(dense)} that every token reads; workspaces {_gb(workspace)} for passes of {tokens} tokens",
    ]
    kv_bytes = sizes.pages * config.page_size * budget.kv_token_bytes(spec)
    rows = config.max_rows + config.spare_rows + sizes.snapshot_rows
    given = "as set" if config.kv_tokens != "auto" else "one agent's context first, then experts, then more contexts"
    lines.append(
        f"state: KV for {sizes.pages * config.page_size} tokens ({_gb(kv_bytes)}; {given}), contexts up to {sizes.max_context}"
        + (f", {rows} recurrent states" if budget.state_row_bytes(spec) else "")
    )
    if bank is not None and pool is not None:
        size = _gb(pool.slots * bank.record.nbytes)
        share = f"{pool.slots} of {bank.rows} experts ({100 * pool.slots // bank.rows}%, {size}) on the device"
        if pool.resident:
            lines.append(f"experts: all {bank.rows} on the device ({_gb(bank.rows * bank.record.nbytes)})")
        else:
            rates = pool.split.rates
            known = "assumed" if rates == ASSUMED else "measured"
            fetched, taken = pool.split.table("hybrid", 1)[spec.top_k]
            pinned = f"{_gb(bank.pinned_rows * bank.record.nbytes)} of {_gb(bank.nbytes)} pinned"
            lines.append(f"experts: {share}; the host holds all of them, {pinned}")
            lines.append(
                f"rates, {known}: link {rates.link_mbs / 1000:.1f} GB/s, CPU {rates.cpu_mbs / 1000:.1f} GB/s, together "
                f"{rates.both_link_mbs / 1000:.1f} + {rates.both_cpu_mbs / 1000:.1f}; of {spec.top_k} misses of a token "
                f"{fetched} are fetched, and {taken} of {bank.record.inter} inner rows of the others are read over the link"
            )
    return tuple(lines)


def _given(value: int | str | None) -> int | None:
    return value if isinstance(value, int) else None


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
