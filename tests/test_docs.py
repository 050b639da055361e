"""The documents name real things: every path in them exists, every make target and command that they show is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from agentserve import config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/protocol.md",
    "docs/glossary.md",
    "docs/roadmap.md",
    "docs/settings.md",
]
TOP = ("agentserve/", "statecache/", "engine/", "migrations/", "tests/", "benchmarks/", "examples/", "docker/", "docs/", ".ci/")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_in_backticks_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = {p for p in re.findall(r"`([\w./*-]+)`", text) if p.startswith(TOP)}
    missing = sorted(p for p in named if not (list(ROOT.glob(p)) if "*" in p else (ROOT / p).exists()))
    assert not missing, f"{document} names what is not there"


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for block in re.findall(r"```\n(.*?)```|`(make [a-z-]+)", text, flags=re.S):
            for target in re.findall(r"^make ([a-z-]+)", "\n".join(block), flags=re.M):
                assert target in targets, f"{document} shows `make {target}`"


def test_make_without_a_target_tells_every_documented_one_and_the_variables() -> None:
    told = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("make demo", "make test ", "make migrate", "PYTHON picks", "PIP_ARGS="):
        assert word in told
    assert told.rstrip().endswith(".")


def test_each_decision_has_a_number_of_its_own() -> None:
    pages = sorted((ROOT / "docs/adr").glob("*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    assert numbers == list(range(1, len(pages) + 1))
    for number, page in zip(numbers, pages, strict=True):
        assert page.read_text(encoding="utf-8").startswith(f"# {number}. ")


def test_every_setting_is_documented_with_its_default_and_short_variable() -> None:
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    rows = {
        cells[0].strip("`"): cells
        for line in text.splitlines()
        if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
    }
    fields = {"state_dir": "", "models": ()}
    fields |= {
        f"{section}.{name}": default
        for section, kind in config._SECTIONS.items()
        for name, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True)
    }
    assert set(rows) == set(fields)
    for name, default in fields.items():
        if type(default) in (int, float, bool):
            assert rows[name][1] == (f"{default}".lower() if isinstance(default, bool) else f"{default:.12g}"), name
    for variable, name in config._SHORT.items():
        assert f"`AGENTSERVE_{variable}`" in rows[name][2]


def test_architecture_names_every_module_folder() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    packages = ("agentserve", "statecache", "engine")
    folders = {str(Path(f).parent) for f in tracked if f.endswith(".py") and f.startswith(packages)}
    for folder in sorted(folders):
        assert Path(folder).name in text, f"{folder} has no line in docs/architecture.md"
