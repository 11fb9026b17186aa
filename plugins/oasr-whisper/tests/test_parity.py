"""Against stored outputs of transformers and CTranslate2: tiny random checkpoints, and OpenAI's tiny.en."""

from __future__ import annotations

import json

import pytest
import soundfile
import torch
from safetensors.torch import load_file

from oasr_core.cache.decoder_kv import DenseDecoderCache
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.frontend.whisper import WhisperLogMel
from oasr_core.models.base import EncoderBatch
from oasr_whisper.ct2_file import open_ct2
from oasr_whisper.ctranslate2 import CTranslate2Converter
from oasr_whisper.huggingface import WhisperConverter

WINDOW = 3000


def encode(model, features, content):
    with torch.inference_mode():
        return model.encoder.encode(EncoderBatch(features, torch.tensor(content)))


def forced_hidden(model, out, tokens):
    """Decoder states behind ``tokens``, the first two at once and then one by one."""
    head = model.interfaces["aed"]
    cache = DenseDecoderCache(head.kv, len(tokens), dtype=out.hidden.dtype, device=torch.device("cpu"))
    pieces = []
    with torch.inference_mode():
        memory = head.memory(out.hidden, out.lengths)
        for piece in tokens.split([2] + [1] * (tokens.shape[1] - 2), dim=1):
            step = cache.begin(piece.shape[1])
            pieces.append(head.step(piece, step, memory))
            cache.commit(step)
        hidden = torch.cat(pieces, dim=1)
        return hidden, head.logits(hidden)


@pytest.fixture(scope="module")
def hf_tiny(shared_fixtures):
    return shared_fixtures / "hf_tiny" / "whisper_multilingual"


@pytest.fixture(scope="module")
def hf_bundle(hf_tiny):
    return WhisperConverter().convert(CheckpointPeek(hf_tiny))


def test_transformers_encoder_and_forced_decoder(hf_tiny, hf_bundle, load):
    oracle, model = load_file(hf_tiny / "oracle.safetensors"), load(hf_bundle)
    first = oracle["input_features_first400"].transpose(1, 2)
    # Both clips end before frame 400; from there on a row holds one value.
    features = torch.cat([first, first[:, -1:].expand(-1, WINDOW - 400, -1)], dim=1)
    out = encode(model, features, [395, 287])
    for name, frames in (("first100", slice(0, 100)), ("every100", slice(0, None, 100))):
        expected = oracle[f"encoder_last_hidden_state_{name}"]
        torch.testing.assert_close(out.hidden[:, frames], expected, atol=1e-4, rtol=0)
    hidden, logits = forced_hidden(model, out, oracle["forced_decoder_input_ids"])
    torch.testing.assert_close(hidden, oracle["forced_decoder_hidden"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, oracle["forced_logits"], atol=1e-4, rtol=0)


def test_transformers_tokens(hf_tiny, hf_bundle):
    generation = json.loads((hf_tiny / "generation_config.json").read_text())
    tokens = hf_bundle.config["tokens"]
    assert tokens["language_ids"] == {key[2:-2]: value for key, value in generation["lang_to_id"].items()}
    assert tokens["no_timestamps"] == generation["no_timestamps_token_id"]
    assert tokens["sot_prev"] == generation["prev_sot_token_id"]
    assert tokens["transcribe"] == generation["task_to_id"]["transcribe"]


@pytest.mark.parametrize("variant", ["float32", "float16", "int8", "int8_float16"])
def test_ctranslate2_variants_of_the_same_weights(shared_fixtures, hf_bundle, variant):
    directory = shared_fixtures / "hf_tiny" / "whisper_multilingual_ct2" / variant
    bundle = CTranslate2Converter().convert(CheckpointPeek(directory))
    assert bundle.config == hf_bundle.config
    assert bundle.state_dict.keys() == hf_bundle.state_dict.keys()
    for name, tensor in bundle.state_dict.items():
        wanted = hf_bundle.state_dict[name]
        if variant == "float32":
            assert torch.equal(tensor, wanted)
        elif variant == "float16":
            assert torch.equal(tensor, wanted.half())
        else:
            # A row's scale is 127 / max|row|, so half a step is 0.5 max / 127; what stays float may be float16.
            rows = wanted.flatten(1) if wanted.dim() > 1 else wanted[None]
            half_step = rows.abs().amax(1, keepdim=True) / 127 / 2
            assert bool(((tensor.float().view_as(rows) - rows).abs() <= half_step * 1.01 + 5e-4).all()), name
    if "int8" in variant:
        file = open_ct2(directory / "model.bin")
        stored = file.content(file.variables["decoder/embeddings/weight_scale"])
        scale = torch.frombuffer(stored, dtype=torch.float32)
        difference = (bundle.state_dict["decoder.embedding"] - hf_bundle.state_dict["decoder.embedding"]).abs()
        assert bool((difference <= 0.5 / scale[:, None] + 1e-6).all())


@pytest.fixture(scope="module")
def english(tiny_en):
    return CTranslate2Converter().convert(CheckpointPeek(tiny_en))


@pytest.fixture(scope="module")
def english_model(english, load):
    return load(english)


def test_english_only_ids(english):
    tokens = english.config["tokens"]
    assert (tokens["eot"], tokens["sot"], tokens["no_speech"], tokens["no_timestamps"]) == (50256, 50257, 50361, 50362)
    assert (tokens["sot_prev"], tokens["timestamp_begin"], tokens["multilingual"]) == (50360, 50363, False)
    assert (len(tokens["suppress"]), tokens["begin_suppress"], tokens["language_ids"]) == (90, [220, 50256], {})
    assert {tensor.dtype for tensor in english.state_dict.values()} == {torch.float16}


def check_window(model, features, oracle, window, convention):
    out = encode(model, features[None], [window["content_frames"]])
    torch.testing.assert_close(out.hidden[0, :100], oracle[f"{convention}.encoder_first100"], atol=1e-3, rtol=0)
    torch.testing.assert_close(out.hidden[0, ::50], oracle[f"{convention}.encoder_every50"], atol=1e-3, rtol=0)
    greedy = window["greedy_notimestamps"]
    _, logits = forced_hidden(model, out, torch.tensor([[*greedy["prompt"], *greedy["ids"][:3]]]))
    best = logits[0].gather(1, oracle[f"{convention}.logits_top20_ids"].long())
    torch.testing.assert_close(best, oracle[f"{convention}.logits_top20_values"], atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["hf", "fw"])
def test_tiny_en_from_stored_features(english_model, shared_fixtures, convention):
    oracle, window = read_oracle(shared_fixtures, "arctic_a0024", convention)
    features = torch.full((WINDOW, 80), float(window["pad_value"]))
    stored = oracle[f"{convention}.features"].T
    features[: len(stored)] = stored
    check_window(english_model, features, oracle, window, convention)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["hf", "fw"])
@pytest.mark.parametrize("clip", ["librispeech-1995-1837-0001.wav", "librispeech-2412-153948-0000.flac"])
def test_tiny_en_from_recordings(english, english_model, shared_fixtures, clip, convention):
    oracle, window = read_oracle(shared_fixtures, clip.rsplit(".", 1)[0], convention)
    padding = {"hf": "audio", "fw": "feature"}[convention]
    frontend = WhisperLogMel.from_options({**english.feature.options, "padding": padding}, english.feature.audio_scale)
    samples, rate = soundfile.read(shared_fixtures / "audio" / clip, dtype="float32")
    assert rate == frontend.sample_rate
    features, counts = frontend.extract(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))
    assert counts.tolist() == [window["content_frames"]]
    check_window(english_model, features[0], oracle, window, convention)


def read_oracle(shared_fixtures, clip, convention):
    path = shared_fixtures / "whisper_tiny_en" / "oracle" / clip
    windows = json.loads(path.with_suffix(".json").read_text())["conventions"][convention]
    return load_file(path.with_suffix(".safetensors")), windows[0]
