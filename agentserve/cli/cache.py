"""`agentserve cache`: look at the saved states on disk, check them, tidy up, carry them to another machine."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentserve.cli import options, shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from agentserve.cli.connect import Target
    from statecache.admin import Step
    from statecache.directory import About

app = typer.Typer(
    help="Look at the saved states on disk, check them, tidy up, carry them to another machine.", no_args_is_help=True
)
Name = Annotated[str | None, typer.Argument(help="A model's name, or the first digits of a namespace. Default: all.")]
Url = Annotated[str | None, typer.Option(help="Address of the server. Default: as the settings say.")]
Token = Annotated[str | None, typer.Option(help="Its own token. Default: from the state directory.")]
OneName = Annotated[str, typer.Argument(help="A model's name, or the first digits of a namespace.")]


@app.command("ls")
def list_(url: Url = None, token: Token = None, config: options.ConfigFile = None, state_dir: options.StateDir = None) -> None:
    """One line for each model that has saved states on disk here, and what a running server holds in every tier.

    The disk is read directly, so it works without a server; only a server that runs with this state directory on this
    machine can say what is on its device and in its memory.
    """
    from rich.console import Console

    from agentserve.cli.chat import find_target
    from statecache import admin

    root = _root(config, state_dir)
    found = admin.folders(root)
    if not found:
        typer.echo(f"no saved states in {root}")
        return
    table = _table("saved states of", "namespace", "checkpoints", "extents", "size", "last start", "bad")
    for folder in found:
        table.add_row(
            folder.about.label,
            folder.about.namespace.hex()[:8],
            str(folder.checkpoints),
            str(folder.extents),
            shapes.size(folder.nbytes),
            shapes.ago(folder.about.used_at),
            str(folder.bad or "–"),
        )
    Console().print(table)
    _show_live(find_target(config, state_dir, url, token), [folder.about for folder in found], must_answer=url is not None)


@app.command("quota")
def quota(
    ram_mb: Annotated[int | None, typer.Option(min=0, help="Memory for saved states, MiB.")] = None,
    disk_mb: Annotated[int | None, typer.Option(min=0, help="Disk space for saved states of all models, MiB.")] = None,
    url: Url = None,
    token: Token = None,
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Change how much a running server may save, at once and until it ends; without a size, show it.

    What is over a smaller budget is evicted, except what is in use or pinned.
    """
    from agentserve.cli.chat import find_target
    from agentserve.cli.connect import Unreachable

    sizes = {"ram_bytes": ram_mb, "disk_bytes": disk_mb}
    body = {name: size << 20 for name, size in sizes.items() if size is not None}
    target = find_target(config, state_dir, url, token)
    try:
        answer = target.post("/v1/cache/quota", body) if body else target.get("/v1/cache")
    except Unreachable as error:
        options.fail(error.advice)
    _show_tiers(answer["tiers"])
    if body:
        kept = answer["at_restart"]
        ram, disk = shapes.size(kept["ram_bytes"]), shapes.size(kept["disk_bytes"])
        typer.echo(f"This holds until the server ends; the next one starts with {ram} of memory and {disk} of disk.")
        typer.echo("To keep it, set model.ram_cache_bytes and model.disk_cache_bytes (docs/settings.md).")


@app.command("show")
def show(
    name: OneName,
    limit: Annotated[int, typer.Option(min=1, help="Most lines.")] = 50,
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Every checkpoint of one model on disk, deepest first."""
    from rich.console import Console

    from statecache import admin

    about = _choose(_root(config, state_dir), name)
    found = list(admin.headers(about.path))
    with_logits = {c.key[1:] for c in found if c.header.what == "logits"}
    states = sorted((c for c in found if c.header.what == "state"), key=lambda c: c.header.position, reverse=True)
    table = _table("checkpoint", "at token", "kind", "salt", "state", "of its own", "logits")
    for contents in states[:limit]:
        header = contents.header
        row = (contents.key[1:].hex()[:12], str(header.position), header.kind, header.salt.hex()[:6])
        table.add_row(
            *row,
            shapes.size(contents.nbytes),
            shapes.many(header.position - header.start, "token"),
            _yes(contents.key[1:] in with_logits),
        )
    console = Console()
    console.print(table)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(c.header.kind for c in states).most_common())
    extents = [c for c in found if c.header.what == "extent"]
    tokens = sum(len(c.header.tokens) // 4 for c in extents)
    if len(states) > limit:
        console.print(f"… and {len(states) - limit} more, which --limit {len(states)} would show.", highlight=False)
    console.print(
        f"{shapes.many(len(states), 'checkpoint')} ({kinds}) on {shapes.many(tokens, 'token')} of KV "
        f"in {shapes.many(len(extents), 'extent')}.",
        highlight=False,
    )


@app.command("verify")
def verify(
    name: Name = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move what is bad aside. Not while a server runs.")] = False,
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Read every byte and compare every checksum. Ends with status 1 if anything is bad."""
    from statecache import admin

    bad = 0
    for about in _chosen(_root(config, state_dir), name):
        with _progress(f"checking {about.label}", admin.segment_bytes(about.path)) as step:
            findings = admin.verify(about, step)
        for finding in findings:
            typer.echo(f"bad: {finding.path.relative_to(about.path)}: {finding.reason}")
        if quarantine and findings:
            with _refusals():
                admin.set_aside(about, findings)
        bad += len(findings)
        all_of_them = shapes.many(len(admin.segment_files(about.path)), "segment")
        typer.echo(f"{about.label}: {len(findings)} of {all_of_them} {'is' if len(findings) == 1 else 'are'} bad")
    raise typer.Exit(1 if bad else 0)


@app.command("gc")
def collect(
    name: Name = None,
    unused_days: Annotated[float | None, typer.Option(min=0, help="Also remove models not started for so many days.")] = None,
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Delete what no checkpoint needs: leftovers of crashes, broken chains, the quarantine."""
    from statecache import admin, directory
    from statecache.errors import TierFailed

    busy = 0
    root = _root(config, state_dir)
    if abandoned := directory.remove_abandoned(root):
        typer.echo(f"imports that were cut off: {shapes.size(abandoned)} removed")
    for about in _chosen(root, name):
        try:
            if unused_days is not None and time.time() - about.used_at > unused_days * 86_400:
                size = directory.size_of(about.path)
                if not directory.remove(about.path):
                    raise TierFailed(f"{about.path} is used by another process")
                typer.echo(f"{about.label}: {shapes.size(size)} removed")
            else:
                typer.echo(f"{about.label}: {shapes.size(admin.tidy(about))} freed")
        except TierFailed as error:  # the others can be tidied all the same
            typer.secho(f"{about.label}: left as it is, {error}", err=True, fg="red")
            busy += 1
    raise typer.Exit(1 if busy else 0)


@app.command("export")
def export(
    name: OneName,
    file: Annotated[Path, typer.Argument(help="The tar file to write.")],
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Write the saved states of one model to a file. Whoever has it can read the token ids in it."""
    from statecache import admin

    about = _choose(_root(config, state_dir), name)
    if not file.parent.exists():  # else the error would name the file that is written first
        options.fail(f"{file.parent}: No such file or directory")
    with _refusals(), _progress("exporting", admin.segment_bytes(about.path)) as step:
        count = admin.export(about, file, step)
    typer.echo(f"{shapes.many(count, 'segment')}, {shapes.size(file.stat().st_size)}: {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Add exported states; each is checked first. They are found at the next start of the same model."""
    from statecache import admin

    with _refusals():
        size = file.stat().st_size
        with _progress("importing", size) as step:
            about, added, refused = admin.import_(file, _root(config, state_dir, new=True), step)
    typer.echo(
        f"{about.label}: {shapes.many(added, 'segment')} added, {refused} refused. The next start of that model finds them."
    )
    raise typer.Exit(1 if refused else 0)


@app.command("rebuild")
def rebuild(name: Name = None, config: options.ConfigFile = None, state_dir: options.StateDir = None) -> None:
    """Write the index in the database again from the files. Not while a server runs."""
    from agentserve.session.database import upgrade
    from statecache import admin
    from statecache.index.connect import connect
    from statecache.index.ledger import Ledger

    root, chosen = _root(config, state_dir), options.settings(config, {"state_dir": state_dir})
    for about in _chosen(root, name):
        with _refusals():
            database = connect(chosen.model.checkpoints_url)
            ledger = Ledger(
                database, about.namespace, worker=about.worker, prepare=lambda engine: upgrade(engine, "statecache")
            )
            ledger.known()  # a damaged file is set aside here
            typer.echo(f"{about.label}: {shapes.many(admin.rebuild(about, ledger), 'row')}")
            ledger.close()


def _show_live(target: Target, here: list[About], *, must_answer: bool) -> None:
    """What a server holds, if it runs and has its states in this directory."""
    from agentserve.cli.connect import Unreachable

    try:
        answer = target.get("/v1/cache", timeout_s=10.0 if must_answer else 2.0)
        served = [about for about in here if about.namespace.hex() == answer["namespace"]]
        if served:
            typer.echo(f"{served[0].model} is served at {target.url}:")
            _show_tiers(answer["tiers"])
    except (Unreachable, KeyError, TypeError) as error:
        if must_answer:
            options.fail(f"{error}\n{getattr(error, 'hint', '')}".rstrip())


def _show_tiers(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    table = _table("tier", "checkpoints", "used", "of")
    for row in rows:
        table.add_row(row["tier"], str(row["checkpoints"]), shapes.size(row["used_bytes"]), shapes.size(row["budget_bytes"]))
    Console().print(table)


# ── small shapes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _root(config: Path | None, state_dir: Path | None, *, new: bool = False) -> Path:
    """new: it may be made. Else a directory that is named must be there; one in which nothing was saved yet is all right."""
    root = Path(options.settings(config, {"state_dir": state_dir}).state_dir)
    if state_dir is not None and not new and not root.is_dir():
        options.fail(f"--state-dir {state_dir}: no such directory", status=2)
    return root / "checkpoints"


def _choose(root: Path, name: str) -> About:
    from statecache import admin

    try:
        return admin.choose(root, name)
    except LookupError as error:
        options.fail(str(error))


def _chosen(root: Path, name: str | None) -> list[About]:
    from statecache.directory import namespaces

    found = namespaces(root) if name is None else [_choose(root, name)]
    if not found:
        typer.echo(f"no saved states in {root}")
    return found


@contextmanager
def _refusals() -> Iterator[None]:
    from sqlalchemy.exc import SQLAlchemyError

    from statecache.errors import TierFailed

    try:
        yield
    except OSError as error:
        options.fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (TierFailed, ValueError, SQLAlchemyError) as error:
        options.fail(str(error))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Step]:
    """A bar on standard error, only where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _table(*columns: str) -> Table:
    return shapes.table(
        *columns, left=("saved states of", "namespace", "checkpoint", "kind", "salt", "last start", "logits", "tier")
    )


def _yes(value: bool) -> str:
    return "yes" if value else "–"
