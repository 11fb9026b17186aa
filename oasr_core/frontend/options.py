"""Settings of the built-in frontends and of the engine's feature stage (torch-free)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class FeatureConfig(BaseModel):
    """Kaldi-compatible FBANK/MFCC settings; the names and meanings are Kaldi's.

    Source: Kaldi ``feat/feature-window.h``, ``feature-fbank.h``, ``feature-mfcc.h``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sample_rate: int = Field(16000, gt=0, description="Hz that the waveform must have.")
    num_mel_bins: int = Field(80, gt=0, description="Triangular mel filters.")
    frame_length_ms: float = Field(25.0, gt=0, description="Window length in milliseconds.")
    frame_shift_ms: float = Field(10.0, gt=0, description="Distance of frames in milliseconds.")
    dither: float = Field(0.0, ge=0, description="Gaussian noise added to samples; 0 is deterministic.")
    preemphasis: float = Field(0.97, ge=0, le=1, description="Pre-emphasis coefficient.")
    remove_dc_offset: bool = Field(True, description="Subtract the mean of each frame.")
    window_type: Literal["povey", "hamming", "hanning", "rectangular", "blackman"] = "povey"
    round_to_power_of_two: bool = Field(True, description="Zero-pad frames to a power of two for the FFT.")
    low_freq: float = Field(20.0, description="Lower edge of the mel bank in Hz.")
    high_freq: float = Field(0.0, description="Upper edge in Hz; 0 or negative is an offset from Nyquist.")
    snip_edges: bool = Field(True, description="Only whole windows; False centres frames and mirrors the edges.")
    energy_floor: float = Field(0.0, ge=0, description="Floor of the energy column (0: float epsilon).")
    use_energy: bool = Field(False, description="Put log energy in front (FBANK) or in place of C0 (MFCC).")
    raw_energy: bool = Field(True, description="Energy before pre-emphasis and windowing.")
    use_power: bool = Field(True, description="Power spectrum; False takes magnitudes.")
    use_log_fbank: bool = Field(True, description="Logarithm of the mel energies.")
    num_ceps: int = Field(13, gt=0, description="MFCC only: cepstra kept.")
    cepstral_lifter: float = Field(22.0, ge=0, description="MFCC only: liftering coefficient, 0 for none.")
    lfr_m: int = Field(1, ge=1, description="Low frame rate: frames stacked into one.")
    lfr_n: int = Field(1, ge=1, description="Low frame rate: frames advanced each time.")


class WhisperLogMelOptions(BaseModel):
    """Settings of Whisper's log-mel spectrogram; the defaults are those of every model up to large-v2.

    Source: OpenAI's ``whisper/audio.py``, Hugging Face's ``WhisperFeatureExtractor``, faster-whisper's
    ``feature_extractor.py``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sample_rate: int = Field(16000, gt=0, description="Hz that the waveform must have.")
    n_fft: int = Field(400, gt=0, description="Samples of a frame and of its FFT.")
    hop_length: int = Field(160, gt=0, description="Samples between frames.")
    num_mel_bins: int = Field(80, gt=0, description="Triangular mel filters: 80, or 128 for large-v3 and turbo.")
    chunk_seconds: int = Field(30, gt=0, description="Window that the encoder takes, in seconds.")
    padding: Literal["audio", "feature"] = Field(
        "audio",
        description="What fills the window after the audio: 'audio' takes the spectrogram of silence (Hugging Face), "
        "'feature' puts zeros into the spectrogram (faster-whisper).",
    )


class FeatureOptions(BaseModel):
    """What the engine's feature stage reads."""

    audio_scale: float = Field(32768.0, gt=0, description="Multiplied into the waveform; unset: the checkpoint's.")
    feature_config: FeatureConfig | None = Field(None, description="Overrides the checkpoint's features (warned).")
    frontend_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the checkpoint's frontend, over what the checkpoint says (warned).",
    )
