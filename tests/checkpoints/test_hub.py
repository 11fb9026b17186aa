"""Checkpoints by Hugging Face id: against a small server that speaks the Hub's protocol, and from a prepared cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from oasr_core.checkpoints.native import save_native
from oasr_core.checkpoints.resolve import resolve_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves the files of one directory as repository ``org/digits``, at ``main`` and at the tag ``v1``."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[2:4] == ["org", "digits"] and parts[5] in ("main", "v1", COMMIT):
            names = [p.relative_to(self.server.root).as_posix() for p in self.server.root.rglob("*") if p.is_file()]
            siblings = [{"rfilename": name} for name in names]
            if parts[4] == "tree":
                body = [{"type": "file", "path": n, "size": self._size(n), "oid": "0" * 40} for n in names]
            else:
                body = {"id": "org/digits", "modelId": "org/digits", "sha": COMMIT, "siblings": siblings, "tags": []}
            self._reply(json.dumps(body).encode(), "application/json")
        elif parts[:3] == ["org", "digits", "resolve"] and parts[3] in ("main", "v1", COMMIT):
            path = self.server.root / "/".join(parts[4:])
            self._reply(path.read_bytes(), "application/octet-stream") if path.is_file() else self._refuse(
                "EntryNotFound"
            )
        else:
            self._refuse("RevisionNotFound" if "digits" in parts else "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the base class' name

    def _size(self, name: str) -> int:
        return (self.server.root / name).stat().st_size

    def _reply(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(tiny_bundle, tmp_path) -> Iterator[FakeHub]:
    root = save_native(tiny_bundle, tmp_path / "repository")
    (root / "flax_model.msgpack").write_bytes(b"another framework")
    server = FakeHub(root)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def locate(tmp_path):
    """Locates checkpoints in a fresh process (the Hub's client reads its environment at import)."""
    code = """
import json, sys
from oasr_core.checkpoints.locate import locate_checkpoint
from oasr_core.errors import CheckpointError
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = str(locate_checkpoint(name))
    except CheckpointError as error:
        found[name] = f"error: {error} [{type(error.__cause__).__name__}]"
print(json.dumps(found))
"""

    def locate(*names: str, **environment: str) -> dict[str, str]:
        cache = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-c", code, *names]
        environment = {**os.environ, **cache, "HF_HUB_OFFLINE": "0", **environment}
        run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found: dict[str, str] = json.loads(run.stdout)
        return found

    return locate


def test_hub_ids_are_downloaded_once_and_served_offline_from_the_cache(hub, locate, tmp_path):
    names = ("org/digits", "org/digits@v1", f"org/digits@{COMMIT}")
    found = locate(*names, "org/nothing", "org/digits@nowhere", HF_ENDPOINT=hub.endpoint)
    snapshot = tmp_path / "cache" / "models--org--digits" / "snapshots" / COMMIT
    assert [found[name] for name in names] == [str(snapshot)] * 3
    assert found["org/nothing"].startswith("error: 'org/nothing' is no path on this machine")
    assert "RepositoryNotFoundError" in found["org/nothing"]
    assert "at revision nowhere" in found["org/digits@nowhere"]
    assert sum(request.startswith("GET") and "model.safetensors" in request for request in hub.requests) == 1
    assert not any("msgpack" in request for request in hub.requests)

    bundle = resolve_checkpoint(snapshot)
    assert bundle.architecture == "tiny"
    assert bundle.tokenizer.files["symbols"].read_text(encoding="utf-8").startswith("<blank> 0")

    hub.requests.clear()
    offline = locate("org/digits", "org/digits@v1", "org/other", HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
    assert offline["org/digits"] == offline["org/digits@v1"] == str(snapshot)
    assert offline["org/other"].startswith("error: 'org/other' is no path on this machine")
    assert "Pretrained names that are installed" in offline["org/other"]
    assert hub.requests == []


def test_what_is_no_hub_id_asks_nobody(hub, locate):
    names = ("a/b/c", "./org/digits", "org/", "/org/digits", "org/digits@", "org digits", "-org/digits")
    found = locate(*names, HF_ENDPOINT=hub.endpoint)
    assert all(found[name].startswith(f"error: There is no checkpoint at {name!r}") for name in names)
    assert hub.requests == []
