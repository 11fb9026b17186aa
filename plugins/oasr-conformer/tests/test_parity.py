"""Outputs equal WeNet's own, offline and chunk by chunk, for the trained model and for every variant."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from oasr_core.models.base import EncoderBatch

#: Far below the difference that a wrong LayerNorm epsilon makes (8e-5).
CLOSE = 3e-5
LOG_PROBS = 2e-4


@pytest.fixture(scope="module")
def feats(wenet_digits):
    return load_file(wenet_digits / "oracle" / "feats.safetensors")


@pytest.fixture(scope="module")
def variant_feats(wenet_digits):
    return load_file(wenet_digits / "variants" / "feats.safetensors")


def offline(model, *utterances, packed=False, poison=0.0):
    longest = max(map(len, utterances))
    features = torch.full((len(utterances), longest, utterances[0].shape[1]), poison)
    for row, utterance in enumerate(utterances):
        features[row, : len(utterance)] = utterance
    lengths = torch.tensor([len(utterance) for utterance in utterances])
    with torch.inference_mode():
        out = model.encoder.encode(EncoderBatch(features, lengths, packed=packed))
        log_probs = model.ctc.log_probs(out.hidden)
    counts = out.lengths.tolist()
    assert counts == [model.encoder.output_frames(len(utterance)) for utterance in utterances]
    rows = range(len(counts))
    return [out.hidden[r, : counts[r]] for r in rows], [log_probs[r, : counts[r]] for r in rows]


def close(got, want, atol=CLOSE):
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=0)


def test_offline(digits, feats, wenet_digits):
    oracle = load_file(wenet_digits / "oracle" / "offline.safetensors")
    assert len(feats) >= 7
    for name, features in feats.items():
        (hidden,), (log_probs,) = offline(digits, features)
        close(hidden, oracle[f"{name}.encoder_out"])
        close(log_probs, oracle[f"{name}.ctc_log_probs"], LOG_PROBS)


@pytest.mark.parametrize(("left", "file"), [(-1, "stream_c16_lall"), (4, "stream_c16_l4")])
def test_chunk_by_chunk(digits, feats, wenet_digits, stream, left, file):
    oracle = load_file(wenet_digits / "oracle" / f"{file}.safetensors")
    for name, features in feats.items():
        hidden = stream(digits.encoder, features, 16, left)
        close(hidden, oracle[f"{name}.encoder_out"])
        close(digits.ctc.log_probs(hidden[None])[0], oracle[f"{name}.ctc_log_probs"], LOG_PROBS)


def test_windows_are_the_oracles(digits, feats, wenet_digits, streaming):
    oracle = load_file(wenet_digits / "oracle" / "stream_c16_lall.safetensors")
    for name, features in feats.items():
        chunks = oracle[f"{name}.chunks"].tolist()
        windows = list(streaming.windows(digits.encoder, features, 16))
        assert [len(window) for window in windows] == [end - start for start, end, *_ in chunks]
        assert [digits.encoder.output_frames(len(w)) for w in windows] == [row[3] - row[2] for row in chunks]


def test_caches(digits, feats, wenet_digits, streaming):
    """Keys and values (positions folded in) and the convolution's context after two of the chunks."""
    oracle = load_file(wenet_digits / "oracle" / "stream_caches_utt07_3d_c16_l2.safetensors")
    encoder, state = digits.encoder, streaming.stream()
    for index, window in enumerate(streaming.windows(encoder, feats["utt07_3d"], 16)):
        (hidden,) = streaming.run_step(encoder, [state], [window], 16, 2)
        close(hidden, oracle[f"chunk{index}.out"])
        if f"chunk{index}.att_cache" not in oracle:
            continue
        attention, context = oracle[f"chunk{index}.att_cache"], oracle[f"chunk{index}.cnn_cache"]
        for layer, block in enumerate(encoder.encoders):
            # The oracle holds 32 frames with 2 left chunks, ours as many: the newest are at the end of both.
            keys = state.keys[layer].transpose(0, 1)
            positions = block.self_attn.position_keys[state.offset - keys.shape[1] : state.offset].transpose(0, 1)
            close(keys - positions, attention[layer, ..., :32])
            close(state.values[layer].transpose(0, 1), attention[layer, ..., 32:])
            gated = block.conv_module.gated(context[layer].transpose(1, 2).contiguous())
            close(state.slots["conv"][layer], gated[0])


def test_intermediate_activations(digits, feats, wenet_digits):
    oracle = load_file(wenet_digits / "oracle" / "intermediate_offline_utt01_1d.safetensors")
    encoder = digits.encoder
    seen = {}
    block = encoder.encoders[0]
    taps = {f"block{i}.out": layer for i, layer in enumerate(encoder.encoders)}
    taps |= {f"block0.{name}": getattr(block, name) for name in ("norm_ff_macaron", "norm_mha", "norm_conv", "norm_ff")}
    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out))
        for name, module in taps.items()
    ]
    try:
        offline(digits, feats["utt01_1d"])
    finally:
        for handle in handles:
            handle.remove()
    count = oracle["encoder_out"].shape[1]
    for name in taps:
        close(seen[name][:, :count], oracle[name])
    features = feats["utt01_1d"][None]
    close(encoder.global_cmvn(features), oracle["cmvn_out"])
    subsampled = encoder.embed(encoder.global_cmvn(features))
    close(subsampled, oracle["subsampling_linear_out"], 5e-5)
    close(encoder.positions.embed(subsampled, slice(0, count)), oracle["embed_out"], 5e-4)


def test_variant_offline(load, variant, variant_feats):
    model, _ = load(variant)
    oracle = load_file(variant / "oracle.safetensors")
    for index in (0, 1):
        (hidden,), (log_probs,) = offline(model, variant_feats[f"feats{index}"])
        close(hidden, oracle[f"offline{index}.encoder_out"], 1e-5)
        close(log_probs, oracle[f"offline{index}.ctc_log_probs"], 1e-5)


def test_variant_streaming(load, variant, variant_feats, stream):
    model, _ = load(variant)
    oracle = load_file(variant / "oracle.safetensors")
    assert model.encoder.streaming_kind == ("paged" if "stream_c4_l1.encoder_out" in oracle else "none")
    if model.encoder.streaming_kind == "none":
        assert model.encoder.state_specs == ()
        return
    for left in (-1, 1):
        close(stream(model.encoder, variant_feats["feats0"], 4, left), oracle[f"stream_c4_l{left}.encoder_out"], 1e-5)


def test_variant_decoder(load, variant):
    model, _ = load(variant)
    oracle = load_file(variant / "oracle.safetensors")
    hidden = oracle["offline0.encoder_out"]
    hyps, lengths = oracle["dec.hyps_in"], oracle["dec.hyps_in_lens"]
    check_decoder(model, hidden, hyps, lengths, oracle["dec.l2r_log_probs"], oracle.get("dec.r2l_log_probs"), [
        [5, 6, 7, 6], [9, 9], []
    ])  # fmt: skip


def test_decoder(digits, wenet_digits):
    oracle = load_file(wenet_digits / "oracle" / "decoder_rescoring.safetensors")
    encoded = load_file(wenet_digits / "oracle" / "offline.safetensors")
    names = {key.split(".")[0] for key in oracle if f"{key.split('.')[0]}.encoder_out" in encoded}
    assert names
    for name in names:
        hyps, lengths = oracle[f"{name}.hyps_in"], oracle[f"{name}.hyps_in_lens"]
        tokens = [row[1:count].tolist() for row, count in zip(hyps, lengths.tolist(), strict=True)]
        check_decoder(
            digits, encoded[f"{name}.encoder_out"], hyps, lengths,
            oracle[f"{name}.l2r_log_probs"], oracle[f"{name}.r2l_log_probs"], tokens,
        )  # fmt: skip


def check_decoder(model, hidden, hyps, lengths, left, right, tokens):
    """Both directions, with the memory expanded and materialised; ``right`` is ``None`` without a second decoder."""
    scorer = model.interfaces["aed_scorer"]
    assert hyps[0, 0] == scorer.sos_id
    expanded = hidden.expand(len(hyps), -1, -1)
    frames = torch.full((len(hyps),), hidden.shape[0])
    reversed_hyps = torch.full_like(hyps, scorer.eos_id)
    for row, sequence in enumerate(tokens):
        reversed_hyps[row, : len(sequence) + 1] = torch.tensor([scorer.sos_id, *reversed(sequence)])
    for reverse, inputs, want in ((False, hyps, left), (True, reversed_hyps, right)):
        if want is None:
            assert scorer.reverse_weight == 0.0
            continue
        for memory in (expanded, expanded.contiguous()):
            got = scorer.score(memory, frames, inputs, lengths, reverse=reverse)
            for row, count in enumerate(lengths.tolist()):
                close(got[row, :count], want[row, :count], 1e-4)
    poisoned = torch.cat([expanded, torch.full((len(hyps), 5, hidden.shape[1]), 1e4)], dim=1)
    again = scorer.score(poisoned, frames, hyps, lengths, reverse=False)
    for row, count in enumerate(lengths.tolist()):
        close(again[row, :count], left[row, :count], 1e-4)
