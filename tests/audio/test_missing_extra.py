"""Without the packages of the extra: typed errors at the first use, none at import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import soundfile

from oasr_core.audio import StreamResampler, load_audio, resample
from oasr_core.errors import MissingExtraError


def hide(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)


def test_soundfile_and_av(tmp_path, monkeypatch, encode, tone):
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 16000)
    (tmp_path / "a.m4a").write_bytes(encode("mp4", "aac", tone()[None]))
    hide(monkeypatch, "av")
    assert len(load_audio(tmp_path / "a.wav").samples) == 100
    with pytest.raises(MissingExtraError, match=r"package av.*oasr-core\[audio\]"):
        load_audio(tmp_path / "a.m4a")
    hide(monkeypatch, "soundfile")
    with pytest.raises(MissingExtraError, match=r"package soundfile.*oasr-core\[audio\]"):
        load_audio(tmp_path / "a.wav")


def test_soxr(monkeypatch):
    hide(monkeypatch, "soxr")
    assert len(resample(np.zeros(100), 16000, 16000)) == 100
    assert len(StreamResampler(16000, 16000).push(np.zeros(100))) == 100
    with pytest.raises(MissingExtraError, match=r"package soxr.*oasr-core\[audio\]"):
        resample(np.zeros(100), 8000, 16000)
    with pytest.raises(MissingExtraError, match="soxr"):
        StreamResampler(8000, 16000)


def test_importing_needs_none_of_them():
    code = "import sys, oasr_core.audio; print(sorted({'soundfile', 'av', 'soxr', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
