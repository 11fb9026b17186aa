"""Audio files made in memory: RIFF headers byte by byte, and anything that FFmpeg writes."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest


@pytest.fixture(scope="session")
def tone():
    """``f(samples, rate, hertz)``: a sine at half scale, float32."""

    def make(samples=16000, rate=16000, hertz=440.0):
        return (0.5 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)).astype(np.float32)

    return make


@pytest.fixture(scope="session")
def encode():
    """``f(format, codec, planes, rate, options, video)``: bytes of a file whose sound is ``(channels, n)`` float32."""

    def make(container_format, codec, planes, rate=16000, options=None, video=False):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=container_format, options=options or {}) as container:
            layout = {1: "mono", 2: "stereo"}.get(len(planes))
            streams = []
            if video:
                picture = container.add_stream("mpeg4", rate=10)
                picture.width = picture.height = 64
                picture.pix_fmt = "yuv420p"
                frames = [av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24") for _ in range(5)]
                streams.append((picture, frames))
            if len(planes):
                sound = container.add_stream(codec, rate=rate, layout=layout)
                frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(planes), format="fltp", layout=layout)
                frame.sample_rate = rate
                frame.pts = 0
                converter = av.AudioResampler(format=sound.format, layout=layout, rate=rate)
                streams.append((sound, [*converter.resample(frame), *filter(None, converter.resample(None))]))
            for stream, frames in streams:
                for frame in [*frames, None]:
                    container.mux(stream.encode(frame))
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def faststart(tmp_path_factory, encode):
    """``f(planes)``: an MP4 file with its index in front, so that a part of it still opens."""

    def chunks(data):
        position = 0
        while position < len(data):
            size, kind = struct.unpack_from(">I4s", data, position)
            yield kind, data[position : position + size]
            position += size

    def make(planes):
        # A fragmented file would not do: its index states no duration. So the two top-level boxes are swapped by hand
        # and the chunk offsets in the index moved by the size of the index.
        boxes = list(chunks(encode("mp4", "aac", planes)))
        index = next(box for kind, box in boxes if kind == b"moov")
        at = index.index(b"stco")
        (count,) = struct.unpack_from(">I", index, at + 8)
        offsets = struct.unpack_from(f">{count}I", index, at + 12)
        moved = struct.pack(f">{count}I", *(offset + len(index) for offset in offsets))
        index = index[: at + 12] + moved + index[at + 12 + len(moved) :]
        head = next(box for kind, box in boxes if kind == b"ftyp")
        return head + index + b"".join(box for kind, box in boxes if kind not in (b"moov", b"ftyp"))

    return make
