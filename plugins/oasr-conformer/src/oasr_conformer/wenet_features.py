"""Features that a WeNet checkpoint was trained on (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oasr_conformer.wenet_config import refuse, section
from oasr_core.checkpoints.bundle import FeatureSpec
from oasr_core.errors import CheckpointError, did_you_mean

#: WeNet feeds Kaldi's features with samples of 16 bits.
AUDIO_SCALE = 32768.0

# WeNet's key -> FeatureConfig's.
_FBANK_KEYS = {
    "num_mel_bins": "num_mel_bins",
    "mel_bins": "num_mel_bins",
    "frame_length": "frame_length_ms",
    "frame_shift": "frame_shift_ms",
    "window_type": "window_type",
}
_MFCC_KEYS = {**_FBANK_KEYS, "num_ceps": "num_ceps", "high_freq": "high_freq", "low_freq": "low_freq"}
# Dither is noise for training; recognition runs without it. The rest of the first release's keys name no setting.
_IGNORED = frozenset({"dither", "feature_type", "speed_perturb", "wav_distortion_conf"})


def feature_spec(config: Mapping[str, Any]) -> FeatureSpec:
    """The frontend and its options; raises ``CheckpointError`` where they do not give the model's input dimension."""
    kind, name, conf = _source(config)
    keys = _FBANK_KEYS if kind == "fbank" else _MFCC_KEYS
    dim = config.get("input_dim", 80)
    # WeNet's defaults for what a section leaves out; with no section at all, features came ready-made.
    options: dict[str, Any] = {"num_mel_bins": 23 if conf else dim, "dither": 0.0}
    if kind == "mfcc":
        options["num_ceps"] = 40
    for key, value in conf.items():
        if key == "using_pitch" and value:
            raise refuse(f"{name}.using_pitch", value, (False,))
        if key in keys:
            options[keys[key]] = value
        elif key not in _IGNORED and key != "using_pitch":
            raise CheckpointError(
                f"train.yaml: {name}.{key} is unknown, so it cannot be told whether it changes the features."
                f"{did_you_mean(str(key), keys)}"
            )
    width = options["num_mel_bins"] if kind == "fbank" else options["num_ceps"]
    if width != dim:
        raise CheckpointError(f"train.yaml: {name} gives features of {width} values a frame, but input_dim is {dim}.")
    options["sample_rate"] = section(section(config, "dataset_conf"), "resample_conf").get("resample_rate", 16000)
    return FeatureSpec(kind=kind, audio_scale=AUDIO_SCALE, options=options)


def _source(config: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """Kind of features, and the section (name and content) that sets them."""
    dataset = section(config, "dataset_conf")
    first_release = section(section(config, "collate_conf"), "feature_extraction_conf")
    declared = dataset.get("feats_type") or first_release.get("feature_type")
    present = [kind for kind in ("fbank", "mfcc", "log_mel_spectrogram") if f"{kind}_conf" in dataset]
    kind = declared or (present[0] if present else "fbank")
    if kind not in ("fbank", "mfcc"):
        raise refuse("the feature type", kind, ("fbank", "mfcc"))
    if first_release:
        return kind, "collate_conf.feature_extraction_conf", first_release
    return kind, f"dataset_conf.{kind}_conf", section(dataset, f"{kind}_conf")
