"""What each coding agent has to be told to use this server: files, environment and flags. Builds and merges; writes nothing.

Where a client can layer a file of ours over its own settings, that is what it gets, so that it stays as it was without us.
No file holds the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROVIDER = "agentserve"
TOKEN_VARIABLE = "AGENTSERVE_TOKEN"


class Unmergeable(Exception):
    """A file of the client is not shaped as such files are; the text says where."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is and what it serves. url: without path. context: tokens. token_file: of a server on this machine."""

    url: str
    model: str
    context: int
    token_file: Path | None


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """path: the file. wanted: what has to stand in it, as a tree. toml: else JSON. arguments: for the program, behind its name.

    environ: for a program that we start; values may be the token. inline: how it is told without a file, by arguments or
    environment.
    """

    program: str
    path: Path
    wanted: Mapping[str, Any]
    toml: bool
    arguments: tuple[str, ...]
    inline: tuple[str, ...]
    environ: Callable[[str], Mapping[str, str]] = field(repr=False)

    def merged(self, text: str) -> str:
        """The file's text with ours in it; everything else stays. Raises Unmergeable."""
        return _merged_toml(text, self.wanted) if self.toml else _merged_json(text, self.wanted)


def codex(place: Place, home: Path, environ: Mapping[str, str]) -> ClientConfig:
    base = Path(environ.get("CODEX_HOME") or home / ".codex")
    provider: dict[str, Any] = {
        "name": PROVIDER,
        "base_url": f"{place.url}/v1",
        "wire_api": "responses",
        "supports_websockets": True,
        "env_key": TOKEN_VARIABLE,
    }
    top: dict[str, Any] = {"model": place.model, "model_provider": PROVIDER, "model_context_window": place.context}
    flags = [f"{name}={json.dumps(value)}" for name, value in top.items()]
    flags += [f"model_providers.{PROVIDER}.{name}={json.dumps(value)}" for name, value in provider.items()]
    return ClientConfig(
        program="codex",
        path=base / f"{PROVIDER}.config.toml",
        wanted={**top, "model_providers": {PROVIDER: provider}},
        toml=True,
        arguments=("--profile", PROVIDER),
        inline=tuple(part for flag in flags for part in ("-c", flag)),
        environ=lambda token: {TOKEN_VARIABLE: token},
    )


def claude(place: Place, home: Path, environ: Mapping[str, str]) -> ClientConfig:
    base = Path(environ.get("CLAUDE_CONFIG_DIR") or home / ".claude")
    path = base / f"{PROVIDER}.settings.json"
    told = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_MODEL": place.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    wanted: dict[str, Any] = {"env": told}
    if place.token_file is not None:
        wanted["apiKeyHelper"] = f"cat {_quoted(str(place.token_file))}"
    return ClientConfig(
        program="claude",
        path=path,
        wanted=wanted,
        toml=False,
        arguments=("--settings", str(path)),
        inline=(),
        environ=lambda token: {**told, "ANTHROPIC_API_KEY": token},
    )


def opencode(place: Place, home: Path, environ: Mapping[str, str]) -> ClientConfig:
    base = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{place.url}/v1", "apiKey": f"{{env:{TOKEN_VARIABLE}}}"},
        "models": {place.model: {"name": place.model, "limit": {"context": place.context, "output": place.context // 4}}},
    }
    wanted = {"$schema": "https://opencode.ai/config.json", "provider": {PROVIDER: provider}}
    return ClientConfig(
        program="opencode",
        path=base / "opencode" / "opencode.json",
        wanted=wanted,
        toml=False,
        arguments=("--model", f"{PROVIDER}/{place.model}"),
        inline=("--model", f"{PROVIDER}/{place.model}"),
        environ=lambda token: {TOKEN_VARIABLE: token, "OPENCODE_CONFIG_CONTENT": json.dumps(wanted)},
    )


CLIENTS: dict[str, Callable[[Place, Path, Mapping[str, str]], ClientConfig]] = {
    "codex": codex,
    "claude": claude,
    "opencode": opencode,
}


def _merged_toml(text: str, wanted: Mapping[str, Any]) -> str:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        _put(document, wanted, tomlkit.table)
        return tomlkit.dumps(document)
    except TOMLKitError as error:
        raise Unmergeable(f"not valid TOML: {error}") from error


def _merged_json(text: str, wanted: Mapping[str, Any]) -> str:
    try:
        document = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise Unmergeable(f"not plain JSON: {error}") from error
    if not isinstance(document, dict):
        raise Unmergeable("not a JSON object")
    _put(document, wanted, dict)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _put(into: Any, wanted: Mapping[str, Any], table: Callable[[], Any]) -> None:
    for name, value in wanted.items():
        if not isinstance(value, Mapping):
            into[name] = value
            continue
        if name not in into:
            into[name] = table()
        if not isinstance(into[name], Mapping):
            raise Unmergeable(f"'{name}' is no table there")
        _put(into[name], value, table)


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"
