"""Both layouts give the same bundle; what is not served is refused by name; a native bundle is the same model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from oasr_core.checkpoints.converter import RANK_ASSET_LAYOUT, RANK_KEYED_VALUE
from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.native import save_native
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.errors import CheckpointError
from oasr_core.frontend.whisper import WhisperLogMel
from oasr_core.models.base import EncoderBatch
from oasr_core.tokenizers.whisper import WhisperTokenizer
from oasr_whisper.config import WhisperConfig
from oasr_whisper.ctranslate2 import CTranslate2Converter
from oasr_whisper.huggingface import WhisperConverter


def tokens_of(bundle):
    return WhisperConfig.parse(bundle.config).tokens


def same_weights(one, other, atol=0.0):
    assert one.keys() == other.keys()
    return all((one[name].float() - other[name].float()).abs().max() <= atol for name in one)


def quantise(tensor):
    """int8 rows with their scales, as CTranslate2 does it."""
    scale = 127 / tensor.flatten(1).abs().amax(1)
    return (tensor * scale.view(-1, *[1] * (tensor.dim() - 1))).round().to(torch.int8), scale


# -- both ----------------------------------------------------------------------------------------------------------


def test_both_layouts_give_the_same_bundle(hf, ct2):
    one, other = hf.convert(), ct2.convert()
    assert same_weights(one.state_dict, other.state_dict)
    assert one.feature == other.feature
    assert {**one.config, "tokens": None} == {**other.config, "tokens": None}
    changed = {**one.config["tokens"], "max_initial_timestamp_index": 50}  # only Hugging Face's files state it
    assert changed == other.config["tokens"]
    assert one.decoding.decode_method == other.decoding.decode_method == "aed"


def test_special_tokens_are_found_by_name(hf):
    tokens = tokens_of(hf.convert())
    assert (tokens.eot, tokens.sot, tokens.translate, tokens.transcribe) == (9, 10, 14, 15)
    assert (tokens.sot_prev, tokens.no_speech, tokens.no_timestamps, tokens.timestamp_begin) == (17, 18, 19, 20)
    assert tokens.language_ids == {"en": 11, "de": 12, "haw": 13}
    assert tokens.multilingual
    assert (tokens.suppress, tokens.begin_suppress) == ((1, 2), (3,))
    assert tokens.alignment_heads == ((2, 1), (1, 0))
    assert tokens.max_initial_timestamp_index == 40


def test_what_the_bundles_name_can_be_built(hf, ct2):
    for bundle in (hf.convert(), ct2.convert()):
        frontend = WhisperLogMel.from_options(bundle.feature.options, bundle.feature.audio_scale)
        assert (frontend.window_frames, frontend.feature_dim, frontend.options.padding) == (100, 5, "audio")
    tokenizer = WhisperTokenizer.from_spec(ct2.convert().tokenizer)
    assert tokenizer.decode([8, 1, 25, 9]) == "ab"
    assert tokenizer.vocab_size == 71


@pytest.mark.parametrize("layout", ["hf", "ct2"])
def test_they_are_recognised_and_a_native_bundle_is_the_same_model(layout, request, tmp_path):
    files = request.getfixturevalue(layout)
    bundle = resolve_checkpoint(files.path)
    assert bundle.converter == {"hf": "whisper", "ct2": "ctranslate2"}[layout]
    again = resolve_checkpoint(save_native(bundle, tmp_path / "native"))
    assert (again.config, again.feature, again.decoding) == (bundle.config, bundle.feature, bundle.decoding)
    features, lengths = torch.randn(1, 100, 5), torch.tensor([70])
    hidden = []
    for each in (bundle, again):
        model, report = load_model(each)
        assert not report.dropped
        hidden.append(model.encoder.encode(EncoderBatch(features, lengths)).hidden)
    assert torch.equal(*hidden)


def test_a_native_bundle_may_ask_for_the_padding_of_faster_whisper(ct2, tmp_path):
    config = save_native(ct2.convert(), tmp_path / "native") / "oasr_config.json"
    content = json.loads(config.read_text())
    content["feature"]["options"]["padding"] = "feature"
    config.write_text(json.dumps(content))
    feature = resolve_checkpoint(config.parent).feature
    assert WhisperLogMel.from_options(feature.options, feature.audio_scale).options.padding == "feature"


def test_a_weights_file_alone_leads_to_its_directory(hf, ct2):
    assert resolve_checkpoint(hf.path / "model.safetensors").converter == "whisper"
    assert resolve_checkpoint(ct2.path / "model.bin").converter == "ctranslate2"


def test_detection_imports_no_torch(hf, ct2):
    code = (
        "import sys\nfrom oasr_core.checkpoints.peek import CheckpointPeek\n"
        "from oasr_whisper.huggingface import WhisperConverter\n"
        "from oasr_whisper.ctranslate2 import CTranslate2Converter\n"
        f"assert WhisperConverter().detect(CheckpointPeek({str(hf.path)!r}))\n"
        f"assert CTranslate2Converter().detect(CheckpointPeek({str(ct2.path)!r}))\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- Hugging Face --------------------------------------------------------------------------------------------------


def test_another_model_type_is_not_claimed(hf):
    assert WhisperConverter().detect(CheckpointPeek(hf.path)).rank == RANK_KEYED_VALUE
    assert WhisperConverter().detect(CheckpointPeek(hf.write(model_type="wav2vec2"))) is None


def test_weights_in_several_files(hf):
    whole = hf.convert()
    names = sorted(hf.weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for part, chosen in parts.items():
        save_file({name: hf.weights[name] for name in chosen}, hf.path / part)
    index = {"weight_map": {name: part for part, chosen in parts.items() for name in chosen}}
    (hf.path / "model.safetensors").unlink()
    (hf.path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_weights(hf.convert().state_dict, whole.state_dict)
    with pytest.raises(CheckpointError, match=r"has no tensor .*a part of a checkpoint in several files"):
        hf.convert("model-00001-of-00002.safetensors")
    (hf.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors"):
        hf.convert()


def test_weights_saved_by_torch_and_of_the_bare_model(hf):
    whole = hf.convert()
    (hf.path / "model.safetensors").unlink()
    torch.save(
        {name.removeprefix("model."): tensor for name, tensor in hf.weights.items()}, hf.path / "pytorch_model.bin"
    )
    assert same_weights(hf.convert().state_dict, whole.state_dict)


def test_the_tied_projection_is_left_out_and_strangers_are_reported(hf):
    hf.weights |= {"proj_out.weight": torch.zeros(71, 16), "model.adapter.weight": torch.zeros(2)}
    hf.write()
    _, report = load_model(hf.convert())
    assert report.dropped == ("adapter.weight",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "'activation_function': 'relu'"),
        ({"scale_embedding": True}, "'scale_embedding': True"),
        ({"tie_word_embeddings": False}, "'tie_word_embeddings': False"),
        ({"d_model": None}, "lacks d_model"),
        ({"decoder_layers": 4}, "has no tensor 'decoder.layers.3"),
        ({"encoder_attention_heads": 3}, "no multiple of encoder_heads 3"),
        ({"max_source_positions": 51}, "chunk_length 1.02"),
    ],
)
def test_what_is_no_whisper_is_refused(hf, change, message):
    with pytest.raises(CheckpointError, match=message):
        WhisperConverter().convert(CheckpointPeek(hf.write(**change)))


@pytest.mark.parametrize("nested", [False, True])
def test_features_are_checked_against_the_weights(hf, nested):
    def write(**extractor):
        content = {"feature_extractor": extractor} if nested else extractor
        name = "processor_config.json" if nested else "preprocessor_config.json"
        (hf.path / name).write_text(json.dumps(content))

    write(feature_size=5, chunk_length=1, hop_length=160, n_fft=400, sampling_rate=16000)
    assert hf.convert().feature.options["n_fft"] == 400
    write(feature_size=128, chunk_length=1)
    with pytest.raises(CheckpointError, match=r"5 mel bins.*'feature_size': 128.*do not belong together"):
        hf.convert()


def test_without_generation_config_the_older_keys_and_defaults_hold(hf):
    hf.write(generation=None, suppress_tokens=[4], begin_suppress_tokens=None)
    tokens = tokens_of(hf.convert())
    assert (tokens.suppress, tokens.begin_suppress, tokens.max_initial_timestamp_index) == ((4,), (), 50)
    # Three layers: all heads of the last two.
    assert tokens.alignment_heads == ((1, 0), (1, 1), (2, 0), (2, 1))
    assert not tokens.multilingual
    assert tokens.language_ids == {}


def test_bad_lists_are_refused(hf):
    hf.write(generation={"suppress_tokens": "all"})
    with pytest.raises(CheckpointError, match="suppress_tokens is 'all', expected a list of token ids"):
        hf.convert()
    hf.write(generation={"max_initial_timestamp_index": "late"})
    with pytest.raises(CheckpointError, match=r"tokens.max_initial_timestamp_index: .*got 'late'"):
        hf.convert()
    hf.write(generation={"alignment_heads": [[1]]})
    with pytest.raises(CheckpointError, match=r"alignment_heads is \[\[1\]\], expected pairs"):
        hf.convert()


def test_a_directory_without_tokens_is_refused_with_the_remedy(hf):
    (hf.path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor a vocabulary.*save_pretrained"):
        hf.convert()
    (hf.path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(CheckpointError, match=r"has no token <\|startoftranscript\|>"):
        hf.convert()
    (hf.path / "tokenizer.json").write_text(json.dumps({"model": []}))
    with pytest.raises(CheckpointError, match="no vocabulary of tokens and ids"):
        hf.convert()


@pytest.mark.parametrize(
    ("mels", "layers", "heads"), [(128, (32, 32), 20), (128, (32, 4), 20), (80, (12, 12), 12), (80, (4, 2), 6)]
)
def test_every_size_has_a_configuration(hf, mels, layers, heads):
    """large-v3, turbo, small and a distilled one, on the meta device."""
    from oasr_whisper.model import WhisperModel

    sizes = {"n_mels": mels, "dim": 64 * heads, "max_source_positions": 1500, "max_target_positions": 448}
    sizes |= {"encoder_layers": layers[0], "decoder_layers": layers[1], "encoder_heads": heads, "decoder_heads": heads}
    sizes |= {"encoder_ffn_dim": 256 * heads, "decoder_ffn_dim": 256 * heads, "vocab_size": 51866}
    tokens = {**hf.convert().config["tokens"], "alignment_heads": [[layers[1] - 1, heads - 1]]}
    with torch.device("meta"):
        model = WhisperModel.from_config({**sizes, "tokens": tokens})
    assert (model.encoder.window_frames, model.encoder.feature_dim, model.vocab_size) == (3000, mels, 51866)
    assert model.interfaces["aed"].memory_elements == 2 * layers[1] * 1500 * 64 * heads


# -- CTranslate2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 4, 6])
def test_binary_versions(ct2, version):
    whole = ct2.convert()
    ct2.write(version=version)
    assert same_weights(ct2.convert().state_dict, whole.state_dict)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_as_it_is(ct2, dtype):
    ct2.variables = {name: t.to(dtype) if t.is_floating_point() else t for name, t in ct2.variables.items()}
    ct2.write(aliases={"decoder/projection/weight": "decoder/embeddings/weight"})
    state = ct2.convert().state_dict
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert torch.equal(state["decoder.embedding"], ct2.weights["model.decoder.embed_tokens.weight"].to(dtype))


def test_int8_rows_are_divided_by_their_scales(ct2):
    whole, scales = ct2.convert().state_dict, {}
    for name in [name for name in ct2.variables if name.endswith("/weight")]:
        ct2.variables[name], scales[name] = quantise(ct2.variables[name])
        ct2.variables[f"{name}_scale"] = scales[name]
    ct2.write(aliases={"decoder/projection/weight": "decoder/embeddings/weight"})
    state = ct2.convert().state_dict
    for ours, theirs in (
        ("decoder.embedding", "decoder/embeddings"),
        ("encoder.conv2.weight", "encoder/conv2"),
        ("encoder.layers.1.self_qkv.weight", "encoder/layer_1/self_attention/linear_0"),
    ):
        bound = (0.5 / scales[f"{theirs}/weight"])[:, None] + 1e-6
        difference = (state[ours] - whole[ours]).abs()
        assert bool((difference <= bound).all())
        assert bool(difference.max() > 0)
    assert torch.equal(state["encoder.norm.bias"], whole["encoder.norm.bias"])


def test_int16_has_one_scale(ct2):
    name = "decoder/layer_0/ffn/linear_0/weight"
    whole = ct2.convert().state_dict["decoder.layers.0.ffn_in.weight"]
    ct2.variables[f"{name}_scale"] = torch.tensor(1000.0)
    ct2.variables[name] = (ct2.variables[name] * 1000).round().to(torch.int16)
    ct2.write()
    torch.testing.assert_close(ct2.convert().state_dict["decoder.layers.0.ffn_in.weight"], whole, atol=5.1e-4, rtol=0)


def test_the_configuration_may_say_nothing_or_be_absent(ct2):
    (ct2.path / "config.json").unlink()
    tokens = tokens_of(ct2.convert())
    assert tokens.suppress == ()
    assert tokens.alignment_heads == ((1, 0), (1, 1), (2, 0), (2, 1))


def test_languages_of_an_english_only_model_are_not_believed(ct2, hf):
    words = [f"w{index}" for index in range(50256)]
    listing = [*words, *json.loads((ct2.path / "vocabulary.json").read_text())[9:]]
    (ct2.path / "vocabulary.json").unlink()
    (ct2.path / "vocabulary.txt").write_text("\n".join(listing) + "\n")
    ct2.variables["decoder/embeddings/weight"] = torch.zeros(len(listing), 16)
    ct2.write()
    tokens = tokens_of(ct2.convert())
    assert (tokens.eot, tokens.sot, tokens.timestamp_begin) == (50256, 50257, 50267)
    assert tokens.language_ids == {}
    assert not tokens.multilingual


def test_other_models_and_damage_are_claimed_weakly_and_refused_by_name(ct2):
    detect = CTranslate2Converter().detect
    assert detect(CheckpointPeek(ct2.path)).rank == RANK_KEYED_VALUE
    ct2.write(spec="TransformerSpec")
    assert detect(CheckpointPeek(ct2.path)).rank == RANK_ASSET_LAYOUT
    with pytest.raises(CheckpointError, match="TransformerSpec, expected WhisperSpec"):
        resolve_checkpoint(ct2.path)
    content = (ct2.path / "model.bin").read_bytes()
    (ct2.path / "model.bin").write_bytes(content[:5])
    assert detect(CheckpointPeek(ct2.path)).rank == RANK_ASSET_LAYOUT
    with pytest.raises(CheckpointError, match=r"model.bin is damaged.*at byte 4: the length of the name of the spec"):
        resolve_checkpoint(ct2.path)


def test_a_vocabulary_without_weights_is_not_claimed(ct2):
    (ct2.path / "model.bin").unlink()
    assert CTranslate2Converter().detect(CheckpointPeek(ct2.path)) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "decoder/activation",
            torch.tensor(0, dtype=torch.int8),
            r"decoder/activation is 0, expected 3 \(exact GELU\)",
        ),
        ("decoder/scale_embeddings", torch.tensor(1, dtype=torch.int8), "scale_embeddings is 1"),
        ("encoder/num_heads", None, "no scalar 'encoder/num_heads'"),
        ("decoder/layer_1/ffn/linear_1/bias", None, "no variable 'decoder/layer_1/ffn/linear_1/bias'"),
        (
            "encoder/conv1/weight",
            torch.zeros(16, 15),
            r"'encoder/conv1/weight' has the shape \(16, 15\), expected rank 3",
        ),
        ("decoder/embeddings/weight", torch.zeros(71, 16, dtype=torch.int8), "holds integers, but there is no"),
        ("encoder/conv1/weight_scale", torch.zeros(16), "encoder/conv1/weight_scale has zeros"),
        ("encoder/conv1/weight_scale", torch.ones(3), r"scales of shape \(3,\)"),
    ],
)
def test_what_is_no_whisper_spec_is_refused(ct2, name, value, message):
    if value is None:
        del ct2.variables[name]
    else:
        ct2.variables[name] = value
    ct2.write()
    with pytest.raises(CheckpointError, match=message):
        ct2.convert()
