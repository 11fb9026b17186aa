from __future__ import annotations

import importlib.util
import sys
import wave

import pytest
import torch

from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.checkpoints.unpickle import load_torch_weights
from oasr_core.errors import InvalidAudioError
from oasr_core.registry import registry
from oasr_demo_digits import DEMO_DIGITS, audio_names, audio_path


def test_the_name_leads_to_the_bundle():
    assert registry("pretrained").get("demo-digits") is DEMO_DIGITS
    bundle = resolve_checkpoint("demo-digits")
    assert (bundle.architecture, bundle.converter) == ("conformer", "native")
    assert bundle.feature.audio_scale == 32768.0
    assert (bundle.decoding.decode_method, bundle.decoding.chunk_size) == ("ctc", 16)


def test_the_bundle_holds_the_weights_of_the_digits_checkpoint(wenet_digits):
    model, report = load_model(resolve_checkpoint("demo-digits"))
    converted, _ = load_model(resolve_checkpoint(wenet_digits))
    weights = model.state_dict()
    assert len(report.mapped) == len(load_torch_weights(wenet_digits / "final.pt"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in converted.state_dict().items())


def test_the_tokenizer_of_the_bundle_spells_digits():
    spec = resolve_checkpoint("demo-digits").tokenizer
    tokenizer = registry("tokenizers").get(spec.kind).from_spec(spec)
    assert tokenizer.decode([38, 25, 0, 45, 47]) == "FOUR TWO"
    assert tokenizer.encode("FOUR TWO") == [38, 25, 45]


def test_the_data_is_what_the_script_makes(repo_root, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("make_demo_bundle", repo_root / "scripts" / "make_demo_bundle.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["make_demo_bundle.py", "--check"])
    assert script.main() == 0, capsys.readouterr().out


def test_the_package_stays_small():
    files = [path for path in DEMO_DIGITS.path().parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if "__pycache__" not in path.parts) < 10_000_000


def test_recordings(wenet_digits):
    assert audio_names() == ("utt09_4d", "utt11_5d", "utt16_7d")
    for name in audio_names():
        with wave.open(str(audio_path(name))) as recording:
            assert (recording.getframerate(), recording.getnchannels()) == (16000, 1)
    assert audio_path("utt09_4d.wav") == audio_path("utt09_4d")
    for name in ("utt99", "../__init__", "", "/etc/passwd"):
        with pytest.raises(InvalidAudioError, match="it has: utt09_4d, utt11_5d, utt16_7d"):
            audio_path(name)
