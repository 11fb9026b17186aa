"""Recognises Whisper in CTranslate2 layout, as faster-whisper uses it (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from oasr_core.checkpoints.converter import RANK_ASSET_LAYOUT, RANK_KEYED_VALUE, CheckpointConverter, Detection
from oasr_whisper.ct2_file import read_spec

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import CheckpointBundle
    from oasr_core.checkpoints.peek import CheckpointPeek

WHISPER_SPEC: Final = "WhisperSpec"


class CTranslate2Converter(CheckpointConverter):
    """Directories with a ``model.bin`` that ``ct2-transformers-converter`` made of a Whisper model."""

    oasr_api = "1.0"
    looks_for: ClassVar[tuple[str, ...]] = (
        f"model.bin whose header names the spec {WHISPER_SPEC}",
        "model.bin of another or an unreadable kind beside vocabulary.json or vocabulary.txt",
    )
    architectures: ClassVar[tuple[str, ...]] = ("whisper",)
    default_checkpoint_name: ClassVar[str | None] = "model.bin"

    def detect(self, peek: CheckpointPeek) -> Detection | None:
        """Claim by the file's header; other models of CTranslate2 weakly, so that they are refused by name."""
        if not peek.is_directory:
            return None  # the vocabulary lies beside: the directory is asked next
        for name in sorted(peek.files(), key=lambda name: name != "model.bin"):
            if "/" in name or not name.endswith(".bin"):
                continue
            spec = read_spec(peek.directory / name)
            if spec == WHISPER_SPEC:
                return Detection(RANK_KEYED_VALUE, f"{name}: {spec} of CTranslate2")
            if spec is not None:
                return Detection(RANK_ASSET_LAYOUT, f"{name}: {spec} of CTranslate2")
        if peek.exists("model.bin") and any(peek.exists(f"vocabulary.{form}") for form in ("json", "txt")):
            return Detection(RANK_ASSET_LAYOUT, "model.bin with vocabulary.*")
        return None

    def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
        """Read everything; raises ``CheckpointError`` naming the file and, inside of ``model.bin``, the offset."""
        from oasr_whisper.convert_ctranslate2 import convert

        return convert(peek, checkpoint_name or "model.bin")
