"""Files of many kinds to samples; files that are none, to errors that say what the decoders said."""

from __future__ import annotations

import io
import logging
import os

import av
import numpy as np
import pytest
import soundfile

from oasr_core.audio import Audio, audio_seconds, load_audio
from oasr_core.errors import InvalidAudioError


def written(samples, container):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16000, format=container)
    return buffer.getvalue()


def same_sound(ours, expected, tolerance, slack):
    """Equal up to ``tolerance`` once aligned; lossy codecs may put up to ``slack`` samples around the sound."""
    assert abs(len(ours) - len(expected)) <= slack
    middle = expected[3000:-4000]
    errors = [
        np.abs(ours[3000 + lag : 3000 + lag + len(middle)] - middle).max()
        for lag in range(-slack, slack + 1)
        if 3000 + lag + len(middle) <= len(ours)
    ]
    assert min(errors) <= tolerance


@pytest.mark.parametrize(
    ("container", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 3.1e-5),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "PCM_32", 1e-6),
        ("WAV", "PCM_U8", 8e-3),
        ("WAV", "FLOAT", 0),
        ("WAV", "DOUBLE", 0),
        ("WAV", "ULAW", 2e-2),
        ("WAV", "ALAW", 2e-2),
        ("WAVEX", "PCM_16", 3.1e-5),
        ("RF64", "PCM_16", 3.1e-5),
        ("W64", "PCM_16", 3.1e-5),
        ("AIFF", "PCM_16", 3.1e-5),
        ("AU", "PCM_16", 3.1e-5),
        ("CAF", "PCM_16", 3.1e-5),
        ("FLAC", "PCM_16", 3.1e-5),
        ("FLAC", "PCM_24", 1e-6),
    ],
)
def test_what_soundfile_reads(tone, tmp_path, container, subtype, tolerance):
    path = tmp_path / "sound"
    soundfile.write(path, tone(12345), 16000, format=container, subtype=subtype)
    audio = load_audio(path)
    assert audio.sample_rate == 16000
    assert audio.samples.dtype == np.float32
    assert audio.samples.shape == (12345,)
    assert audio.duration == 12345 / 16000
    np.testing.assert_allclose(audio.samples, tone(12345), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("mp4", "aac", 16000),
        ("adts", "aac", 16000),
        ("webm", "libopus", 48000),
        ("ogg", "libopus", 48000),
        ("mp3", "libmp3lame", 16000),
        ("matroska", "pcm_s16le", 16000),
        ("matroska", "flac", 22050),
    ],
)
def test_what_pyav_reads(tone, encode, container, codec, rate):
    sound = tone(2 * rate, rate)
    audio = load_audio(io.BytesIO(encode(container, codec, sound[None], rate)))
    assert audio.sample_rate == rate
    assert audio.samples.dtype == np.float32
    same_sound(audio.samples, sound, 0.03, 2200)


def test_sound_of_a_video(tone, encode):
    planes = np.stack([tone(44100, 44100), np.zeros(44100, np.float32)])
    data = encode("mp4", "aac", planes, 44100, video=True)
    left, right, mix = (load_audio(io.BytesIO(data), channel=channel).samples for channel in (0, 1, "mix"))
    same_sound(left, planes[0], 0.03, 2200)
    assert np.abs(right).max() < 1e-3
    np.testing.assert_allclose(mix, left / 2 + right / 2, atol=1e-6)


@pytest.mark.parametrize("link", ["mp3", "ogg"])
def test_formats_without_a_stated_length_keep_their_end(tone, encode, link):
    """libsndfile guesses the length of such MP3 files from the bit rate, and reads the first link of an Ogg chain."""
    rng = np.random.default_rng(0)
    sound = np.concatenate([0.2 * rng.standard_normal(80000), np.zeros(80000)]).astype(np.float32)
    if link == "mp3":
        data = encode("mp3", "libmp3lame", sound[None], options={"write_xing": "0", "id3v2_version": "0"})
        expected = len(sound)
    else:
        data = 2 * written(sound, "OGG")
        expected = 2 * len(sound)
    assert abs(len(load_audio(io.BytesIO(data)).samples) - expected) <= 2200


def test_channels(tmp_path):
    path = tmp_path / "three.wav"
    soundfile.write(path, np.tile([0.5, -0.25, 0.125], (1000, 1)), 8000, subtype="FLOAT")
    assert (load_audio(path).samples == 0.5).all()
    assert (load_audio(path, channel=1).samples == -0.25).all()
    assert (load_audio(path, channel=2).samples == 0.125).all()
    assert (load_audio(path, channel="mix").samples == 0.125).all()
    assert load_audio(path).samples.flags["C_CONTIGUOUS"]
    with pytest.raises(InvalidAudioError, match=r"3 channel\(s\), 0 to 2; channel 3"):
        load_audio(path, channel=3)


@pytest.mark.parametrize("channel", [-1, True, "left", 1.0, None])
def test_no_such_channel(tmp_path, channel):
    with pytest.raises(InvalidAudioError, match="channel is a number"):
        load_audio(tmp_path / "any.wav", channel=channel)


def test_more_than_one_block(tmp_path, monkeypatch, tone):
    monkeypatch.setattr("oasr_core.audio._BLOCK_FRAMES", 1000)
    soundfile.write(tmp_path / "a.wav", tone(12345), 16000, subtype="FLOAT")
    np.testing.assert_array_equal(load_audio(tmp_path / "a.wav").samples, tone(12345))


@pytest.mark.parametrize("kind", ["str", "path", "open file", "bytes io", "offset"])
def test_sources(tmp_path, tone, kind):
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(), 16000, subtype="FLOAT")
    data = path.read_bytes()
    if kind == "open file":
        with path.open("rb") as file:
            audio = load_audio(file)
    elif kind == "offset":
        file = io.BytesIO(b"xyz" + data)
        file.seek(3)
        audio = load_audio(file)
    else:
        audio = load_audio({"str": str(path), "path": path, "bytes io": io.BytesIO(data)}[kind])
    np.testing.assert_array_equal(audio.samples, tone())


def test_the_suffix_means_nothing(tmp_path, tone, encode):
    soundfile.write(tmp_path / "a.wav", tone(), 16000, subtype="FLOAT")
    os.rename(tmp_path / "a.wav", tmp_path / "a.mp3")
    assert len(load_audio(tmp_path / "a.mp3").samples) == 16000
    (tmp_path / "b.wav").write_bytes(encode("mp4", "aac", tone()[None]))
    assert len(load_audio(tmp_path / "b.wav").samples) >= 16000


def test_resampled_on_request(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(44100, 44100), 44100, subtype="FLOAT")
    audio = load_audio(tmp_path / "a.wav", sample_rate=16000)
    assert audio.sample_rate == 16000
    assert audio.samples.shape == (16000,)
    assert np.abs(audio.samples - tone())[200:-200].max() < 1e-3


def test_a_header_without_samples_gives_none(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(0), 16000)
    audio = load_audio(tmp_path / "a.wav", sample_rate=8000)
    assert audio.samples.shape == (0,)
    assert audio.duration == 0


BROKEN = {
    "empty": (lambda **_: b"", "is empty"),
    "one byte": (lambda **_: b"R", "soundfile: .*; PyAV: "),
    "text": (lambda **_: b"no audio at all\n" * 400, "soundfile: .*; PyAV: "),
    "noise": (lambda **_: np.random.default_rng(0).bytes(50000), "soundfile: .*; PyAV: "),
    "zeros": (lambda **_: bytes(10000), "soundfile: .*; PyAV: "),
    "header only": (lambda **_: b"RIFF\x24\0\0\0WAVE", "soundfile: .*; PyAV: "),
    "half a flac": (lambda tone, **_: written(tone(), "FLAC")[:9000], "truncated"),
    "half an m4a": (lambda tone, encode, **_: encode("mp4", "aac", tone(64000)[None])[:9000], "PyAV: "),
    "half an m4a, index in front": (
        lambda tone, faststart, **_: faststart(tone(64000)[None])[:16000],
        "truncated.*: [0-9.]+ of 4.00 seconds",
    ),
    "silent video": (lambda encode, **_: encode("mp4", None, [], video=True), "no audio stream, only video"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("from_path", [True, False])
def test_broken_files(tmp_path, tone, encode, faststart, name, from_path):
    make, message = BROKEN[name]
    data = make(tone=tone, encode=encode, faststart=faststart)
    path = tmp_path / "broken"
    path.write_bytes(data)
    with pytest.raises(InvalidAudioError, match=message) as caught:
        load_audio(path if from_path else io.BytesIO(data))
    assert ("broken" if from_path else "BytesIO") in str(caught.value)


def test_an_index_in_front_is_read(tone, faststart):
    """What the test of its truncated twin rests on."""
    same_sound(load_audio(io.BytesIO(faststart(tone(64000)[None]))).samples, tone(64000), 0.03, 2200)


def test_sources_that_are_none(tmp_path):
    with pytest.raises(InvalidAudioError, match="No such file"):
        load_audio(tmp_path / "absent.wav")
    with pytest.raises(InvalidAudioError, match="directory"):
        load_audio(tmp_path)
    with pytest.raises(InvalidAudioError, match="null"):
        load_audio("a\0b.wav")
    with pytest.raises(InvalidAudioError, match="got bytes"):
        load_audio(b"RIFF")
    with pytest.raises(InvalidAudioError, match="binary mode"):
        load_audio(io.StringIO("RIFF"))
    (tmp_path / "a.raw").write_bytes(np.random.default_rng(0).bytes(1000))
    with pytest.raises(InvalidAudioError, match=r"a\.raw"):
        load_audio(tmp_path / "a.raw")


def test_empty_standard_input_is_called_so():
    class Standard(io.BytesIO):
        name = "<stdin>"

    with pytest.raises(InvalidAudioError, match=r"^standard input gave no data"):
        load_audio(Standard())


def test_a_playlist_opens_nothing(tmp_path, tone, encode):
    """Neither other files nor the network, whatever an uploaded file refers to."""
    (tmp_path / "secret.ts").write_bytes(encode("mpegts", "aac", tone(64000)[None]))
    target = (tmp_path / "secret.ts").as_uri()
    for name, text in {
        "list.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\n{target}\n#EXT-X-ENDLIST\n",
        "list.ffconcat": "ffconcat version 1.0\nfile 'secret.ts'\n",
    }.items():
        (tmp_path / name).write_text(text)
        for source in (tmp_path / name, io.BytesIO(text.encode())):
            with pytest.raises(InvalidAudioError):
                load_audio(source)


def test_odd_rates_are_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 2000)
    with pytest.raises(InvalidAudioError, match="sample rate 2000"):
        load_audio(tmp_path / "a.wav")
    with pytest.raises(InvalidAudioError, match="sample rate 0"):
        load_audio(tmp_path / "a.wav", sample_rate=0)


def test_seconds():
    assert audio_seconds(8000, 16000) == 0.5
    assert Audio(np.zeros(4000, np.float32), 8000).duration == 0.5
    with pytest.raises(InvalidAudioError):
        audio_seconds(8000, 0)


def test_real_files(shared_fixtures):
    """Duration, rate and loudness of each clip of the collection."""
    import json

    for line in (shared_fixtures / "audio" / "manifest.jsonl").read_text().splitlines():
        facts = json.loads(line)
        audio = load_audio(shared_fixtures / "audio" / facts["file"])
        assert audio.sample_rate == facts["sample_rate"]
        assert audio.duration == pytest.approx(facts["duration"], abs=0.1)
        assert 0.05 < np.abs(audio.samples).max() <= 1.5


def test_one_recording_in_three_formats(shared_fixtures):
    """16 kHz PCM, 44.1 kHz 24-bit stereo and 8 kHz mu-law (delayed a little) of one utterance agree below 3.5 kHz."""
    spectra = []
    for name in ("1837-0001.wav", "_44k_stereo_s24.wav", "_8k_mulaw.wav"):
        separator = "" if name.startswith("_") else "-"
        audio = load_audio(shared_fixtures / "audio" / f"librispeech-1995{separator}{name}", sample_rate=16000)
        assert len(audio.samples) == 139680
        spectra.append(np.abs(np.fft.rfft(audio.samples))[: int(3500 * 139680 / 16000)])
    for other, least in zip(spectra[1:], (0.999, 0.9), strict=True):
        assert spectra[0] @ other / np.linalg.norm(spectra[0]) / np.linalg.norm(other) > least


def test_vorbis(tone):
    same_sound(load_audio(io.BytesIO(written(tone(32000), "OGG"))).samples, tone(32000), 0.03, 0)


def opus_without_times(sound):
    """Opus in Ogg, ``(n,)`` at 48 kHz, whose frames had no times: page positions begin elsewhere than at 0."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=48000, layout="mono")
        converter = av.AudioResampler(format=stream.format, layout="mono", rate=48000)
        for start in range(0, len(sound), 960):
            frame = av.AudioFrame.from_ndarray(sound[None, start : start + 960], format="fltp", layout="mono")
            frame.sample_rate = 48000
            for converted in converter.resample(frame):
                converted.pts = None
                container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize("start", [24000, 330000], ids=["head", "tail"])
def test_opus_begins_where_the_sound_does(start):
    """The samples that an Opus encoder puts before the sound are dropped, whatever the positions of the pages."""
    noise = np.random.default_rng(0).standard_normal(8 * 48000)
    sound = (0.3 * np.convolve(noise, np.ones(12) / 12, "same")).astype(np.float32)
    decoded = load_audio(io.BytesIO(opus_without_times(sound))).samples
    assert len(decoded) == len(sound)
    part = sound[start : start + 40000]
    likeness = np.correlate(decoded[start - 400 : start + 40400], part)
    assert likeness.argmax() == 400


def test_a_damaged_packet_is_skipped_and_told(tone, encode, caplog):
    """As players do: a hole in an MP3 file costs its frame and not the file."""
    data = encode("mp3", "libmp3lame", tone(160000)[None])
    middle = len(data) // 2
    with caplog.at_level(logging.WARNING, logger="oasr_core"):
        audio = load_audio(io.BytesIO(data[:middle] + data[middle + 700 :]))
    assert 150000 < len(audio.samples) < 160000
    assert "damaged packets" in caplog.text
    caplog.clear()
    assert len(load_audio(io.BytesIO(data)).samples) == 160000
    assert not caplog.records


def test_many_damaged_packets_are_refused(tone, faststart):
    data = bytearray(faststart(tone(64000)[None]))
    data[3000:] = np.random.default_rng(0).bytes(len(data) - 3000)
    with pytest.raises(InvalidAudioError, match=r"is damaged: [0-9]+ of [0-9]+ packets"):
        load_audio(io.BytesIO(bytes(data)))


def test_a_pipe_is_read(tmp_path, tone):
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(written(tone(), "WAV"),))
    writer.start()
    assert load_audio(pipe).samples.shape == (16000,)
    writer.join()
