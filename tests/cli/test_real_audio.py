"""`oasr transcribe` as a user runs it: WeNet's error rates, and one recording in every kind of file."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr
from typer.testing import CliRunner

from oasr_core.cli.transcribe import app
from oasr_core.metrics import ErrorCounts, count_errors

NAME, TEXT = "utt09_4d", "NINE SIX TWO SIX"
COMMON = ["--device", "cpu", "--dtype", "float32", "--decode-option", "search=greedy", "--format", "jsonl"]
MODES = {
    "offline": (["--mode", "offline"], 0.93),
    "streaming": (["--mode", "streaming"], 1.85),
    "4 left chunks": (["--mode", "streaming", "--set", "num_left_chunks=4"], 2.78),
}


def transcribe(model: Path, files: list[Path], *options: str) -> list[dict]:
    result = CliRunner().invoke(app, [*map(str, files), "--model", str(model), *COMMON, *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_error_rate_is_wenets(wenet_digits, mode):
    options, wer = MODES[mode]
    wavs = sorted((wenet_digits / "test_wavs").glob("*.wav"))
    lines = (wenet_digits / "test_wavs" / "text").read_text().splitlines()
    reference = dict(line.split("\t") for line in lines)
    rows = transcribe(wenet_digits, wavs, *options)
    assert [row["file"] for row in rows] == [str(wav) for wav in wavs]
    counts = [count_errors(reference[Path(row["file"]).stem].split(), row["text"].split()) for row in rows]
    assert round(100 * sum(counts, ErrorCounts()).rate, 2) == wer


def encode(path: Path, codec: str, samples: np.ndarray, rate: int) -> Path:
    """Mono audio through one of FFmpeg's encoders."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        for part in [*av.AudioResampler(stream.format, "mono", rate).resample(frame)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="module")
def kinds(wenet_digits, tmp_path_factory) -> list[Path]:
    """One recording as wav, flac, mp3, m4a, opus, ogg, at 8, 44.1 and 48 kHz, mono and stereo, 8 to 32 bits.

    Not every recording survives 8 kHz: that loses the noise above 4 kHz that the model was trained with.
    """
    folder = tmp_path_factory.mktemp("kinds")
    samples, rate = soundfile.read(wenet_digits / "test_wavs" / f"{NAME}.wav", dtype="float32")
    high = soxr.resample(samples, rate, 44100)
    low = soxr.resample(samples, rate, 8000)
    stereo = np.stack([high, np.zeros_like(high)], axis=1)
    made = []
    for name, data, at, subtype in (
        ("a.flac", samples, rate, None),
        ("b.mp3", samples, rate, None),
        ("c.ogg", samples, rate, None),
        ("d_44k_stereo.flac", stereo, 44100, "PCM_24"),
        ("e_8k.wav", low, 8000, "PCM_16"),
        ("f_mulaw.wav", samples, rate, "ULAW"),
        ("g_float.wav", samples, rate, "FLOAT"),
        ("h_32.wav", samples, rate, "PCM_32"),
    ):
        soundfile.write(folder / name, data, at, subtype=subtype)
        made.append(folder / name)
    made.append(encode(folder / "i.m4a", "aac", high, 44100))
    made.append(encode(folder / "j.opus", "libopus", soxr.resample(samples, rate, 48000), 48000))
    return made


@pytest.mark.parametrize("mode", ["offline", "streaming"])
def test_every_kind_of_file_gives_the_same_text(wenet_digits, kinds, mode):
    rows = transcribe(wenet_digits, kinds, "--mode", mode)
    assert {Path(row["file"]).name: row["text"] for row in rows} == {kind.name: TEXT for kind in kinds}
    assert all(row["duration"] == pytest.approx(3.29, abs=0.1) for row in rows)
