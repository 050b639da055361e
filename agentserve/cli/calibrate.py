"""`agentserve calibrate`: measure what decides where experts are computed, and keep it in the state directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentserve.cli import options, shapes

if TYPE_CHECKING:
    from engine.moe.host_bank import Record

DEFAULT_GEOMETRY = (2048, 512)
"""Hidden size and experts' width of Qwen3.6-35B-A3B."""


def calibrate(
    config: options.ConfigFile = None,
    model: options.Model = None,
    state_dir: options.StateDir = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for experts, 0 = all cores.")] = None,
    seconds: Annotated[float, typer.Option(help="For each measurement.", min=0.01)] = 1.0,
    memory_mb: Annotated[int, typer.Option(help="Host memory to measure with, in MiB.", min=1)] = 2048,
) -> None:
    """Measure the link to the device alone, the CPU alone and both together, for each weight format.

    `serve` reads what is found here. The model's experts decide the sizes: name the one that will be served.
    """
    flags = {"model.dir": model, "state_dir": state_dir, "model.threads": threads}
    chosen = options.settings(config, flags)
    from engine.config import EngineConfig, Machine
    from engine.device.host import HostDevice
    from engine.errors import EngineError
    from engine.gpu import calibrate as measuring
    from engine.gpu.load import choose_kernels, open_device
    from engine.kernels import cpu
    from engine.moe import profile

    try:
        asked = records(Path(chosen.model.dir) if model is not None or chosen.model.dir else None)
    except (EngineError, TypeError, ValueError) as error:
        options.fail(f"--model: {error}", status=2)
    device, why = None, ""
    settings = EngineConfig(backend="cuda")
    try:
        device, ops = open_device(settings), choose_kernels(settings)
    except EngineError as error:
        why, ops = str(error).removeprefix("device: got 'cuda', but "), None
    used = chosen.model.threads or Machine.here().threads(device is not None)
    if cpu.available():
        cpu.set_threads(used)
    typer.echo(f"device: {device.name if device is not None else f'none ({why})'}")
    typer.echo(
        f"CPU: {shapes.many(used, 'thread')}, {f'instruction set {cpu.isa()}' if cpu.available() else 'torch, which is slow'}"
    )
    path = Path(chosen.state_dir) / "rates.json"
    machine = profile.machine_key(None if device is None else device.name, used)
    for name, record in asked:
        typer.echo(f"{name}: experts of {record.hidden} x {record.inter}, {record.nbytes / 1e6:.1f} MB each")
        if device is None or ops is None:
            rates = measuring.cpu_only(record, HostDevice(), seconds, memory_mb << 20)
            measured = {key: getattr(rates, key) for key in ("cpu_mbs", "handoff_ns", "cpu_tokens")}
            typer.echo(f"  CPU alone: {rates.cpu_mbs / 1000:.1f} GB/s, hand-off {rates.handoff_ns / 1000:.0f} µs")
            typer.echo(f"  CPU: {shapes.many(rates.cpu_tokens, 'token')} of an expert while it is read")
            typer.echo("  not measured: the link alone, link and CPU together, the device's memory: there is no device")
        else:
            bank = measuring.synthetic_bank(record, memory_mb << 20)
            bank.pin(device, None, lambda fraction, what: None)
            try:
                rates = measuring.measure(
                    device, ops, bank, HostDevice(), seconds, lambda what: typer.echo(f"  measuring {what}")
                )
            finally:
                bank.unpin(device)
            measured = asdict(rates)
            typer.echo(f"  link alone: {rates.link_mbs / 1000:.1f} GB/s by kernels, {rates.copy_mbs / 1000:.1f} by copy engine")
            typer.echo(f"  CPU alone: {rates.cpu_mbs / 1000:.1f} GB/s, hand-off {rates.handoff_ns / 1000:.0f} µs")
            typer.echo(f"  CPU: {shapes.many(rates.cpu_tokens, 'token')} of an expert while it is read")
            typer.echo(f"  together: {rates.both_link_mbs / 1000:.1f} + {rates.both_cpu_mbs / 1000:.1f} GB/s")
            typer.echo(f"  parts of experts: {rates.direct_mbs / 1000:.1f} GB/s beside {rates.direct_ns / 1000:.0f} µs a layer")
            typer.echo(
                f"  device memory: {rates.hbm_mbs / 1000:.0f} GB/s, matrix products {rates.gpu_gflops / 1000:.1f} TFLOP/s"
            )
        key = profile.record_key(record.hidden, record.inter, str(record.dtype).removeprefix("torch."))
        profile.save(path, machine, key, measured)
    for line in numa_lines():
        typer.echo(line)
    typer.echo(f"kept in {path}")


def records(directory: Path | None) -> list[tuple[str, Record]]:
    """Format name and record of one expert, for each format that is kept dense; sizes are the model's, if it has experts."""
    from engine.moe.host_bank import Record
    from engine.quant import registry
    from engine.quant.base import Dense
    from engine.weights.loader import read_config

    hidden, inter = DEFAULT_GEOMETRY
    if directory is not None:
        described = read_config(directory)
        described = described.get("text_config") or described
        hidden = int(described.get("hidden_size") or hidden)
        inter = int(described.get("moe_intermediate_size") or inter)
    found = []
    for name in registry.FORMATS:
        form = registry.get(name)
        if isinstance(form, Dense):
            found.append((name, Record(hidden, inter, form.dtype)))
    return found


def numa_lines() -> list[str]:
    """What a host with several memory nodes should know."""
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return []
    return [
        f"NUMA: {len(nodes)} memory nodes. Experts lie on the node that loaded them, and threads of the others read them more "
        "slowly. Compare with: numactl --interleave=all agentserve calibrate"
    ]
