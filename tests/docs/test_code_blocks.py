"""Every block of the documentation that is marked ``run`` runs, and the tutorial's plugin works."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/user-guide.md", "docs/plugins.md")


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_run(name, repo_root, blocks, sandbox):
    for block in blocks(repo_root / name):
        if block.tag == "run":
            sandbox.run(block)


def test_the_guides_have_blocks_that_run(repo_root, blocks):
    counts = {name: sum(b.tag == "run" for b in blocks(repo_root / name)) for name in DOCUMENTS}
    assert counts["docs/user-guide.md"] >= 8
    assert counts["docs/plugins.md"] >= 1


@pytest.mark.slow
def test_tutorial_plugin_works_when_installed(repo_root, blocks, sandbox):
    tutorial = blocks(repo_root / "docs" / "plugins.md")
    for block in tutorial:
        if block.tag.startswith("file="):
            path = sandbox.folder / block.tag.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    source = sandbox.folder / "oasr-confident" / "src"
    write_metadata(sandbox.folder / "oasr-confident" / "pyproject.toml", source)
    sandbox.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    (commands,) = [block for block in tutorial if block.tag == "plugin"]
    printed = sandbox.run(commands)
    assert "2 passed" in printed
    assert "min_posterior" in printed
    assert "SIX THREE THREE" in printed


def write_metadata(pyproject: Path, folder: Path) -> None:
    """What installing the distribution in place would leave beside its modules: its metadata and entry points."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    info.joinpath("METADATA").write_text(head + "".join(f"Requires-Dist: {r}\n" for r in project["dependencies"]))
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    info.joinpath("entry_points.txt").write_text("\n".join(groups))
