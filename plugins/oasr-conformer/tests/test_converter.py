"""WeNet directories of every age are read as WeNet reads them, and what is not served is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from oasr_conformer.converter import WenetConverter
from oasr_conformer.model import ConformerModel
from oasr_core.checkpoints.converter import RANK_KEYED_VALUE
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError


@pytest.fixture
def directory(wenet_digits, tmp_path):
    """A writable copy of a small checkpoint (new-style configuration)."""
    target = tmp_path / "model"
    shutil.copytree(wenet_digits / "variants" / "u2pp_k8_sos2", target)
    return target


@pytest.fixture
def edit(directory):
    """``edit(change)``: let ``change`` rewrite the parsed train.yaml."""

    def run(change):
        config = yaml.safe_load((directory / "train.yaml").read_text())
        change(config)
        (directory / "train.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))

    return run


@pytest.fixture
def reweigh(directory):
    """``reweigh(change)``: let ``change`` rewrite the weights."""

    def run(change):
        weights = torch.load(directory / "final.pt")
        change(weights)
        torch.save(weights, directory / "final.pt")

    return run


def convert(directory, **kwargs):
    return WenetConverter().convert(CheckpointPeek(directory), **kwargs)


def test_module_is_light():
    code = "import oasr_conformer.converter, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_detect(wenet_digits, directory, tmp_path, edit):
    found = WenetConverter().detect(CheckpointPeek(wenet_digits))
    assert found is not None
    assert found.rank == RANK_KEYED_VALUE
    assert "'conformer'" in found.reason
    assert WenetConverter().detect(CheckpointPeek(tmp_path)) is None
    edit(lambda config: config.update(encoder="squeezeformer"))
    assert WenetConverter().detect(CheckpointPeek(directory)) is not None
    edit(lambda config: config.pop("encoder_conf"))
    assert WenetConverter().detect(CheckpointPeek(directory)) is None
    (directory / "train.yaml").write_text("encoder: [")
    with pytest.raises(CheckpointError, match=r"is not valid YAML: line [12]: "):
        WenetConverter().detect(CheckpointPeek(directory))


def test_digits_bundle(wenet_digits):
    bundle = convert(wenet_digits)
    assert bundle.architecture == "conformer"
    assert json.loads(json.dumps(bundle.config)) == bundle.config
    assert bundle.config["vocab_size"] == 48
    assert (bundle.config["sos_id"], bundle.config["eos_id"], bundle.config["reverse_weight"]) == (47, 47, 0.3)
    assert bundle.tokenizer.kind == "symbol_table"
    assert {role: path.name for role, path in bundle.tokenizer.files.items()} == {
        "symbols": "units.txt",
        "sentencepiece": "train.bpe.model",
    }
    assert bundle.feature.kind == "fbank"
    assert bundle.feature.audio_scale == 32768.0
    assert bundle.feature.options == {
        "num_mel_bins": 80, "frame_length_ms": 25, "frame_shift_ms": 10, "dither": 0.0, "sample_rate": 16000,
    }  # fmt: skip
    assert bundle.decoding.decode_method == "ctc"
    assert (bundle.decoding.chunk_size, bundle.decoding.num_left_chunks) == (16, -1)
    assert bundle.source.endswith("final.pt")


EXPECTED = {
    # sos, decoder, cmvn, conv_norm, conv_causal, positions, relative attention
    "v1_batchnorm_noncausal_old_yaml": (19, "transformer", True, "batch_norm", False, "rel_pos", True),
    "u2pp_k8_sos2": (2, "bitransformer", True, "layer_norm", True, "rel_pos", True),
    "u2pp_conv2d6": (19, "bitransformer", True, "layer_norm", True, "rel_pos", True),
    "u2pp_conv2d8_nocmvn": (2, "bitransformer", False, "layer_norm", True, "rel_pos", True),
    "transformer_abs_pos": (19, "transformer", True, "batch_norm", False, "abs_pos", False),
    "conformer_no_pos_nomacaron": (19, "transformer", True, "layer_norm", True, "no_pos", False),
}


def test_variant_bundles(variant):
    bundle = convert(variant)
    config, encoder = bundle.config, bundle.config["encoder"]
    sos, decoder, cmvn, norm, causal, positions, relative = EXPECTED[variant.name]
    assert (config["sos_id"], config["eos_id"], config["decoder"]["kind"]) == (sos, sos, decoder)
    assert (config["cmvn"], encoder["conv_norm"], encoder["conv_causal"]) == (cmvn, norm, causal)
    assert (encoder["positions"], encoder["relative_attention"]) == (positions, relative)
    assert bundle.decoding.chunk_size == (None if variant.name.startswith("v1") else 16)
    assert bundle.tokenizer.files["symbols"].name == "units.txt"
    unexpected = set(bundle.state_dict) - set(ConformerModel.from_config(config).state_dict())
    assert all("concat_linear" in name or "num_batches_tracked" in name for name in unexpected)


def test_checkpoint_name(directory):
    (directory / "final.pt").rename(directory / "avg_10.pt")
    assert convert(directory, checkpoint_name="avg_10.pt").source.endswith("avg_10.pt")
    with pytest.raises(CheckpointError, match=r"final\.pt"):
        convert(directory)


def test_position_buffers_are_ignored(directory, reweigh):
    reweigh(lambda weights: weights.update({"encoder.embed.pos_enc.pe": torch.zeros(1, 5000, 16)}))
    assert convert(directory).config["vocab_size"] == 20


def test_decoder_is_optional(directory, reweigh):
    def drop(weights):
        for name in [name for name in weights if name.startswith("decoder.")]:
            del weights[name]

    reweigh(drop)
    bundle = convert(directory)
    assert bundle.config["decoder"] is None
    assert set(ConformerModel.from_config(bundle.config).interfaces) == {"ctc"}


@pytest.mark.parametrize("form", ["json", "kaldi"])
def test_cmvn_of_the_file(directory, reweigh, edit, form):
    """Only read where the checkpoint does not carry the statistics."""
    kept = {}

    def drop(weights):
        kept.update({name: weights.pop(name) for name in list(weights) if "global_cmvn" in name})

    reweigh(drop)
    if form == "kaldi":
        stats = json.loads((directory / "global_cmvn").read_text())
        sums, squares = (" ".join(map(repr, stats[key])) for key in ("mean_stat", "var_stat"))
        (directory / "global_cmvn").write_text(f" [\n  {sums} {stats['frame_num']} \n  {squares} 0 ]\n")
        edit(lambda config: config["cmvn_conf"].update(is_json_cmvn=False))
    weights = convert(directory).state_dict
    for name, tensor in kept.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    (directory / "global_cmvn").write_text("nothing")
    with pytest.raises(CheckpointError, match="global_cmvn holds no CMVN statistics"):
        convert(directory)


def encoder(**values):
    return lambda config: config["encoder_conf"].update(values)


def decoder(**values):
    return lambda config: config["decoder_conf"].update(values)


def top(**values):
    return lambda config: config.update(values)


def dataset(**values):
    return lambda config: config["dataset_conf"].update(values)


REFUSED = [
    (top(encoder="squeezeformer"), "encoder is 'squeezeformer'"),
    (top(encoder="efficientConformer"), "encoder is 'efficientConformer'"),
    (top(encoder="branchformer"), "encoder is 'branchformer'"),
    (top(encoder="e_branchformer"), "encoder is 'e_branchformer'"),
    (top(encoder="sanm_encoder"), "encoder is 'sanm_encoder'"),
    (top(model="transducer"), "model is 'transducer'"),
    (top(model="paraformer"), "model is 'paraformer'"),
    (top(model="whisper"), "model is 'whisper'"),
    (top(model="firered"), "model is 'firered'"),
    (top(model="sensevoice_small"), "model is 'sensevoice_small'"),
    (top(model="k2_model"), "model is 'k2_model'"),
    (top(predictor="rnn"), "a transducer"),
    (top(paraformer=True), "Paraformer"),
    (top(lfmmi_dir="data/lfmmi"), "k2 LF-MMI"),
    (top(decoder="sanm_decoder"), "decoder is 'sanm_decoder'"),
    (lambda config: config["model_conf"].update(apply_non_blank_embedding=True), "apply_non_blank_embedding"),
    (encoder(layer_norm_type="rms_norm"), "encoder_conf.layer_norm_type is 'rms_norm'"),
    (encoder(n_kv_head=1), "encoder_conf.n_kv_head is 1"),
    (encoder(head_dim=4), "encoder_conf.head_dim is 4"),
    (encoder(mlp_type="moe"), "encoder_conf.mlp_type is 'moe'"),
    (encoder(mlp_type="gated"), "encoder_conf.mlp_type is 'gated'"),
    (encoder(concat_after=True), "encoder_conf.concat_after is True"),
    (encoder(normalize_before=False), "encoder_conf.normalize_before is False"),
    (encoder(pos_enc_layer_type="rope_pos"), "encoder_conf.pos_enc_layer_type is 'rope_pos'"),
    (encoder(selfattention_layer_type="shaw_rel_selfattn"), "selfattention_layer_type is 'shaw_rel_selfattn'"),
    (encoder(input_layer="conv2d2"), "encoder_conf.input_layer is 'conv2d2'"),
    (encoder(activation_type="selu"), "encoder_conf.activation_type is 'selu'"),
    (encoder(cnn_module_kernal=7), r"encoder_conf.cnn_module_kernal is unknown.*'cnn_module_kernel'"),
    (encoder(causal=False), "conv_kernel 8 is even"),
    (decoder(mlp_type="gated"), "decoder_conf.mlp_type is 'gated'"),
    (decoder(src_key_bias=False), "decoder_conf.src_key_bias is False"),
    (decoder(tie_word_embedding=True), "decoder_conf.tie_word_embedding is True"),
    (decoder(heads=2), "decoder_conf.heads is unknown"),
    (dataset(feats_type="log_mel_spectrogram"), "the feature type is 'log_mel_spectrogram'"),
    (dataset(fbank_conf={"num_mel_bins": 40}), "40 values a frame, but input_dim is 80"),
    (dataset(fbank_conf={"num_mel_bins": 80, "htk_compat": True}), "fbank_conf.htk_compat is unknown"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(directory, edit, change, message):
    edit(change)
    with pytest.raises(CheckpointError, match=message):
        convert(directory)


def test_adapters_are_refused(directory, reweigh):
    reweigh(lambda weights: weights.update({"encoder.encoders.0.self_attn.linear_q.lora_A": torch.zeros(4, 16)}))
    with pytest.raises(CheckpointError, match="LoRA"):
        convert(directory)


MISMATCHED = [
    (top(vocab_size=21), r"tensor ctc\.ctc_lo\.weight has shape \(20, 16\), but train\.yaml asks for \(21, 16\)"),
    (encoder(output_size=32), r"has shape .* but train\.yaml asks for"),
    (encoder(linear_units=64), r"feed_forward\.w_1\.weight has shape \(32, 16\)"),
    (encoder(cnn_module_kernel=15), r"depthwise_conv\.weight has shape \(16, 1, 8\)"),
    (encoder(num_blocks=3), r"tensor encoder\.encoders\.2\..* is missing"),
    (encoder(num_blocks=1), r"tensor encoder\.encoders\.1\..* belongs to a block that train\.yaml does not have"),
    (encoder(cnn_module_norm="batch_norm"), r"conv_module\.norm\.running_mean .* is missing"),
]


@pytest.mark.parametrize(("change", "message"), MISMATCHED, ids=[message for _, message in MISMATCHED])
def test_weights_and_configuration_must_fit(directory, edit, change, message):
    edit(change)
    edit(lambda config: config["tokenizer_conf"]["special_tokens"].update({"<sos>": 2, "<eos>": 2}))
    with pytest.raises(CheckpointError, match=message):
        convert(directory)


def test_unit_table_must_fit(directory):
    with (directory / "units.txt").open("a") as table:
        table.write("extra 20\n")
    with pytest.raises(CheckpointError, match=r"units\.txt has 21 units, but the model has 20 outputs"):
        convert(directory)
    (directory / "units.txt").unlink()
    with pytest.raises(CheckpointError, match="no unit table"):
        convert(directory)


def test_first_release_configuration(directory, edit):
    """Features under ``collate_conf``, no dataset section for them, unit table of another name."""

    def change(config):
        config.pop("dataset_conf")
        config["collate_conf"] = {
            "feature_extraction_conf": {
                "feature_type": "fbank", "mel_bins": 80, "frame_shift": 10, "frame_length": 25, "using_pitch": False,
            }
        }  # fmt: skip
        config["raw_wav"] = True

    edit(change)
    (directory / "units.txt").rename(directory / "words.txt")
    bundle = convert(directory)
    assert bundle.feature.options["num_mel_bins"] == 80
    assert bundle.feature.options["sample_rate"] == 16000
    assert bundle.tokenizer.files["symbols"].name == "words.txt"
    edit(lambda config: config["collate_conf"]["feature_extraction_conf"].update(using_pitch=True))
    with pytest.raises(CheckpointError, match="using_pitch"):
        convert(directory)


def test_other_sample_rate_and_mfcc(directory, edit):
    edit(dataset(resample_conf={"resample_rate": 8000}))
    assert convert(directory).feature.options["sample_rate"] == 8000

    def change(config):
        config["dataset_conf"].pop("fbank_conf")
        config["dataset_conf"]["feats_type"] = "mfcc"
        config["dataset_conf"]["mfcc_conf"] = {"num_mel_bins": 80, "num_ceps": 80, "high_freq": -200, "dither": 1.0}

    edit(change)
    feature = convert(directory).feature
    assert feature.kind == "mfcc"
    assert feature.options["num_ceps"] == 80
    assert feature.options["high_freq"] == -200
    assert feature.options["dither"] == 0.0


def test_dual_encoder_is_a_plain_one(directory, edit):
    edit(top(encoder="dual_conformer", model="ctl_model"))
    assert convert(directory).config["encoder"]["kind"] == "conformer"


def test_bundle_config_is_strict(wenet_digits):
    config = convert(wenet_digits / "variants" / "u2pp_k8_sos2").config
    with pytest.raises(CheckpointError, match=r"Unknown key 'encoder\.outputsize'.*'output_size'"):
        ConformerModel.from_config({**config, "encoder": {**config["encoder"], "outputsize": 1}})
    with pytest.raises(CheckpointError, match="sos_id 99"):
        ConformerModel.from_config({**config, "sos_id": 99})
