"""Recognises Whisper in Hugging Face layout (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from oasr_core.checkpoints.converter import RANK_KEYED_VALUE, CheckpointConverter, Detection

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import CheckpointBundle
    from oasr_core.checkpoints.peek import CheckpointPeek


class WhisperConverter(CheckpointConverter):
    """Directories as ``WhisperForConditionalGeneration.save_pretrained`` writes them, and Hub repositories."""

    oasr_api = "1.0"
    looks_for: ClassVar[tuple[str, ...]] = ('config.json with "model_type": "whisper"',)
    architectures: ClassVar[tuple[str, ...]] = ("whisper",)
    default_checkpoint_name: ClassVar[str | None] = "model.safetensors"

    def detect(self, peek: CheckpointPeek) -> Detection | None:
        """Claim a ``config.json`` that says whisper."""
        if not peek.exists("config.json"):
            return None
        config = peek.json("config.json")
        if not isinstance(config, dict) or config.get("model_type") != "whisper":
            return None
        return Detection(RANK_KEYED_VALUE, "config.json: model_type whisper")

    def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
        """Read everything; raises ``CheckpointError`` naming the file at fault."""
        from oasr_whisper.convert_huggingface import convert

        return convert(peek, checkpoint_name)
