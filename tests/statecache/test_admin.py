"""`agentserve cache`, and what is under it: lists, checks, tidying, carrying states to another place."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from agentserve.cli.main import app
from statecache import admin
from statecache.directory import claim
from statecache.durable import DiskSettings, SavedStates, open_states
from tests.statecache.test_failures import best
from tests.statecache.world import LAYOUT, NAMESPACE, close_books, context, save

TOKENS = context(1, 1500)


def opened(state_dir: Path, namespace: bytes = NAMESPACE, model: str = "tiny") -> SavedStates:
    disk = DiskSettings(
        state_dir / "checkpoints", 1 << 24, 0, claim_wait_s=0, index_url=f"sqlite:///{state_dir / 'checkpoints.db'}"
    )
    return open_states(namespace, LAYOUT, 1 << 20, disk, model=model)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    states = opened(tmp_path / "state")
    for position in (100, 700):
        save(states.cache, TOKENS, position)
    save(states.cache, TOKENS, 1500, logits=True)
    states.close()
    return tmp_path / "state"


def run(state_dir: Path, *arguments: str):
    environment = {"COLUMNS": "160", "NO_COLOR": "1", "AGENTSERVE_STATE_DIR": str(state_dir)}
    return CliRunner().invoke(app, ["cache", *arguments], env=environment)


def files(state_dir: Path) -> list[Path]:
    return sorted(state_dir.glob("checkpoints/*/??/*.safetensors"))


def test_ls_and_show(state_dir: Path) -> None:
    listed = run(state_dir, "ls")
    assert listed.exit_code == 0, listed.output
    assert re.search(rf"tiny +{NAMESPACE.hex()[:8]} +3 +2 +[\d.]+ KiB +\d+ s ago", listed.output)
    shown = run(state_dir, "show", "tiny")
    assert re.findall(r"^ [0-9a-f]+ +(\d+)  turn", shown.output, re.MULTILINE) == ["1500", "700", "100"]
    assert "3 checkpoints (3 turn) on 1472 tokens of KV in 2 extents" in shown.output
    assert shown.output.count("yes") == 1
    unknown = run(state_dir, "show", "other")
    assert unknown.exit_code == 1
    assert "no namespace fits 'other'" in unknown.output


def test_where_nobody_looks_there_is_no_bar(state_dir: Path, tmp_path: Path) -> None:
    assert run(state_dir, "verify").stderr == ""
    assert run(state_dir, "export", "tiny", str(tmp_path / "states.tar")).stderr == ""
    nowhere = run(state_dir, "export", "tiny", str(tmp_path / "nowhere" / "states.tar"))
    assert (nowhere.exit_code, nowhere.stderr) == (1, f"agentserve: {tmp_path / 'nowhere'}: No such file or directory\n")


def test_verify_names_what_is_bad_and_quarantine_moves_it(state_dir: Path) -> None:
    assert run(state_dir, "verify").exit_code == 0
    flipped = next(p for p in files(state_dir) if p.name.startswith(b"s".hex()))
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    first_extent = next(
        p for p in files(state_dir) if p.name.startswith(b"x".hex()) and b'"start":"0"' in p.read_bytes()[:2000]
    )
    os.truncate(first_extent, 1000)
    found = run(state_dir, "verify", "--quarantine")
    assert found.exit_code == 1
    assert re.search(rf"{flipped.name}: checksum of part '[\w.]+' differs", found.output)
    assert re.search(rf"{first_extent.name}: ", found.output)
    assert "its blocks are missing" in found.output
    kept = {p.stem for p in state_dir.glob("checkpoints/*/quarantine/*.safetensors")}
    assert {flipped.stem, first_extent.stem} <= kept
    assert all(p.read_text() for p in state_dir.glob("checkpoints/*/quarantine/*.reason"))
    assert run(state_dir, "verify").exit_code == 0
    states = opened(state_dir)
    assert best(states.cache, TOKENS) in (0, 100)
    close_books(states.cache)
    states.close()
    assert "freed" in run(state_dir, "gc").output
    assert not list(state_dir.glob("checkpoints/*/quarantine/*"))


def test_export_and_import_carry_states(state_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "states.tar"
    assert run(state_dir, "export", "tiny", str(target)).exit_code == 0
    other = tmp_path / "other"
    added = run(other, "import", str(target))
    assert added.exit_code == 0, added.output
    assert f"{len(files(state_dir))} segments added, 0 refused" in added.output
    states = opened(other)
    assert best(states.cache, TOKENS) == 1500
    close_books(states.cache)
    in_use = run(other, "import", str(target))
    assert in_use.exit_code == 1
    assert "used by another process" in in_use.output
    states.close()


def test_what_is_damaged_on_the_way_is_refused(state_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "states.tar"
    run(state_dir, "export", "tiny", str(target))
    data = bytearray(target.read_bytes())
    at = data.rindex(b"statecache-segment-1")
    data[at] ^= 1
    target.write_bytes(data)
    added = run(tmp_path / "other", "import", str(target))
    assert added.exit_code == 1
    assert "1 refused" in added.output
    states = opened(tmp_path / "other")
    assert best(states.cache, TOKENS) in (0, 100, 700, 1500)
    close_books(states.cache)
    states.close()
    (tmp_path / "no.tar").write_bytes(b"nothing")
    assert run(tmp_path / "other", "import", str(tmp_path / "no.tar")).exit_code == 1


def test_rebuild_writes_the_rows_again(state_dir: Path) -> None:
    (state_dir / "checkpoints.db").write_bytes(b"broken" * 1000)
    built = run(state_dir, "rebuild")
    assert built.exit_code == 0, built.output
    assert f"tiny: {len(files(state_dir))} rows" in built.output
    states = opened(state_dir)
    assert states.ledger is not None
    assert len(states.ledger.known()) == len(files(state_dir))
    busy = run(state_dir, "rebuild")
    assert busy.exit_code == 1
    assert "used by another process" in busy.output
    assert best(states.cache, TOKENS) == 1500
    states.close()


def test_gc_removes_models_that_are_not_used_any_more(state_dir: Path) -> None:
    opened(state_dir, b"o" * 32, "old").close()
    old = admin.choose(state_dir / "checkpoints", "old")
    os.utime(old.path / "about.json", (1e9, 1e9))
    (old.path / "tmp-1-1").write_bytes(b"x" * 5000)
    output = run(state_dir, "gc", "--unused-days", "30").output
    assert re.search(r"old: [\d.]+ KiB removed", output)
    assert [f.about.model for f in admin.folders(state_dir / "checkpoints")] == ["tiny"]


def test_reading_tools_change_nothing(state_dir: Path) -> None:
    states = opened(state_dir)
    leftover = next(state_dir.glob("checkpoints/*/about.json")).with_name("tmp-9-9")
    leftover.write_bytes(b"being written")
    for arguments in (["ls"], ["show", "tiny"], ["verify"]):
        assert run(state_dir, *arguments).exit_code == 0
    assert leftover.exists()
    assert best(states.cache, np.append(TOKENS, 1)) == 1500
    states.close()


def test_what_a_server_evicts_and_writes_while_it_is_verified_is_no_finding(state_dir: Path) -> None:
    states = opened(state_dir)
    (described,) = admin.namespaces(state_dir / "checkpoints")
    looked_at: list[int] = []

    def meanwhile(nbytes: int) -> None:
        looked_at.append(nbytes)
        if len(looked_at) == 1:
            for info in states.cache.checkpoints():
                assert states.cache.evict(info.id)
            for position in (100, 700):
                save(states.cache, TOKENS, position)
            assert states.writer is not None
            assert states.writer.flush(60.0)

    assert admin.verify(described, meanwhile) == []
    assert len(looked_at) > 1
    states.close()


def test_an_import_that_was_killed_leaves_nothing_that_stays(state_dir: Path, tmp_path: Path) -> None:
    root = state_dir / "checkpoints"
    (described,) = admin.namespaces(root)

    def cut_off() -> Path:
        left = root / ".import-1"
        left.mkdir()
        shutil.copy(described.path / "about.json", left / "about.json")
        shutil.copy(files(state_dir)[0], left)
        return left

    left = cut_off()
    assert len(admin.folders(root)) == 1, "it is no namespace"
    mine = claim(left, wait_s=0.0)
    assert run(state_dir, "gc").exit_code == 0
    assert left.exists(), "an import that runs keeps it"
    mine.release()
    told = run(state_dir, "gc")
    assert re.search(r"imports that were cut off: [\d.]+ KiB removed", told.output)
    assert not left.exists()
    cut_off()
    opened(state_dir).close()
    assert not left.exists()
    cut_off()
    assert run(state_dir, "export", "tiny", str(tmp_path / "all.tar")).exit_code == 0
    assert run(state_dir, "import", str(tmp_path / "all.tar")).exit_code == 0
    assert not list(root.glob(".import-*"))


def test_an_export_replaces_nothing_but_files(state_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path):
        refused = run(state_dir, "export", "tiny", str(other))
        assert refused.exit_code == 1
        assert f"{other} is not a regular file" in refused.output.replace("\n", "")
    assert (tmp_path / "pipe").is_fifo()
    for _ in range(2):
        assert run(state_dir, "export", "tiny", str(tmp_path / "all.tar")).exit_code == 0
