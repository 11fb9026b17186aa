"""Build the wheels of the core and of every plugin, look inside, install them into an empty environment, transcribe."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; a failure ends the check with what it printed."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} exited {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_content(wheel: Path) -> None:
    """A wheel carries its entry points, its type marker and no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("entry_points.txt", "py.typed"):
        if not any(name.endswith(wanted) for name in names):
            sys.exit(f"{wheel.name} lacks {wanted}")
    if any(part in name for name in names for part in ("tests/", "conftest.py")):
        sys.exit(f"{wheel.name} carries tests")
    if wheel.stat().st_size > 10 * 2**20:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than 10 MiB")


def main() -> None:
    """Build, look, install, transcribe."""
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder) / "dist"
        for project in PROJECTS:
            run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, project)
        wheels = sorted(dist.glob("*.whl"))
        if len(wheels) != len(PROJECTS):
            sys.exit(f"{len(PROJECTS)} projects gave {[wheel.name for wheel in wheels]}")
        for wheel in wheels:
            check_content(wheel)
        empty = Path(folder) / "empty"
        venv.create(empty, with_pip=True)
        python = empty / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, *wheels)
        oasr = empty / "bin" / "oasr"
        listed = run(oasr, "plugins", "list", cwd=Path(folder))
        for name in ("conformer", "wenet", "ctc", "demo-digits", "fbank"):
            if name not in listed:
                sys.exit(f"`oasr plugins list` of the installed wheels does not show {name}:\n{listed}")
        run(oasr, "plugins", "check", cwd=Path(folder))
        code = (
            "from pathlib import Path; import wave, numpy as np, oasr_demo_digits\n"
            "from oasr_core import ASREngine, EngineConfig\n"
            "path = Path(oasr_demo_digits.__file__).parent / 'audio' / 'utt16_7d.wav'\n"
            "with wave.open(str(path)) as file: data = file.readframes(file.getnframes())\n"
            "samples = np.frombuffer(data, dtype='<i2').astype('float32') / 32768\n"
            "with ASREngine(EngineConfig(ckpt_dir='demo-digits', device='cpu', dtype='float32')) as engine:\n"
            "    print(engine.transcribe(samples, streaming=False), '|', engine.transcribe(samples, streaming=True))\n"
        )
        heard = run(python, "-c", code, cwd=Path(folder)).strip()
        if heard != " | ".join(["FIVE SIX THREE TWO NINE ONE EIGHT"] * 2):
            sys.exit(f"the installed wheels transcribe {heard!r}")
        sizes = ", ".join(f"{wheel.name} {wheel.stat().st_size >> 10} KiB" for wheel in wheels)
        print(f"wheels: {sizes}; installed into an empty environment and transcribed: {heard}")


if __name__ == "__main__":
    main()
