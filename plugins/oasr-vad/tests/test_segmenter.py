"""The segmenter on recordings: spans, windows, streams, rates."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from oasr_core.audio import load_audio
from oasr_core.errors import ConfigError
from oasr_core.registry import registry
from oasr_core.segmenters.gate import SegmenterGate
from oasr_vad.options import VadOptions
from oasr_vad.segmenter import VadSegmenter


def test_it_is_on_the_axis():
    segmenter = registry("segmenters").get("vad").from_options({"threshold": 0.6}, 16000)
    assert isinstance(segmenter, VadSegmenter)
    assert segmenter.options.end_threshold == pytest.approx(0.45)
    assert not segmenter.shares_audio
    assert segmenter.offers_streams


def test_neither_silero_vad_nor_torchaudio_is_imported():
    code = (
        "import sys, torch\n"
        "from oasr_core.registry import registry\n"
        "cls = registry('segmenters').get('vad')\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "assert cls.from_options({}, 16000).speech(torch.zeros(16000)) == []\n"
        "assert not {'silero_vad', 'torchaudio'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_silence_and_noise_hold_no_speech(vad):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(160000, generator=generator) * 0.1
    tone = torch.sin(torch.arange(160000) * 0.3) * 0.5
    for sound in (torch.zeros(160000), noise, tone, torch.zeros(0), torch.zeros(100)):
        assert vad.speech(sound) == []
        assert SegmenterGate(vad).is_silent(sound, 16000)


def test_every_recording_holds_speech(vad, digits):
    for name, clip in digits.items():
        spans = vad.speech(clip)
        assert spans, name
        assert all(0 <= span.start < span.end <= len(clip) for span in spans)
        assert all(a.end <= b.start for a, b in pairwise(spans))
        assert not SegmenterGate(vad).is_silent(clip, 16000)


def test_spans_lie_in_the_recordings_not_in_the_pauses(vad, digits, conversation):
    position, bounds = 0, []
    for clip in digits.values():
        bounds.append((position + 16000, position + 16000 + len(clip)))
        position += 16000 + len(clip)
    found = [False] * len(bounds)
    for span in vad.speech(conversation):
        (index,) = [i for i, (begin, end) in enumerate(bounds) if begin - 2000 < span.start and span.end < end + 2000]
        found[index] = True
    assert all(found)


def test_long_audio_is_cut_in_silence(vad, conversation):
    longest = 10 * 16000
    windows = vad.windows(conversation, longest)
    assert len(windows) > 3
    spans = vad.speech(conversation)
    for window in windows:
        assert window.end - window.start <= longest
        assert window.overlap_before == 0
        for span in spans:
            inside = window.start <= span.start and span.end <= window.end
            assert inside or span.end <= window.start or window.end <= span.start
    assert all(any(w.start <= s.start and s.end <= w.end for w in windows) for s in spans)


@pytest.mark.parametrize("piece", [3, 77, 512, 5000])
def test_a_stream_measures_the_silence_behind_the_speech(digits, piece):
    vad = VadSegmenter(VadOptions(min_speech_seconds=0.0, speech_pad_seconds=0.0), 16000)
    audio = torch.cat([digits["utt16_7d"][: 16000 * 2], torch.zeros(16000)])
    stream = vad.open_stream()
    assert stream.trailing_silence_seconds == 0.0
    for first in range(0, len(audio), piece):
        stream.push(audio[first : first + piece])
    silence = (len(audio) - vad.speech(audio)[-1].end) / 16000
    assert silence > 0.5
    assert stream.trailing_silence_seconds == pytest.approx(silence, abs=0.033)


def test_streams_do_not_depend_on_how_they_are_fed_nor_on_each_other(vad, conversation):
    audio = conversation[: 16000 * 12]
    whole, pieces, other = vad.open_stream(), vad.open_stream(), vad.open_stream()
    silences = []
    for first in range(0, len(audio), 1600):
        pieces.push(audio[first : first + 1000])
        other.push(torch.zeros(700))
        pieces.push(audio[first + 1000 : first + 1600])
        silences.append(pieces.trailing_silence_seconds)
    whole.push(audio)
    assert whole.trailing_silence_seconds == pieces.trailing_silence_seconds
    assert max(silences) > 0.8  # the pauses
    assert silences.count(0.0) > 10  # the digits


def test_silence_only_counts_from_the_start(vad):
    stream = vad.open_stream()
    stream.push(torch.zeros(16000 * 3))
    assert stream.trailing_silence_seconds == pytest.approx(3.0, abs=0.033)


def test_telephone_audio_is_served(wenet_digits, vad):
    narrow = VadSegmenter(VadOptions(), 8000)
    path = wenet_digits / "test_wavs" / "utt16_7d.wav"
    spans = narrow.speech(torch.from_numpy(load_audio(path, sample_rate=8000).samples.copy()))
    wide = vad.speech(torch.from_numpy(load_audio(path, sample_rate=16000).samples.copy()))
    assert spans
    assert spans[0].start / 8000 == pytest.approx(wide[0].start / 16000, abs=0.2)
    assert spans[-1].end / 8000 == pytest.approx(wide[-1].end / 16000, abs=0.2)
    assert narrow.speech(torch.zeros(8000)) == []


@pytest.mark.parametrize("rate", [22050, 48000])
def test_other_rates_are_refused(rate):
    with pytest.raises(ConfigError, match=f"8000 and 16000 Hz, and this model takes {rate} Hz"):
        VadSegmenter(VadOptions(), rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.5}, "Did you mean 'threshold'"),
        ({"threshold": 1.0}, "threshold=1.0"),
        ({"threshold": 0.4, "neg_threshold": 0.5}, "neg_threshold=0.5 is above threshold=0.4"),
        ({"min_speech_seconds": -1}, "min_speech_seconds=-1"),
        ({"speech_pad_seconds": float("nan")}, "speech_pad_seconds=nan"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        VadSegmenter.from_options(options, 16000)


def test_real_recordings_hold_speech(vad, shared_fixtures):
    paths = [path for path in (shared_fixtures / "audio").iterdir() if path.suffix in {".wav", ".flac", ".mp3", ".ogg"}]
    assert len(paths) > 10
    for path in paths:
        clip = torch.from_numpy(load_audio(path, sample_rate=16000).samples.copy())
        seconds = sum(span.end - span.start for span in vad.speech(clip)) / 16000
        assert 0.3 * len(clip) / 16000 < seconds, path.name
