"""Any checkpoint to the native format, in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from oasr_core.checkpoints.load import LoadReport, load_model
from oasr_core.checkpoints.native import DTypeName, require_writable, save_native
from oasr_core.checkpoints.resolve import resolve_checkpoint


@dataclass(frozen=True)
class Conversion:
    """What was converted: ``size`` is the bytes of all files in ``directory``."""

    directory: Path
    architecture: str
    converter: str
    report: LoadReport
    size: int


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    architecture: str | None = None,
    checkpoint_name: str | None = None,
    dtype: DTypeName | None = None,
    force: bool = False,
) -> Conversion:
    """Convert ``src`` to a native bundle at ``dst``.

    The model is built and loaded, so that a checkpoint that does not fit is refused here and not at the first use, and
    only the tensors that it takes are written. Raises ``CheckpointError``.
    """
    require_writable(Path(dst), force)
    bundle = resolve_checkpoint(src, architecture=architecture, checkpoint_name=checkpoint_name)
    _, report = load_model(bundle)
    taken = {name: bundle.state_dict[name] for name in report.mapped}
    directory = save_native(replace(bundle, state_dict=taken), dst, dtype=dtype, force=force)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return Conversion(directory, bundle.architecture, bundle.converter, report, size)
