"""Formats that a first-party plugin would claim, known here so that a refusal can name the missing distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError

#: ``model_type`` of a Hugging Face ``config.json``, by prefix.
_MODEL_TYPES: Final[Mapping[str, str]] = {
    "whisper": "oasr-whisper",
    "parakeet": "oasr-nemotron",
    "nemotron": "oasr-nemotron",
    "fastconformer": "oasr-nemotron",
    "qwen2_audio": "oasr-llm",
    "qwen3_asr": "oasr-llm",
}
_WENET_ENCODERS: Final = ("conformer", "transformer", "dual_conformer", "dual_transformer")


def likely_distributions(peek: CheckpointPeek) -> list[tuple[str, str]]:
    """``(distribution, marker that was found)`` for each first-party plugin whose format this looks like."""
    return [
        *_by_wenet_config(peek),
        *_by_model_type(peek),
        *_by_funasr_config(peek),
        *_by_layout(peek),
    ]


def _by_wenet_config(peek: CheckpointPeek) -> list[tuple[str, str]]:
    encoder = str(_mapping(peek, "train.yaml").get("encoder", ""))
    return [("oasr-conformer", f"train.yaml with encoder: {encoder}")] if encoder in _WENET_ENCODERS else []


def _by_model_type(peek: CheckpointPeek) -> list[tuple[str, str]]:
    kind = str(_mapping(peek, "config.json").get("model_type", ""))
    return [
        (distribution, f"config.json with model_type: {kind}")
        for prefix, distribution in _MODEL_TYPES.items()
        if kind.lower().startswith(prefix)
    ][:1]


def _by_funasr_config(peek: CheckpointPeek) -> list[tuple[str, str]]:
    model = str(_mapping(peek, "config.yaml").get("model", ""))
    return [("oasr-paraformer", f"config.yaml with model: {model}")] if "paraformer" in model.lower() else []


def _by_layout(peek: CheckpointPeek) -> list[tuple[str, str]]:
    files = peek.files()
    found = [("oasr-nemotron", name) for name in files if name.endswith(".nemo")][:1]
    if "model.bin" in files and any(name.startswith("vocabulary.") for name in files):
        found.append(("oasr-whisper", "model.bin with vocabulary.*"))
    icefall = next((name for name in files if _is_icefall_file(peek, name)), None)
    if icefall:
        found.append(("oasr-zipformer", icefall))
    return found


def _is_icefall_file(peek: CheckpointPeek, name: str) -> bool:
    if name.startswith("data/lang_") or name == "exp/pretrained.pt":
        return True
    if name.rsplit("/", 1)[-1] != "pretrained.pt":
        return False
    try:
        return any(tensor.startswith("encoder.encoders.0.") for tensor in peek.tensors(name))
    except CheckpointError:
        return False


def _mapping(peek: CheckpointPeek, name: str) -> Mapping[str, Any]:
    """A configuration file, or nothing where it is absent or unreadable: a hint must not become an error."""
    if not peek.exists(name):
        return {}
    try:
        content = peek.json(name) if name.endswith(".json") else peek.yaml(name)
    except CheckpointError:
        return {}
    return content if isinstance(content, Mapping) else {}
