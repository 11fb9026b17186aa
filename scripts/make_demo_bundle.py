"""Makes the data of oasr-demo-digits from the WeNet checkpoint in tests/data: the same bytes every time.

Usage: python scripts/make_demo_bundle.py [--check]
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from oasr_core.checkpoints.convert import convert_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "data" / "wenet_digits"
PACKAGE = ROOT / "plugins" / "oasr-demo-digits" / "src" / "oasr_demo_digits"
RECORDINGS = ("utt09_4d.wav", "utt11_5d.wav", "utt16_7d.wav")
MAX_BYTES = 10_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Compare with what is there and write nothing.")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        result = convert_checkpoint(SOURCE, made / "bundle", dtype="fp32")
        (made / "audio").mkdir()
        for name in RECORDINGS:
            shutil.copyfile(SOURCE / "test_wavs" / name, made / "audio" / name)
        files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
        size = sum((made / name).stat().st_size for name in files)
        if size > MAX_BYTES:
            print(f"the package data would be {size} bytes, the limit is {MAX_BYTES}", file=sys.stderr)
            return 1
        if check:
            stale = [str(n) for n in files if not _same(made / n, PACKAGE / n)]
            print(f"differs from what the script makes: {', '.join(stale)}" if stale else "up to date")
            return 1 if stale else 0
        for folder_name in ("bundle", "audio"):
            shutil.rmtree(PACKAGE / folder_name, ignore_errors=True)
            shutil.copytree(made / folder_name, PACKAGE / folder_name)
    print(f"{PACKAGE}: {len(files)} files, {size / 1e6:.1f} MB")
    print(result.report.summary())
    return 0


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
