"""`agentserve doctor`: what this machine has and lacks, one line each, with what to do about it."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agentserve.cli import options
from agentserve.cli.findings import Finding
from agentserve.cli.shapes import size

if TYPE_CHECKING:
    from agentserve.config import Config

LEAST_FREE_BYTES = 1 << 30
LEAST_TORCH = (2, 11)


def doctor(
    config: options.ConfigFile = None,
    model: options.Model = None,
    state_dir: options.StateDir = None,
    host: options.Host = None,
    port: options.Port = None,
    database_url: options.DatabaseUrl = None,
    brief: Annotated[bool, typer.Option("--brief", help="Print only what is not in order, and a last line.")] = False,
    installation: Annotated[bool, typer.Option("--installation", help="Check only what no setting decides.")] = False,
) -> None:
    """Check everything that a server needs here. Ends with status 1 if something would keep it from starting.

    Where the server of these settings runs already, it is asked how it is, instead of whether its address is free.

    --installation leaves out what belongs to one server: its model, address, database and room.
    """
    flags = {
        "model.dir": model,
        "state_dir": state_dir,
        "server.host": host,
        "server.port": port,
        "store.url": database_url,
    }
    findings = examine_installation() if installation else examine(options.settings(config, flags))
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    counts = dict.fromkeys(colours, 0)
    for finding in findings:
        counts[finding.verdict] += 1
        if brief and finding.verdict == "ok":
            continue
        typer.secho(f"{finding.verdict:>4}", fg=colours[finding.verdict], nl=False)
        typer.echo(f"  {finding.name}: {finding.what}")
        if finding.hint:
            typer.secho(f"      {finding.hint}", dim=True)
    summary = f"{counts['ok']} in order, {counts['warn']} to know about, {counts['fail']} to mend"
    typer.echo(summary)
    raise typer.Exit(1 if counts["fail"] else 0)


def examine_installation() -> Iterator[Finding]:
    """What an installation has to bring. No port, database or setting of a server has a say in it."""
    for check in (check_python, check_torch, check_library, check_compiler):
        yield _finding(check)


def examine(config: Config) -> Iterator[Finding]:
    """All findings. A check that itself breaks is a finding too."""
    from agentserve.cli.running import examine_running, find_running

    yield from examine_installation()
    checks: list[Callable[[Config], Finding]] = [
        check_device,
        check_memory,
        check_speed,
        check_state_dir,
        check_model,
        check_dialect,
        check_port,
        check_database,
        check_environment,
    ]
    running = find_running(config)
    if running is not None and running.own:
        # It has taken its address, and the memory for its weights.
        checks = [check for check in checks if check not in (check_memory, check_port)]
        yield from examine_running(running, config)
    for check in checks:
        each = [msgspec.structs.replace(config, model=model) for model in config.served]
        for one in each if check in (check_model, check_dialect) else [config]:
            yield _finding(check, one)


def _finding(check: Callable[..., Finding], *given: Config) -> Finding:
    try:
        return check(*given)
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        return Finding(name, "fail", f"could not be checked: {type(error).__name__}: {error}")


def check_python() -> Finding:
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", version)
    return Finding("python", "warn", f"{version}, tested are 3.11 to 3.13")


def check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "fail", "not installed", "Install it: make setup")
    import torch

    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < LEAST_TORCH:
        return Finding("torch", "fail", f"{torch.__version__} is too old", "At least 2.11 is needed: make setup")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device, the CPU is used"
    return Finding("torch", "ok", f"{torch.__version__}, {device}")


def check_library() -> Finding:
    import logging

    from engine.kernels import native

    log = logging.getLogger(native.__name__)
    log.setLevel(logging.ERROR)  # the reason is in the finding
    library = native.load()
    log.setLevel(logging.NOTSET)
    if library is None:
        hint = "The torch path works and is several times slower. Build the library: make setup (needs a C++ compiler)."
        return Finding("cpu library", "warn", native.reason() or "not found", hint)
    return Finding("cpu library", "ok", f"loaded, instruction set {library_isa(library)}")


def library_isa(library: ctypes.CDLL) -> str:
    """Name of the instruction set that the library picked on this machine."""
    from engine.kernels import native

    best = int(library.asv_isa_best())
    return native.ISAS[best] if 0 <= best < len(native.ISAS) else str(best)


def check_compiler() -> Finding:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        return Finding("c++ compiler", "warn", "none found", "Only needed to build the CPU library, e.g. apt install g++.")
    return Finding("c++ compiler", "ok", found)


def check_memory(config: Config) -> Finding:
    from engine.config import Machine

    available = Machine.here().available_bytes
    weights = saved = 0
    for model in config.served:  # every worker has its own weights; the memory for states is divided among them
        weights += model.worker_count * sum(file.stat().st_size for file in Path(model.dir).glob("*.safetensors"))
        saved += model.ram_cache_bytes
    text = f"{size(available)} free; weights {size(weights)}, saved states up to {size(saved)}"
    if weights + saved > available:
        return Finding("memory", "warn", text, "Lower model.ram_cache_bytes (--cache-mb) or take a smaller model.")
    return Finding("memory", "ok", text)


def check_device(config: Config) -> Finding:
    """Whether the offloaded engine can run, and what would keep it from being fast."""
    import torch

    if config.model.device == "cpu":
        return Finding("device", "ok", "the CPU, as set")
    if not torch.cuda.is_available():
        wanted = config.model.device == "cuda"
        hint = "No CUDA device is seen by torch: check the driver, and that torch was installed for CUDA."
        return Finding("device", "fail" if wanted else "ok", "no CUDA device, the CPU is used", hint if wanted else "")
    from engine.gpu.load import unusable

    reason = unusable()
    if reason is not None:
        return Finding("device", "fail" if config.model.device == "cuda" else "warn", reason, "The CPU is used instead.")
    free, total = torch.cuda.mem_get_info()
    text = f"{torch.cuda.get_device_name()}, {size(free)} of {size(total)} free"
    import resource

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    weights = _weights(config)
    experts = 0 if weights is None else weights.experts_bytes
    if locked != resource.RLIM_INFINITY and locked < experts:
        hint = "What cannot be pinned is computed on the CPU: raise ulimit -l, or the container's limit."
        return Finding("device", "warn", f"{text}; {size(locked)} may be locked, experts take {size(experts)}", hint)
    return Finding("device", "ok", text)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes in a checkpoint: routed experts, everything else, and of the experts what one token reads."""

    experts_bytes: int
    other_bytes: int
    active_bytes: int


def _weights(config: Config) -> Weights | None:
    """None where no checkpoint can be read; `check_model` says why."""
    from engine.errors import EngineError
    from engine.weights.loader import read_config
    from engine.weights.reader import CheckpointReader

    directory = Path(config.model.dir)
    try:
        described = read_config(directory)
        reader = CheckpointReader(directory)
    except EngineError:
        return None
    described = described.get("text_config") or described
    entries = [reader.entry(name) for name in reader.names()]
    experts = sum(entry.end - entry.start for entry in entries if ".experts." in entry.name)
    others = sum(entry.end - entry.start for entry in entries) - experts
    count = int(described.get("num_experts") or described.get("num_local_experts") or 1)
    return Weights(experts, others, experts * int(described.get("num_experts_per_tok") or 1) // max(1, count))


def check_speed(config: Config) -> Finding:
    """What decoding is limited by here: bytes that a token reads over the rate at which they come, as measured."""
    import torch

    from engine.config import Machine
    from engine.moe import profile

    weights = _weights(config)
    if weights is None:
        return Finding("speed", "warn", "not known without the model's weights")
    on_device = config.model.device != "cpu" and torch.cuda.is_available()
    threads = config.model.threads or Machine.here().threads(on_device)
    device = torch.cuda.get_device_name() if on_device else None
    measured = profile.entries(Path(config.state_dir) / "rates.json", profile.machine_key(device, threads))
    per_token = weights.active_bytes + weights.other_bytes
    text = f"a token reads {size(per_token)} of weights, {size(weights.active_bytes)} of them in routed experts"
    if not measured:
        return Finding("speed", "ok", text, "agentserve calibrate measures how fast they come here.")
    cpu = max(entry.get("cpu_mbs", 0) for entry in measured.values())
    if device is None:
        most = cpu * 10**6 // max(1, per_token)
        return Finding("speed", "ok", f"{text}; the CPU reads {cpu / 1000:.1f} GB/s: at most about {most} tokens/s")
    link = max(entry.get("both_link_mbs", 0) for entry in measured.values())
    both = link + max(entry.get("both_cpu_mbs", 0) for entry in measured.values())
    budget = config.model.vram_bytes or torch.cuda.mem_get_info()[0]
    share = min(1.0, max(0, budget - weights.other_bytes) / max(1, weights.experts_bytes))
    if share >= 1.0:
        return Finding("speed", "ok", f"{text}; all experts fit on the device, whose memory is the limit")
    missed = int(weights.active_bytes * (1 - share))
    most = both * 10**6 // max(1, missed)
    text += f"; {share:.0%} of the experts fit on the device, the others come at {both / 1000:.1f} GB/s (link and CPU together)"
    return Finding("speed", "ok", f"{text}: about {most} tokens/s if routes are even, more with locality")


def check_state_dir(config: Config) -> Finding:
    path = Path(config.state_dir)
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding("state directory", "fail", f"{path} cannot be written", "Choose another: --state-dir DIR")
    free = shutil.disk_usage(place).free
    if free < LEAST_FREE_BYTES:
        return Finding("state directory", "warn", f"{path}: only {size(free)} free", "Sessions and checkpoints need room.")
    return Finding("state directory", "ok", f"{path}, {size(free)} free")


def check_model(config: Config) -> Finding:
    from engine.errors import EngineError
    from engine.models import registry
    from engine.weights.loader import read_config
    from engine.weights.reader import CheckpointReader

    directory = Path(config.model.dir)
    try:
        described = read_config(directory)
        registry.find(described)
        CheckpointReader(directory)
    except EngineError as error:
        return Finding("model", "fail", str(error), "Name a Hugging Face checkpoint directory: --model DIR")
    if not (directory / "tokenizer.json").is_file():
        return Finding("model", "fail", f"{directory}: tokenizer.json is missing", "Copy it from the model's repository.")
    return Finding("model", "ok", f"{config.model.name} ({described.get('model_type')}) in {directory}")


def check_dialect(config: Config) -> Finding:
    from agentserve.dialects.registry import DIALECTS, dialect_of
    from agentserve.text.errors import TextError
    from agentserve.text.template import ChatTemplate
    from agentserve.text.tokenizer import Tokenizer

    directory, wanted = Path(config.model.dir), config.model.dialect
    known = f"Known are auto, {', '.join(DIALECTS)}: model.dialect in the settings."
    if wanted != "auto" and wanted not in DIALECTS:
        return Finding("dialect", "fail", f"'{wanted}' is unknown", known)
    if not (directory / "tokenizer.json").is_file():
        return Finding("dialect", "warn", "not known without the model's tokenizer")
    try:
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory, tokenizer.config)
    except TextError as error:
        return Finding("dialect", "fail", str(error), "Copy tokenizer and chat template from the model's repository.")
    found = dialect_of(template.source, tokenizer.markers)
    if wanted not in ("auto", found):
        return Finding("dialect", "warn", f"{wanted} as set; the chat template looks like {found}", known)
    if found == "plain" and wanted == "auto":
        return Finding("dialect", "warn", "plain: no tool calls are recognised in the chat template", known)
    return Finding("dialect", "ok", f"{found}, {'as set' if wanted != 'auto' else 'by chat template and tokens'}")


def check_port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            hint = _taken_by(config) if taken else "An address of this machine: --host ADDRESS"
            return Finding("address", "fail", f"{host}:{port} cannot be taken: {error.strerror}", hint)
    return Finding("address", "ok", f"{host}:{port} is free")


def _taken_by(config: Config) -> str:
    from agentserve.cli.running import find_running

    if find_running(config) is None:
        return "By something that is no server of this kind. Another port: --port N"
    return "By another server, which does not take the token of these settings: --state-dir DIR of its own, or --port N"


def check_database(config: Config) -> Finding:
    from sqlalchemy import make_url, text
    from sqlalchemy.exc import SQLAlchemyError

    from agentserve.session.database import connect

    url = make_url(config.store.url)
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and url.database and not Path(url.database).exists():
        return Finding("database", "ok", f"{shown} will be created")
    try:
        engine = connect(url, config.store.password_file)
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
        engine.dispose()
    except (ValueError, OSError) as error:
        return Finding("database", "fail", f"{shown}: {str(error).removeprefix('store.url: ')}")
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        return Finding("database", "fail", f"{shown}: {reason}", "Check address, user and password: --database-url URL")
    return Finding("database", "ok", shown)


def check_environment(_: Config) -> Finding:
    from agentserve.config import unknown_names

    unknown = unknown_names()
    if unknown:
        hint = "The names are in docs/settings.md, a variable of each setting with it."
        return Finding("environment", "warn", f"{', '.join(unknown)}: set, and means nothing", hint)
    return Finding("environment", "ok", "no AGENTSERVE_* variable without a meaning")
