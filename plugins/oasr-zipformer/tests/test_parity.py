"""Outputs equal icefall's own, offline and chunk by chunk, for the trained model and for every random variant."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

#: An independent fp32 implementation comes this close; a wrong BiasNorm or Swoosh constant is off by far more.
CLOSE = 1e-4


def close(got, want, atol=CLOSE):
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=0)


def greedy(log_probs):
    """Tokens and first frames of their runs."""
    best = log_probs.argmax(-1).tolist()
    runs = [(token, at) for at, token in enumerate(best) if at == 0 or best[at - 1] != token]
    spoken = [(token, at) for token, at in runs if token]
    return [token for token, _ in spoken], [at for _, at in spoken]


def check_offline(digits, offline, feats, directory):
    oracle = load_file(directory / "oracle" / "offline.safetensors")
    results = json.loads((directory / "oracle" / "results.json").read_text())["utterances"]
    for name, features in feats.items():
        (hidden,) = offline(digits, features)
        log_probs = digits.interfaces["ctc"].log_probs(hidden)
        close(hidden, oracle[f"{name}.encoder_out"])
        close(log_probs, oracle[f"{name}.ctc_log_probs"])
        assert greedy(log_probs) == (results[name]["ctc_greedy"]["tokens"], results[name]["ctc_greedy"]["frames"])


def test_offline(digits, offline, feats, icefall_digits):
    assert len(feats) == 5
    check_offline(digits, offline, feats, icefall_digits)


@pytest.mark.slow
def test_offline_all(digits, offline, icefall_shared):
    feats = load_file(icefall_shared / "oracle" / "fbank.safetensors")
    assert len(feats) == 14
    check_offline(digits, offline, feats, icefall_shared)


def test_intermediate_activations(digits, offline, feats, icefall_digits):
    oracle = load_file(icefall_digits / "oracle" / "offline.safetensors")
    encoder = digits.encoder
    seen = {}
    taps = {"encoder_embed": encoder.encoder_embed, **{f"stack{i}_out": s for i, s in enumerate(encoder.encoders)}}
    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out))
        for name, module in taps.items()
    ]
    try:
        offline(digits, feats["digits_03"])
    finally:
        for handle in handles:
            handle.remove()
    for name in taps:
        want = oracle[f"digits_03.{name}"]
        close(seen[name][0, : len(want)], want)


@pytest.mark.parametrize("chunk", [16, 32])
def test_chunk_by_chunk(digits, feats, icefall_digits, streams, chunk):
    oracle = load_file(icefall_digits / "oracle" / f"streaming_chunk{chunk}.safetensors")
    results = json.loads((icefall_digits / "oracle" / f"streaming_chunk{chunk}.json").read_text())["utts"]
    names = [name for name in feats if f"{name}.encoder_out" in oracle]
    assert names
    for name in names:
        hidden = streams(digits.encoder, chunk // 2, [feats[name]]).finish(0)
        log_probs = digits.interfaces["ctc"].log_probs(hidden)
        close(hidden, oracle[f"{name}.encoder_out"])
        close(log_probs, oracle[f"{name}.ctc_log_probs"])
        want = results[name]["ctc_greedy"]
        assert greedy(log_probs.flatten(0, 1)) == (want["tokens"], want["frames"])


def test_windows_are_the_oracles(digits, feats, icefall_digits, streams):
    for chunk in (16, 32):
        info = json.loads((icefall_digits / "oracle" / f"streaming_chunk{chunk}.json").read_text())
        geometry = digits.encoder.chunk_geometry(chunk // 2)
        assert geometry.window - geometry.stride == info["pad_length"]
        assert geometry.flush_frames == info["pad_length"] + info["tail_pad_len"]
        for name, utterance in info["utts"].items():
            driver = streams(digits.encoder, chunk // 2, [feats[name]])
            starts = list(range(0, len(driver.features[0]) - geometry.min_final + 1, geometry.stride))
            assert len(starts) == utterance["num_chunks"]
            for start, row in zip(starts, utterance["chunks"] or [], strict=False):
                window = driver.features[0][start : start + geometry.window]
                assert (start, len(window), geometry.window - len(window)) == (
                    row["start_frame"], row["num_feature_frames"], row["tail_padded_frames"],
                )  # fmt: skip
                assert row["out_frames"] == geometry.output_frames


def test_front_end_chunk_by_chunk(digits, feats, icefall_digits, streams):
    oracle = load_file(icefall_digits / "oracle" / "streaming_chunk16.safetensors")["digits_00.encoder_embed"]
    seen = []
    handle = digits.encoder.encoder_embed.out_norm.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    try:
        streams(digits.encoder, 8, [feats["digits_00"]]).finish(0)
    finally:
        handle.remove()
    close(torch.stack(seen), oracle)


def test_states(digits, feats, icefall_digits, streams):
    """Initial states, and every state after the last chunk."""
    oracle = load_file(icefall_digits / "oracle" / "streaming_chunk16.safetensors")
    initial = json.loads((icefall_digits / "oracle" / "streaming_chunk16.json").read_text())["initial_states"]
    driver = streams(digits.encoder, 8, [feats["digits_03"]])
    for state in initial[:-1]:
        got = state_of(digits, driver, state["name"])
        assert list(got.shape) == state["shape"]
        assert not got.any()
    driver.finish(0)
    for state in initial[:-1]:
        close(state_of(digits, driver, state["name"]), oracle[f"digits_03.state_after_chunk_last.{state['name']}"])
    processed = initial[-1]
    assert processed["name"] == "processed_lens"
    assert 2 * 8 * len(driver.outputs[0]) == oracle["digits_03.state_after_chunk_last.processed_lens"].item()


def state_of(model, driver, name):
    """A state under icefall's name and in its layout."""
    if name == "encoder_embed.cached_left_pad":
        return driver.slot(0, "embed").permute(2, 0, 1)[None]
    _, stack, _, layer, kind = name.split(".")
    config = model.config.encoder.stacks[int(stack)]
    if kind in ("cached_conv1", "cached_conv2"):
        return driver.slot(0, f"stack{stack}.convolution", int(layer))[int(kind[-1]) - 1].t()[None]
    value = config.num_heads * config.value_head_dim
    widths = (config.num_heads * config.query_head_dim, config.nonlin_dim, value, value)
    parts = driver.slot(0, f"stack{stack}.attention", int(layer)).split(widths, dim=1)
    part = parts[["cached_key", "cached_nonlin_attn", "cached_val1", "cached_val2"].index(kind)]
    return part[None, None] if kind == "cached_nonlin_attn" else part[:, None]


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("noncausal", "exp_noncausal/pretrained.pt"),
        ("ctc_only", "exp_ctc_only/pretrained.pt"),
        ("avg_epoch2_avg1_averaged_model", "epoch-2-avg-1"),
        ("avg_epoch1_2_plain_average", "epoch-2-avg-2-plain"),
    ],
)
def test_variant(load, offline, icefall_shared, tag, name):
    model, _ = load(icefall_shared, name)
    feats = load_file(icefall_shared / "oracle" / "fbank.safetensors")
    oracle = load_file(icefall_shared / "oracle" / "variants.safetensors")
    results = json.loads((icefall_shared / "oracle" / "variants.json").read_text())[tag]
    for utterance in ("digits_01", "digits_04"):
        (hidden,) = offline(model, feats[utterance])
        log_probs = model.interfaces["ctc"].log_probs(hidden)
        close(hidden, oracle[f"{tag}.{utterance}.encoder_out"])
        close(log_probs, oracle[f"{tag}.{utterance}.ctc_log_probs"])
        assert greedy(log_probs)[0] == results[utterance]["ctc_greedy"]
