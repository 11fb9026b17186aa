"""icefall directories are read as icefall reads them, and what is not served is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import PosixPath

import pytest
import torch

from oasr_core.checkpoints.converter import RANK_ASSET_LAYOUT, RANK_KEYED_VALUE
from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.errors import CheckpointError
from oasr_zipformer.converter import IcefallConverter
from oasr_zipformer.model import ZipformerModel
from oasr_zipformer.random_weights import random_config

VOCAB = 6
TOKENS = "<blk> 0\n<sos/eos> 1\n<unk> 2\n\u2581A 3\nB 4\nC 5\n"
HEADS = {"num_heads": 2, "query_head_dim": 32, "value_head_dim": 12, "pos_head_dim": 4}


def weights_of(*, seed=0, transducer=True, ctc=True, heads=HEADS, **encoder):
    """A tiny model's weights under icefall's names."""
    stacks = [
        {"num_layers": n, "downsampling": rate, "dim": 16, "feedforward_dim": 16, "conv_kernel": 7, **heads}
        for n, rate in ((1, 1), (2, 2))
    ]
    settings = {"stacks": stacks, "embed_channels": (2, 4, 8), "pos_dim": 12, **encoder}
    parts = {"decoder_dim": 8, "joiner_dim": 12, "context_size": 2} if transducer else None
    torch.manual_seed(seed)
    model = ZipformerModel.from_config(random_config(vocab_size=VOCAB, transducer=parts, ctc=ctc, **settings))
    weights = {name.replace("encoder.encoder_embed.", "encoder_embed."): t for name, t in model.state_dict().items()}
    weights["encoder.encoders.0.layers.0.bypass_scale"] = torch.ones(16)
    if transducer:
        weights |= {f"simple_{x}_proj.{p}": torch.zeros(VOCAB, 8) for x in ("am", "lm") for p in ("weight", "bias")}
    return weights


@pytest.fixture
def directory(tmp_path):
    """A model folder as icefall publishes it."""
    (tmp_path / "exp").mkdir()
    (tmp_path / "data" / "lang_bpe_6").mkdir(parents=True)
    (tmp_path / "data" / "lang_bpe_6" / "tokens.txt").write_text(TOKENS)
    torch.save({"model": weights_of()}, tmp_path / "exp" / "pretrained.pt")
    return tmp_path


def save(directory, weights, name="exp/pretrained.pt", **beside):
    torch.save({"model": weights, **beside}, directory / name)


def convert(directory, name=None):
    return IcefallConverter().convert(CheckpointPeek(directory), checkpoint_name=name)


def detect(directory):
    return IcefallConverter().detect(CheckpointPeek(directory))


def test_modules_are_light():
    code = "import oasr_zipformer.converter, oasr_zipformer.icefall_config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_digits_bundle(icefall_digits):
    found = detect(icefall_digits)
    assert found is not None
    assert found.rank == RANK_KEYED_VALUE
    bundle = convert(icefall_digits)
    config = json.loads((icefall_digits / "model_configs.json").read_text())["exp"]
    assert json.loads(json.dumps(bundle.config)) == bundle.config
    assert (bundle.architecture, bundle.config["vocab_size"], bundle.config["unk_id"]) == ("zipformer", 44, 2)
    assert bundle.config["transducer"] == {"decoder_dim": 128, "joiner_dim": 128, "context_size": 2}
    encoder = bundle.config["encoder"]
    assert (encoder["causal"], encoder["pos_dim"], encoder["embed_channels"]) == (True, 48, [8, 32, 128])
    for ours, theirs in (
        ("num_layers", "num_encoder_layers"), ("downsampling", "downsampling_factor"), ("dim", "encoder_dim"),
        ("feedforward_dim", "feedforward_dim"), ("num_heads", "num_heads"), ("conv_kernel", "cnn_module_kernel"),
    ):  # fmt: skip
        assert ",".join(str(stack[ours]) for stack in encoder["stacks"]) == config[theirs]
    assert {role: path.name for role, path in bundle.tokenizer.files.items()} == {
        "symbols": "tokens.txt", "sentencepiece": "bpe.model",
    }  # fmt: skip
    assert bundle.feature.audio_scale == 1.0
    assert bundle.feature.options == {
        "sample_rate": 16000, "num_mel_bins": 80, "high_freq": -400.0, "snip_edges": False, "dither": 0.0,
    }  # fmt: skip
    decoding = bundle.decoding
    assert (decoding.decode_method, decoding.chunk_size, decoding.num_left_chunks) == ("transducer", 8, 8)
    assert bundle.config["encoder"]["left_context_frames"] == 128


def test_shared_directory(icefall_shared):
    """exp/ is icefall's own folder and is preferred to others; a named file wins."""
    bundle = convert(icefall_shared)
    assert bundle.source.endswith("exp/pretrained.pt")
    assert bundle.tokenizer.files["symbols"].parent.name == "lang_bpe"
    small = convert(icefall_shared, "epoch-2.pt")
    assert [stack["num_heads"] for stack in small.config["encoder"]["stacks"]] == [4, 4]
    assert [stack["query_head_dim"] for stack in small.config["encoder"]["stacks"]] == [8, 8]
    assert small.config["encoder"]["embed_channels"] == [4, 8, 16]
    assert convert(icefall_shared, "exp_noncausal/pretrained.pt").decoding.chunk_size is None
    with pytest.raises(CheckpointError, match=r"no weights file 'epoch-7\.pt'"):
        convert(icefall_shared, "epoch-7.pt")


@pytest.mark.parametrize("layout", ["flat", "exp", "file", "language folder at the top"])
def test_layouts(directory, layout):
    if layout in ("flat", "file"):
        (directory / "exp" / "pretrained.pt").rename(directory / "pretrained.pt")
        (directory / "data" / "lang_bpe_6" / "tokens.txt").rename(directory / "tokens.txt")
    if layout == "language folder at the top":
        (directory / "data" / "lang_bpe_6").rename(directory / "lang_char")
    target = directory / "pretrained.pt" if layout == "file" else directory
    bundle = resolve_checkpoint(target)
    model, report = load_model(bundle)
    assert set(model.interfaces) == {"ctc", "transducer"}
    assert not report.dropped
    assert not report.missing
    assert bundle.converter == "icefall"


@pytest.mark.parametrize("heads", [{"ctc": False}, {"transducer": False}])
def test_heads(directory, heads):
    save(directory, weights_of(**heads))
    bundle = convert(directory)
    model, _ = load_model(bundle)
    wanted = "ctc" if "transducer" in heads else "transducer"
    assert list(model.interfaces) == [wanted]
    assert bundle.decoding.decode_method == wanted


def test_attention_decoder_is_reported(directory):
    save(directory, weights_of() | {"attention_decoder.decoder.embed.weight": torch.zeros(4, 4)})
    _, report = load_model(convert(directory))
    assert list(report.lost) == ["attention decoder"]


def test_parallel_training(directory):
    save(directory, {f"module.{name}": tensor for name, tensor in weights_of().items()})
    assert detect(directory).rank == RANK_KEYED_VALUE
    load_model(convert(directory))


def test_bare_state_dict_and_one_other_file(directory):
    torch.save(weights_of(), directory / "exp" / "pretrained.pt")
    (directory / "exp" / "pretrained.pt").rename(directory / "exp" / "epoch-30-avg-9.pt")
    assert convert(directory).source.endswith("epoch-30-avg-9.pt")


def test_which_file(directory):
    save(directory, weights_of(), "exp/epoch-1.pt")
    save(directory, weights_of(), "exp/epoch-2.pt")
    assert convert(directory).source.endswith("pretrained.pt")
    (directory / "exp" / "pretrained.pt").unlink()
    assert detect(directory) is not None
    with pytest.raises(CheckpointError, match=r"several weights files: exp/epoch-1\.pt, exp/epoch-2\.pt"):
        convert(directory)
    assert convert(directory, "epoch-2.pt").source.endswith("epoch-2.pt")


# -- averages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def epochs(directory):
    """Three epochs, with running averages."""
    for epoch, steps in ((1, 450), (2, 900), (3, 1130)):
        save(
            directory, weights_of(seed=epoch), f"exp/epoch-{epoch}.pt",
            model_avg=weights_of(seed=10 + epoch), batch_idx_train=steps, average_period=200,
            optimizer=None, exp_dir=PosixPath("zipformer/exp"), num_heads="2,2", query_head_dim="32",
        )  # fmt: skip
    return directory


def test_running_average(epochs):
    got = convert(epochs, "epoch-3-avg-2.pt").state_dict
    first, last = weights_of(seed=11), weights_of(seed=13)
    for name in ("ctc_output.1.weight", "encoder.encoders.1.encoder.layers.1.norm.bias"):
        want = (1000 * last[name].double() - 400 * first[name].double()) / 600
        torch.testing.assert_close(got[name], want.float())


def test_plain_average(epochs):
    got = convert(epochs, "epoch-3-avg-2-plain").state_dict["ctc_output.1.weight"]
    second, third = (weights_of(seed=seed)["ctc_output.1.weight"] for seed in (2, 3))
    torch.testing.assert_close(got, (second + third) / 2)


def test_one_epoch_takes_its_model(epochs):
    want = weights_of(seed=3)["ctc_output.1.weight"]
    assert torch.equal(convert(epochs, "epoch-3.pt").state_dict["ctc_output.1.weight"], want)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("epoch-3-avg-3", "avg must be between 1 and 2"),
        ("epoch-3-avg-0", "avg must be between"),
        ("epoch-9-avg-1", r"needs epoch-8\.pt, epoch-9\.pt"),
    ],
)
def test_average_refused(epochs, name, message):
    with pytest.raises(CheckpointError, match=message):
        convert(epochs, name)


def test_average_of_bad_files(epochs):
    save(epochs, weights_of(), "exp/epoch-2.pt", model_avg=weights_of())
    with pytest.raises(CheckpointError, match="batch_idx_train"):
        convert(epochs, "epoch-3-avg-1")
    save(epochs, weights_of(), "exp/epoch-2.pt", model_avg=weights_of(), batch_idx_train=1199, average_period=200)
    with pytest.raises(CheckpointError, match="nothing lies between"):
        convert(epochs, "epoch-3-avg-1")
    save(epochs, weights_of(transducer=False), "exp/epoch-2.pt")
    with pytest.raises(CheckpointError, match="different networks"):
        convert(epochs, "epoch-3-avg-2-plain")


# -- dimensions -----------------------------------------------------------------------------------------------------

ODD = {"num_heads": 2, "query_head_dim": 8, "value_head_dim": 6, "pos_head_dim": 4}


def test_heads_are_not_guessed(directory):
    save(directory, weights_of(heads=ODD))
    with pytest.raises(CheckpointError, match="State num_heads"):
        convert(directory)
    (directory / "exp" / "zipformer.yaml").write_text("num_heads: 2,2\n")
    assert [stack["query_head_dim"] for stack in convert(directory).config["encoder"]["stacks"]] == [8, 8]
    (directory / "exp" / "zipformer.yaml").unlink()
    (directory / "zipformer.json").write_text(json.dumps({"query_head_dim": [8], "value_head_dim": 6}))
    assert [stack["num_heads"] for stack in convert(directory).config["encoder"]["stacks"]] == [2, 2]


def test_training_options_are_used(directory):
    save(directory, weights_of(heads=ODD), num_heads="2,2", chunk_size="32,64,-1", left_context_frames="64,256,-1")
    bundle = convert(directory)
    assert bundle.config["encoder"]["stacks"][1]["value_head_dim"] == 6
    assert (bundle.decoding.chunk_size, bundle.config["encoder"]["left_context_frames"]) == (16, 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("num_heads: 3,3", "cannot have 3 heads"),
        ("num_heads: 2,2,2", "3 values for 2 stacks"),
        ("num_heads: two", "must be integers"),
        ("encoder_dim: 16,24", "encoder_dim of stack 1 is stated as 24"),
        ("causal: false", "causal is stated as False"),
        ("num_head: 2", "unknown key 'num_head'.*Did you mean 'num_heads'"),
        ("- 3", "holds no mapping"),
        ("feature_dim: 40", "feature_dim 40 does not give"),
        ("left_context_frames: 4", "left_context_frames 4 is less"),
        ("decoder_dim: 9", "decoder_dim is stated as 9"),
        ("blank_id: 6", "blank_id 6 is not below vocab_size"),
    ],
)
def test_contradictions(directory, options, message):
    (directory / "zipformer.yaml").write_text(options)
    with pytest.raises(CheckpointError, match=message):
        convert(directory)


def test_unknown_variants(directory):
    weights = weights_of()
    extra = {"encoder.encoders.0.layers.0.new_module.weight": torch.zeros(2)}
    save(directory, weights | extra)
    with pytest.raises(CheckpointError, match=r"new_module\.weight is not part of a Zipformer2"):
        convert(directory)
    save(
        directory,
        {name: t for name, t in weights.items() if not name.startswith("encoder.encoders.1.encoder.layers.0.norm")},
    )
    with pytest.raises(CheckpointError, match=r"lacks encoder\.encoders\.1\.encoder\.layers\.0\.norm\.bias"):
        convert(directory)
    save(directory, weights | {"encoder.encoders.0.layers.0.feed_forward1.in_proj.bias": torch.zeros(5)})
    with pytest.raises(CheckpointError, match="variant that is not known"):
        convert(directory)


# -- tokens ---------------------------------------------------------------------------------------------------------


def test_disambiguation_symbols_do_not_count(directory):
    (directory / "data" / "lang_bpe_6" / "tokens.txt").write_text(TOKENS + "#0 6\n#1 7\n")
    assert convert(directory).config["vocab_size"] == VOCAB


def test_no_unknown_token(directory):
    (directory / "data" / "lang_bpe_6" / "tokens.txt").write_text(TOKENS.replace("<unk>", "D"))
    assert convert(directory).config["unk_id"] is None


def test_token_table_by_size(directory):
    other = directory / "data" / "lang_phone"
    other.mkdir()
    (other / "tokens.txt").write_text("<eps> 0\nAA 1\n")
    assert convert(directory).tokenizer.files["symbols"].parent.name == "lang_bpe_6"
    (other / "tokens.txt").write_text(TOKENS.replace("C", "D"))
    with pytest.raises(CheckpointError, match="several token tables that fit"):
        convert(directory)


def test_token_table_missing_or_wrong(directory):
    table = directory / "data" / "lang_bpe_6" / "tokens.txt"
    table.write_text(TOKENS + "D 6\n")
    with pytest.raises(CheckpointError, match=r"6 outputs, but data/lang_bpe_6/tokens\.txt has 7"):
        convert(directory)
    table.unlink()
    with pytest.raises(CheckpointError, match=r"no tokens\.txt"):
        convert(directory)


def test_byte_level_pieces_are_refused(directory):
    (directory / "data" / "lang_bpe_6" / "bbpe.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="byte-level"):
        convert(directory)


# -- others ---------------------------------------------------------------------------------------------------------

ZIPFORMER1 = ("encoder.encoder_embed.conv.0.weight", "encoder.encoders.0.encoder.layers.0.norm_final.eps")
OTHERS = [
    (("encoder.encoders.0.layers.0.self_attn1.in_proj.lora_A",), True, "zipformer_lora.*merge"),
    (("encoder.encoders.0.layers.0.adapter.in.weight",), True, "zipformer_adapter"),
    (("text_encoder.embed.weight",), True, "zipformer_prompt_asr"),
    (("style_prompt_embedding",), True, "zipformer_prompt_asr"),
    (ZIPFORMER1, False, "Zipformer version 1"),
    (("encoder.skip_modules.0.weight1",), False, "Zipformer version 1"),
    (("encoder.encoder.emformer_layers.0.attention.emb_to_query.weight",), False, "ConvEmformer"),
    (("encoder.encoder.layers.0.lstm.weight_ih_l0",), False, "LSTM transducer"),
    (("encoder.encoder.layers.0.self_attn.pos_bias_u",), False, "Conformer transducer"),
    (("encoder_output_layer.1.weight", "decoder.layers.0.norm1.weight"), False, "conformer_ctc"),
    (("tdnn.0.weight", "lstms.0.weight_ih_l0"), False, "tdnn_lstm_ctc"),
]


@pytest.mark.parametrize(("names", "with_zipformer2", "message"), OTHERS)
def test_other_families(directory, names, with_zipformer2, message):
    others = {name: torch.zeros(2, 2) for name in names}
    save(directory, (weights_of() | others) if with_zipformer2 else others)
    found = detect(directory)
    assert found is not None
    assert found.rank == RANK_ASSET_LAYOUT
    with pytest.raises(CheckpointError, match=message):
        convert(directory)


def test_unknown_weights(directory):
    save(directory, {"encoder.encoders.0.self_attn.pos_bias_u": torch.zeros(2)})
    assert detect(directory) is None
    with pytest.raises(CheckpointError, match="does not have the tensors of icefall's Zipformer2"):
        convert(directory)


def test_torchscript(directory):
    write_torchscript(directory / "exp" / "jit_script.pt")
    assert detect(directory).rank == RANK_KEYED_VALUE
    convert(directory)
    (directory / "exp" / "pretrained.pt").unlink()
    assert detect(directory).rank == RANK_ASSET_LAYOUT
    with pytest.raises(CheckpointError, match="TorchScript"):
        convert(directory)


def write_torchscript(path):
    """The members by which an archive of torch.jit.save is told, without its deprecated writer."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("jit_script/code/__torch__.py", "")
        archive.writestr("jit_script/constants.pkl", "")
        archive.writestr("jit_script/data.pkl", "")


def test_git_lfs_pointer(directory):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (directory / "exp" / "pretrained.pt").write_text(pointer)
    assert detect(directory).rank == RANK_ASSET_LAYOUT
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        convert(directory)


def test_exports(directory):
    (directory / "exp" / "pretrained.pt").unlink()
    for name in ("encoder-epoch-99-avg-1.onnx", "joiner-epoch-99-avg-1.onnx"):
        (directory / "exp" / name).write_bytes(b"onnx")
    assert detect(directory).rank == RANK_ASSET_LAYOUT
    with pytest.raises(CheckpointError, match=re.escape("exported models (exp/encoder-epoch-99-avg-1.onnx")):
        convert(directory)


def test_foreign_directories(tmp_path, wenet_digits, directory):
    assert detect(wenet_digits) is None
    (tmp_path / "empty").mkdir()
    assert detect(tmp_path / "empty") is None
    assert IcefallConverter().detect(CheckpointPeek(directory / "exp" / "pretrained.pt")) is None
    with pytest.raises(CheckpointError, match="no weights"):
        convert(tmp_path / "empty")
    # The experiment folder alone: the weights are recognised, and what is missing is said.
    with pytest.raises(CheckpointError, match=r"no tokens\.txt.*Give the directory that holds both"):
        resolve_checkpoint(directory / "exp")


def test_digits_folder_can_be_copied(icefall_digits, tmp_path):
    """Files flat in one folder, as on some hubs."""
    for name in ("exp/pretrained.pt", "data/lang_bpe/tokens.txt", "data/lang_bpe/bpe.model"):
        shutil.copy(icefall_digits / name, tmp_path)
    assert set(convert(tmp_path).tokenizer.files) == {"symbols", "sentencepiece"}
