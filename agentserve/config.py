"""Settings: defaults < TOML file < environment < command-line flags. The only reader of the environment in this package.

Every setting has a name `section.field`; in the environment `AGENTSERVE_SECTION_FIELD` (the common ones also shorter), on the
command line whatever the CLI maps to it. Lists are comma-separated outside TOML. A bad value is a ConfigError that says where
it came from; so is an unknown name in a file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from agentserve.errors import ConfigError
from agentserve.paths import check_texts, sqlite_at
from agentserve.protocol.responses import Normaliser
from agentserve.schema_errors import explain, unknown_field

PREFIX = "AGENTSERVE_"
Port = Annotated[int, Meta(ge=0, le=65535)]
MOST = (1 << 63) - 1
"""TOML has integers of any size, the worker's frames have not."""
Count = Annotated[int, Meta(ge=1, le=MOST)]
Size = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(gt=0.0, le=1e9)]


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sockets and who may use them.

    host: address to listen on; another than loopback needs a token. port 0 = any free one.
    allowed_hosts: names accepted in `Host` besides loopback ones and `host` itself, without port.
    allowed_origins: whole origins that browsers may come from, e.g. "http://localhost:3000"; none by default.
    auth "none": no token is asked for; loopback only.
    token: the token itself (better in a file). token_file: where it is read from, generated at first start; default
    `<state_dir>/token`. tokens: further principals, name → token.
    websocket: False answers upgrades with 426. compression: permessage-deflate, costs CPU per event.
    drain_s: how long running turns may go on at shutdown.
    """

    host: str = "127.0.0.1"
    port: Port = 8741
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    auth: Literal["token", "none"] = "token"
    token: str | None = None
    token_file: str | None = None
    tokens: dict[str, str] = {}
    websocket: bool = True
    compression: bool = False
    drain_s: Seconds = 120.0


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one client may use.

    frame_bytes: of one message or body. items: in one `input`. connections: sockets in all, and of one principal.
    lanes: named streams of one connection. waiting_turns, waiting_bytes: queued behind others on one connection.
    buffer_bytes, buffer_events: unsent events of one connection. slow_s: how long that buffer may stay full.
    connection_s: age at which a socket is closed after its turns, 0 = none.
    turns_per_principal: that run or wait at once, by every API. turns_per_minute: of one principal, 0 = no limit.
    stored_bytes_per_principal: in the sessions database, 0 = no limit.
    """

    frame_bytes: Count = 8 << 20
    items: Count = 20_000
    connections: Count = 1024
    connections_per_principal: Count = 512
    lanes: Count = 32
    waiting_turns: Count = 64
    waiting_bytes: Count = 64 << 20
    buffer_bytes: Count = 8 << 20
    buffer_events: Count = 1024
    slow_s: Seconds = 30.0
    connection_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    turns_per_principal: Count = 512
    turns_per_minute: Size = 0
    stored_bytes_per_principal: Size = 0


def _memory_share() -> int:
    """An eighth of this machine's memory, at least 1 GiB, in bytes. A context whose state is larger than the memory tier is not
    saved, so a fixed default would be too small for the models that large machines serve."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = 0
    return max(1 << 30, memory // 8)


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A served model.

    dir: a Hugging Face checkpoint directory; empty = the embedded demo model. name: what clients call it; empty = the
    directory's name. aliases: other names that are accepted; "*" accepts any.
    dialect: tool-call family, "auto" = by the chat template. threads 0 = choose.
    device: "auto" = a CUDA device if there is one that will do. vram_bytes: device memory that the model may take, 0 = what is
    free.
    ram_cache_bytes, disk_cache_bytes: what saved states may take, 0 = none; on disk they survive a restart, and the budget is
    for all models of the state directory. disk_reserve_bytes: free space left to others, states are given up for it.
    disk_bytes_per_hour: most that is written, 0 = no limit.
    device_residency: let saved states stay in the engine's pools until a turn needs the room.
    checkpoints_url: SQLAlchemy URL of the index over them; empty = SQLite in the state directory.
    engine: further fields of the engine's config, by name.
    workers: processes that serve it side by side, 0 = one for each of gpus, else one. They share ram_cache_bytes.
    gpus: indices of devices; the n-th worker takes the n-th of them, from the start again where there are fewer.
    """

    dir: str = ""
    name: str = ""
    aliases: tuple[str, ...] = ()
    dialect: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    vram_bytes: Size = 0
    threads: Size = 0
    ram_cache_bytes: Size = msgspec.field(default_factory=_memory_share)
    disk_cache_bytes: Size = 8 << 30
    disk_reserve_bytes: Size = 2 << 30
    disk_bytes_per_hour: Size = 0
    device_residency: bool = True
    checkpoints_url: str = ""
    engine: dict[str, Annotated[int, Meta(ge=-MOST, le=MOST)] | float | str | bool] = {}
    workers: Annotated[int, Meta(ge=0, le=64)] = 0
    gpus: tuple[Size, ...] = ()

    @property
    def worker_count(self) -> int:
        return self.workers or max(1, len(self.gpus))


class TurnConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults of a turn.

    ttft_deadline_s: reported against, enforced only where a turn asks for it. keepalive_s: longest silence before output.
    max_output_tokens: where the request has none; never more than fits into the context. temperature, top_p: likewise.
    normalise: what of a context is made the same in every turn, see normalise.py. nonce_headers: lines that it takes away.
    """

    ttft_deadline_s: Seconds = 30.0
    keepalive_s: Seconds = 2.0
    max_output_tokens: Count = 16_384
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    normalise: tuple[Normaliser, ...] = ()
    nonce_headers: tuple[Annotated[str, Meta(min_length=1)], ...] = ("x-anthropic-billing-header",)


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """url: SQLAlchemy URL of the sessions database; empty = SQLite in the state directory.

    password_file: holds the database password, for a URL without one. migrate: bring the schema up to date at start.
    """

    url: str = ""
    password_file: str = ""
    migrate: bool = True


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. state_dir: databases, the token and checkpoints; empty = the user's state directory.

    model: the served model; of several (`[[models]]`) the first. models: all of several, none if there is one.
    """

    state_dir: str = ""
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    model: ModelConfig = ModelConfig()
    turn: TurnConfig = TurnConfig()
    store: StoreConfig = StoreConfig()
    log: LogConfig = LogConfig()
    models: tuple[ModelConfig, ...] = ()

    @property
    def served(self) -> tuple[ModelConfig, ...]:
        """Every served model; clients that name none get the first."""
        return self.models or (self.model,)


_SECTIONS: dict[str, type[Struct]] = {
    "server": ServerConfig,
    "limits": LimitsConfig,
    "model": ModelConfig,
    "turn": TurnConfig,
    "store": StoreConfig,
    "log": LogConfig,
}
# Short names of the settings that containers and shells set most.
_SHORT = {
    "STATE_DIR": "state_dir",
    "HOST": "server.host",
    "PORT": "server.port",
    "ALLOWED_HOSTS": "server.allowed_hosts",
    "ALLOWED_ORIGINS": "server.allowed_origins",
    "AUTH": "server.auth",
    "TOKEN": "server.token",
    "TOKEN_FILE": "server.token_file",
    "DATABASE_URL": "store.url",
    "DATABASE_PASSWORD_FILE": "store.password_file",
    "MODEL": "model.dir",
    "DEVICE": "model.device",
    "THREADS": "model.threads",
}


def load(
    file: str | os.PathLike[str] | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Settings of this process.

    file: TOML; None = `AGENTSERVE_CONFIG` if set. flags: "section.field" → value, None values are skipped.
    environ: for tests. Raises ConfigError.
    """
    env = os.environ if environ is None else environ
    config, several, origin = Config(), None, ""
    path = file if file is not None else env.get(PREFIX + "CONFIG")
    if path:
        values, origin = _read_toml(Path(path)), f"file {path}"
        several = values.pop("models", None)
        config = _overlay(config, values, origin)
    config = _overlay(config, _from_environ(env), "the environment")
    named = {k: v for k, v in (flags or {}).items() if v is not None}
    if "models" in named:
        several, origin = named.pop("models"), "the command line"
    config = _overlay(config, _nested(named), "the command line")
    if several:
        config = msgspec.structs.replace(config, models=_several(config, several, origin))
    if not config.state_dir:
        base = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME", ".")) / ".local" / "state")
        check_texts(base, "the environment", "state_dir")
        config = msgspec.structs.replace(config, state_dir=str(Path(base) / "agentserve"))
    return _finish(config)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read settings from {path}: {exc}") from exc


def _from_environ(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in sorted(env.items()):
        if not key.startswith(PREFIX) or key == PREFIX + "CONFIG":
            continue
        dotted = _setting(key[len(PREFIX) :])
        if dotted is not None:
            found[dotted] = value
    return _nested(found)


def unknown_names(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that look like ours and set nothing. Worth a warning, not a stop: orchestrators inject such names."""
    env = os.environ if environ is None else environ
    others = (PREFIX + "CONFIG", PREFIX + "URL")  # the second is for clients: where the server is
    return sorted(k for k in env if k.startswith(PREFIX) and k not in others and _setting(k[len(PREFIX) :]) is None)


def _setting(name: str) -> str | None:
    if name in _SHORT:
        return _SHORT[name]
    section, _, field = name.lower().partition("_")
    kind = _SECTIONS.get(section)
    return f"{section}.{field}" if kind is not None and field in kind.__struct_fields__ else None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} → {"a": {"b": 1}}; comma-separated text becomes a list where the setting is one."""
    out: dict[str, Any] = {}
    for dotted, value in values.items():
        section, dot, field = dotted.partition(".")
        if not dot:
            out[section] = value
            continue
        default = getattr(_SECTIONS[section](), field, None) if section in _SECTIONS else None
        if isinstance(value, str) and isinstance(default, tuple):
            value = [part.strip() for part in value.split(",") if part.strip()]
        out.setdefault(section, {})[field] = value
    return out


def _overlay(config: Config, values: Mapping[str, Any], origin: str) -> Config:
    check_texts(values, origin)
    merged = msgspec.to_builtins(config)
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    try:
        return msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"bad setting in {origin}: {_reason(exc, merged)}") from exc


def _several(config: Config, entries: Any, origin: str) -> tuple[ModelConfig, ...]:
    """`[[models]]`: what an entry leaves out is as in `[model]`, but for its name and aliases.

    Those that name no `ram_cache_bytes` of their own share that of `[model]`, by their workers.
    """
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"bad setting in {origin}: models: a list of tables is expected, [[models]]")
    common = msgspec.to_builtins(config.model) | {"name": "", "aliases": ()}
    models: list[ModelConfig] = []
    for number, entry in enumerate(entries):
        try:
            check_texts(entry, origin, f"models[{number}]")
            models.append(msgspec.convert(common | entry, ModelConfig, strict=False))
        except msgspec.ValidationError as exc:
            raise ConfigError(f"bad setting in {origin}: models[{number}]: {_reason(exc, {'model': entry}, 'model')}") from exc
    sharing = sum(m.worker_count for m, entry in zip(models, entries, strict=True) if "ram_cache_bytes" not in entry)
    return tuple(
        model
        if "ram_cache_bytes" in entry
        else msgspec.structs.replace(model, ram_cache_bytes=model.ram_cache_bytes * model.worker_count // sharing)
        for model, entry in zip(models, entries, strict=True)
    )


def _reason(error: msgspec.ValidationError, values: Any, section: str = "") -> str:
    """`section.field: what is wrong`. Of values, only numbers are shown: a text may be a secret."""
    unknown = unknown_field(error)
    if unknown is not None:
        name, field = section or unknown[0].removeprefix("."), unknown[1]
        known = _SECTIONS[name].__struct_fields__ if name in _SECTIONS else Config.__struct_fields__
        like = difflib.get_close_matches(field, known, n=1)
        place = f"[{name}]" if name else "the top level"
        return f"{place} has no setting '{field}'; " + (f"is '{like[0]}' meant?" if like else f"it has {', '.join(known)}")
    message, path = explain(error, _SECTIONS.get(section, Config))
    path = f".{section}{path}" if section else path
    name = path.removeprefix(".")
    for part in name.split(".") if name else ():
        values = values.get(part) if isinstance(values, dict) else None
    shown = f", got {values}" if type(values) in (int, float) and "got" not in message else ""
    return f"{name}: {message}{shown}" if name else message


def _finish(config: Config) -> Config:
    state = Path(config.state_dir).expanduser().absolute()
    server, store = config.server, config.store
    if server.auth == "none" and not is_loopback(server.host):
        raise ConfigError(f"server.auth is 'none', so server.host must be loopback, not {server.host}")
    models = tuple(_named(model, state) for model in config.models)
    model = models[0] if models else _named(config.model, state)
    _check_names(models)
    if not server.token_file:
        server = msgspec.structs.replace(server, token_file=str(state / "token"))
    if not store.url:
        store = msgspec.structs.replace(store, url=sqlite_at(state / "sessions.db"))
    return msgspec.structs.replace(config, state_dir=str(state), server=server, model=model, store=store, models=models)


def _named(model: ModelConfig, state: Path) -> ModelConfig:
    """With everything that is empty filled in."""
    if not model.dir:
        model = msgspec.structs.replace(model, dir=str(Path(__file__).parent / "demo_model"), name=model.name or "demo")
    if not model.name:
        model = msgspec.structs.replace(model, name=Path(model.dir).expanduser().absolute().name)
    if not model.checkpoints_url:
        model = msgspec.structs.replace(model, checkpoints_url=sqlite_at(state / "checkpoints.db"))
    return model


def _check_names(models: tuple[ModelConfig, ...]) -> None:
    names = [name for model in models for name in {model.name, *model.aliases}]
    for name in names:
        if names.count(name) > 1:
            hint = "give each of [[models]] its own name; several workers of one model are its `workers`"
            raise ConfigError(f"models: '{name}' means two of them; {hint}")


_LOOPBACK_IPV4 = re.compile(r"127(?:\.(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])){1,3}")


def is_loopback(host: str) -> bool:
    """True for localhost, 127.0.0.0/8 and ::1, with or without brackets."""
    name = host.strip("[]").lower()
    return name in ("localhost", "::1") or (_LOOPBACK_IPV4.fullmatch(name) is not None)
