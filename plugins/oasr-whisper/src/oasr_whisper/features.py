"""Features of a Whisper checkpoint (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oasr_core.checkpoints.bundle import FeatureSpec
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError
from oasr_whisper.config import SUBSAMPLING

#: Of Hugging Face's feature extractor: newer repositories keep it inside the processor's file.
_FILES: Final = (("preprocessor_config.json", None), ("processor_config.json", "feature_extractor"))
_DEFAULTS: Final[Mapping[str, int]] = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160}


def feature_spec(peek: CheckpointPeek, n_mels: int, positions: int) -> FeatureSpec:
    """The frontend's settings; ``CheckpointError`` where the feature extractor's file contradicts the weights.

    ``n_mels`` and ``positions`` (encoder frames of a window) are the weights'. The file may be absent.
    """
    name, stated = _extractor(peek)
    rate, n_fft, hop = (stated.get(key) or default for key, default in _DEFAULTS.items())
    seconds, rest = divmod(SUBSAMPLING * positions * hop, rate)
    expected = {"feature_size": n_mels, "chunk_length": seconds}
    wrong = {key: stated[key] for key, value in expected.items() if stated.get(key) not in (None, value)}
    if rest or wrong:
        raise CheckpointError(
            f"{peek.directory / name}: the weights take windows of {SUBSAMPLING * positions} frames x {n_mels} mel "
            f"bins, which is feature_size {n_mels} and chunk_length {SUBSAMPLING * positions * hop / rate:g}; the file "
            f"says {wrong or f'hop_length {hop} and sampling_rate {rate}'}. They do not belong together."
        )
    options = {"sample_rate": rate, "n_fft": n_fft, "hop_length": hop, "num_mel_bins": n_mels, "chunk_seconds": seconds}
    return FeatureSpec(kind="whisper_logmel", audio_scale=1.0, options=options)


def _extractor(peek: CheckpointPeek) -> tuple[str, Mapping[str, Any]]:
    for name, key in _FILES:
        if not peek.exists(name):
            continue
        content = peek.json(name)
        found = content.get(key) if key is not None and isinstance(content, dict) else content
        if isinstance(found, dict):
            return name, found
    return _FILES[0][0], {}
