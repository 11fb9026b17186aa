"""Throw-away distributions with real metadata, and subprocesses that see them: for tests of plugins and registries.

Use it as a fixture by importing :func:`plugin_env` into a ``conftest.py`` or a test module::

    from oasr_core.testing.plugin_env import plugin_env  # noqa: F401

    def test_listed(plugin_env):
        plugin_env.add("acme-asr", entry_points={"oasr.tokenizers": {"acme": "acme:Tok"}}, modules={"acme": SOURCE})
        assert "acme" in plugin_env.cli("plugins", "list").stdout
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Completed:
    """How a subprocess ended and what it wrote."""

    returncode: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """The last line of stdout, or all of it, as JSON."""
        try:
            return json.loads(self.stdout)
        except json.JSONDecodeError:
            return json.loads(self.stdout.strip().rpartition("\n")[2])


class PluginEnv:
    """A temporary place with distributions; nothing of it is seen by the current process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sites: list[str] = []

    def add(
        self,
        name: str,
        version: str = "1.0",
        *,
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        modules: Mapping[str, str] | None = None,
        requires: Sequence[str] = ("oasr-core",),
        site: str = "site",
        first: bool = False,
        record: bool = True,
    ) -> Path:
        """Write one distribution; returns its ``.dist-info`` folder.

        ``entry_points`` maps group -> name -> ``"module:object"`` (``None``: no such file); ``modules`` maps a dotted
        module name, or a path ending in ``.py``, to source. ``site`` is the folder on the path that it goes to, before
        the others where ``first``; ``record`` writes the list of installed files.
        """
        folder = self._site(site, first)
        files = [self._write(folder, module, source) for module, source in (modules or {}).items()]
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if entry_points is not None:
            text = "".join(
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
                for group, points in entry_points.items()
            )
            (info / "entry_points.txt").write_text(text, encoding="utf-8")
        if record:
            names = [path.relative_to(folder).as_posix() for path in [*files, *info.iterdir(), info / "RECORD"]]
            (info / "RECORD").write_text("".join(f"{path},,\n" for path in names), encoding="utf-8")
        return info

    def python(self, code: str, *, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Completed:
        """Run Python source as a script file (so that spawned workers find it), with the distributions on the path."""
        script = self.root / "script.py"
        script.write_text(code, encoding="utf-8")
        return self._run([sys.executable, str(script)], env, timeout)

    def cli(self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Completed:
        """Run ``oasr`` with the distributions on the path."""
        return self._run([sys.executable, "-m", "oasr_core.cli.main", *arguments], env, timeout)

    def _run(self, command: list[str], env: Mapping[str, str] | None, timeout: float) -> Completed:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OASR_")}
        paths = [str(self.root / site) for site in self.sites]
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
        # Python's own warning filters would turn what is tested into something else.
        environment.pop("PYTHONWARNINGS", None)
        environment.update(env or {})
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=self.root, timeout=timeout, check=False
        )
        return Completed(done.returncode, done.stdout, done.stderr)

    def _site(self, site: str, first: bool) -> Path:
        if site not in self.sites:
            self.sites.insert(0 if first else len(self.sites), site)
        folder = self.root / site
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @staticmethod
    def _write(folder: Path, module: str, source: str) -> Path:
        path = folder / (module if module.endswith(".py") else module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path


def tokenizer_source(name: str = "Tok", api: str | None = "1.0") -> str:
    """Source of a module with a valid tokenizer class ``name``; ``api`` ``None`` leaves its version out."""
    version = "" if api is None else f"\n    oasr_api = {api!r}"
    return _TOKENIZER.format(name=name, version=version)


_TOKENIZER = '''"""A tokenizer whose text is the ids."""
from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer


class {name}Decoder(IncrementalDecoder):
    def push(self, ids):
        return "".join(map(str, ids))

    def flush(self):
        return ""


class {name}(Tokenizer):
    """Ids as text."""
{version}
    vocab_size = 10
    special_ids = frozenset()

    @classmethod
    def from_spec(cls, spec):
        return cls()

    def decode(self, ids):
        return "".join(map(str, ids))

    def token_pieces(self, ids):
        return [str(i) for i in ids]

    def incremental(self):
        return {name}Decoder()
'''


@pytest.fixture
def plugin_env(tmp_path: Path) -> PluginEnv:
    """An empty :class:`PluginEnv` in the test's temporary folder."""
    return PluginEnv(tmp_path)
