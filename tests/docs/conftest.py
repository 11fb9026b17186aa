"""Reads fenced blocks out of the documentation and gives them a folder to run in."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

_FENCE = re.compile(r"^```(\w+) +(\S.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block whose info string has a tag after the language."""

    path: Path
    line: int
    language: str
    tag: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.name}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text.count("\n", 0, match.start(3)), match[1], match[2], match[3])
        for match in _FENCE.finditer(text)
    ]


@dataclass
class Sandbox:
    """A folder with recordings, in which blocks run one after another; Python blocks share their names."""

    folder: Path
    env: dict[str, str]
    names: dict[str, object]

    def run(self, block: Block) -> str:
        if block.language == "python":
            # Leading newlines make line numbers of tracebacks those of the document.
            code = compile("\n" * block.line + block.text, str(block.path), "exec")
            exec(code, self.names)
            return ""
        return self.shell(block)

    def shell(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{block.where} exits with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def sandbox(tmp_path: Path, wenet_digits: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    wavs = wenet_digits / "test_wavs"
    shutil.copy(wavs / "utt07_3d.wav", tmp_path / "digits.wav")
    shutil.copy(wavs / "utt02_2d.wav", tmp_path / "more.wav")
    monkeypatch.chdir(tmp_path)
    scripts = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": scripts + os.pathsep + os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"}
    return Sandbox(tmp_path, env, {"__name__": "documentation"})


@pytest.fixture(scope="session")
def blocks():
    return read_blocks


@pytest.fixture(scope="session")
def gen_docs(repo_root: Path) -> ModuleType:
    """scripts/gen_docs.py as a module."""
    spec = importlib.util.spec_from_file_location("gen_docs", repo_root / "scripts" / "gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gen_docs"] = module
    spec.loader.exec_module(module)
    return module
