"""Audio in: faults that users of other engines reported, up to the features."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import torch

from oasr_core.audio import Audio, StreamResampler, load_audio
from oasr_core.errors import InvalidAudioError
from oasr_core.frontend.fbank import FbankFrontend
from oasr_core.frontend.input import InputProcessor
from oasr_core.frontend.options import FeatureConfig

# Two windows of a Conformer's encoder with chunk_size 16: 67 feature frames, 64 further on.
TWO_WINDOWS = 400 + 160 * (67 + 64)


@pytest.fixture(params=[True, False], ids=["snip_edges", "mirrored"])
def processor(request):
    return InputProcessor(FbankFrontend(FeatureConfig(snip_edges=request.param), 32768.0))


def streamed(processor, samples, size=1600):
    stream = processor.open_stream()
    for start in range(0, len(samples), size):
        stream.append(samples[start : start + size])
        processor.extract_streaming_batch([stream])
    stream.finish()
    processor.extract_streaming_batch([stream])
    return stream.window(stream.frames_ready)


class TestTooShortClips:
    """k2-fsa/sherpa-onnx#3685: a very short clip gave zero or negative shapes and ended the program."""

    def test_every_length_up_to_two_windows(self, processor):
        noise = processor.prepare_waveform(np.random.default_rng(0).uniform(-0.5, 0.5, TWO_WINDOWS))
        second = torch.zeros(16000)
        edges = [0, 1, 79, 80, 159, 160, 161, 239, 240, 241, 399, 400, 401, 559, 560, 561]
        for length in [*edges, *range(600, TWO_WINDOWS, 97), TWO_WINDOWS]:
            clip = noise[:length]
            features, frames = processor.extract([clip, second])
            alone, (count,) = processor.extract([clip])
            expected = (length + 80) // 160 if processor.frontend.options.snip_edges is False else (length - 240) // 160
            assert frames[0] == count == processor.num_frames(length) == max(0, expected)
            assert alone.shape == (1, count, 80)
            torch.testing.assert_close(features[0, :count], alone[0], rtol=0, atol=2e-5)
            assert not features[0, count:].any()
            torch.testing.assert_close(streamed(processor, clip), alone[0], rtol=0, atol=2e-5)


class TestNoSamples:
    """Kieirra/murmure#405: a key pressed and released at once sent a (1, 0) buffer into a reflecting pad."""

    @pytest.mark.parametrize("audio", [np.zeros(0, np.float32), np.zeros((1, 0), np.float32), torch.zeros(1, 0), []])
    def test_an_empty_waveform(self, processor, audio):
        samples = processor.prepare_waveform(audio)
        features, frames = processor.extract([samples])
        assert features.shape == (1, 0, 80)
        assert frames == [0]

    def test_a_stream_that_got_nothing(self, processor):
        stream = processor.open_stream()
        stream.finish()
        processor.extract_streaming_batch([stream])
        assert (stream.samples_received, stream.frames_ready) == (0, 0)
        assert stream.window(67).shape == (0, 80)


class TestInvalidAudio:
    """Blaizzy/mlx-audio#928: NaN and infinity were transcribed, a 10 ms clip was padded and said to last a second."""

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_not_finite(self, processor, value):
        samples = np.zeros(16000, np.float32)
        samples[100] = value
        with pytest.raises(InvalidAudioError, match=r"sample 100 \(at 0\.0063 s\)"):
            processor.prepare_waveform(samples)

    def test_ten_milliseconds_stay_ten_milliseconds(self, processor):
        audio = Audio(np.zeros(160, np.float32), 16000)
        assert audio.duration == 0.01
        samples = processor.prepare_waveform(audio.samples)
        assert samples.shape == (160,)
        seconds = processor.num_frames(len(samples)) * processor.frontend.frame_seconds
        assert seconds <= audio.duration


class TestRatesAndChannels:
    """k2-fsa/sherpa-onnx#502: a 48 kHz two-channel device, and users who change the model's rate to fit it."""

    @staticmethod
    def chirp(rate):
        """One second from 200 to 3500 Hz, fading in and out, which every one of the rates can hold."""
        t = np.arange(rate) / rate
        return (0.4 * np.sin(np.pi * t) * np.sin(2 * np.pi * (200 * t + 1650 * t * t))).astype(np.float32)

    @staticmethod
    def assert_alike(ours, native):
        """Equal where there is sound: within 10 nepers of the loudest bin of a frame, and not at the very edges."""
        ours, native = ours[5:93], native[5:93]
        loud = native > native.max(dim=1, keepdim=True).values - 10
        assert (ours - native)[loud].abs().max() < 0.05

    @pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
    def test_one_chirp_at_four_rates(self, processor, rate):
        native = processor.extract([processor.prepare_waveform(self.chirp(16000))])[0][0]
        whole = processor.prepare_waveform(self.chirp(rate), sample_rate=rate)
        assert whole.shape == (16000,)
        self.assert_alike(processor.extract([whole])[0][0], native)
        resampler = StreamResampler(rate, 16000)
        pieces = np.array_split(self.chirp(rate), 50)
        parts = [resampler.push(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        self.assert_alike(streamed(processor, processor.prepare_waveform(np.concatenate(parts))), native)

    @pytest.mark.parametrize("rate", [8000, 44100, 48000])
    def test_a_stereo_file(self, processor, rate):
        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, np.stack([self.chirp(rate), -0.1 * self.chirp(rate)], 1), rate, format="WAV")
        native = processor.extract([processor.prepare_waveform(self.chirp(16000))])[0][0]
        audio = load_audio(io.BytesIO(buffer.getvalue()), sample_rate=processor.frontend.sample_rate)
        self.assert_alike(processor.extract([processor.prepare_waveform(audio.samples)])[0][0], native)

    def test_interleaved_channels_are_not_one_channel(self, processor):
        with pytest.raises(InvalidAudioError, match="choose a channel"):
            processor.prepare_waveform(np.stack([self.chirp(16000)] * 2, 1))


PCM = (np.random.default_rng(0).standard_normal(4001) * 3000).astype("<i2")


def chunk(kind, payload, size=None):
    return kind + struct.pack("<I", len(payload) if size is None else size) + payload + b"\0" * (len(payload) % 2)


def fmt(size, channels=1):
    plain = struct.pack("<HHIIHH", 1, channels, 16000, 32000 * channels, 2 * channels, 16)
    if size == 18:
        return chunk(b"fmt ", plain + b"\0\0")
    if size == 40:
        guid = bytes.fromhex("0100000000001000800000aa00389b71")
        return chunk(b"fmt ", b"\xfe\xff" + plain[2:] + struct.pack("<HHI", 22, 16, 0) + guid)
    return chunk(b"fmt ", plain)


def riff(*chunks, size=None):
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


DATA = chunk(b"data", PCM.tobytes())
LIST = chunk(b"LIST", b"INFOISFT\x0e\0\0\0Lavf60.16.100\0")
HEADERS = {
    "fmt of 16 bytes": riff(fmt(16), DATA),
    "fmt of 18 bytes": riff(fmt(18), DATA),
    "fmt of 40 bytes": riff(fmt(40), DATA),
    "JUNK before fmt": riff(chunk(b"JUNK", bytes(28)), fmt(16), DATA),
    "FLLR up to a page": riff(fmt(16), chunk(b"FLLR", bytes(4044)), DATA),
    "LIST before data": riff(fmt(16), LIST, DATA),
    "LIST after data": riff(fmt(16), DATA, LIST),
    "odd chunk before fmt": riff(chunk(b"bext", b"odd"), fmt(16), DATA),
    "odd chunk before data": riff(fmt(16), chunk(b"note", b"x"), DATA),
    "fact and many more": riff(chunk(b"JUNK", b""), fmt(18), chunk(b"fact", struct.pack("<I", 4001)), LIST, DATA, LIST),
    "length unknown": riff(fmt(16), chunk(b"data", PCM.tobytes(), 0xFFFFFFFF), size=0xFFFFFFFF),
    "half of unknown": riff(fmt(16), chunk(b"data", PCM.tobytes(), 0x7FFFFFFF - 36), size=0x7FFFFFFF),
    "never finished": riff(fmt(16), chunk(b"data", PCM.tobytes(), 0), size=0),
}


class TestWavHeaders:
    """k2-fsa/sherpa-onnx PR#1258, #1199, #914, #21: readers that took ``data`` to begin at byte 36."""

    @pytest.mark.parametrize("name", HEADERS)
    def test_read(self, name):
        audio = load_audio(io.BytesIO(HEADERS[name]))
        assert audio.sample_rate == 16000
        np.testing.assert_array_equal(audio.samples, PCM.astype(np.float32) / 32768)

    def test_several_channels(self):
        planes = np.stack([PCM, PCM[::-1], np.zeros_like(PCM)], 1)
        for size in (16, 40):
            data = io.BytesIO(riff(fmt(size, channels=3), chunk(b"data", planes.tobytes())))
            np.testing.assert_array_equal(load_audio(data, channel=1).samples, PCM[::-1].astype(np.float32) / 32768)

    def test_half_a_sample_at_the_end_is_dropped(self):
        audio = load_audio(io.BytesIO(riff(fmt(16), chunk(b"data", PCM.tobytes()[:-1]), LIST)))
        np.testing.assert_array_equal(audio.samples, PCM[:-1].astype(np.float32) / 32768)

    def test_no_samples_and_a_list_are_no_samples(self):
        assert load_audio(io.BytesIO(riff(fmt(16), chunk(b"data", b""), LIST))).samples.shape == (0,)

    @pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
    def test_a_truncated_file_is_refused(self, kept):
        data = riff(LIST, chunk(b"note", b"x"), fmt(16), DATA)
        with pytest.raises(InvalidAudioError, match=r"truncated.*: its header declares [0-9]+ bytes"):
            load_audio(io.BytesIO(data[: int(len(data) * kept)]))
