"""What a row gives does not depend on its neighbours, on padding, on the layout, or on how streams are mixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oasr_conformer.random_weights import random_config, random_model
from oasr_core.cache.options import CacheOptions
from oasr_core.cache.sizing import build_cache_config
from oasr_core.cache.store import StreamStateStore
from oasr_core.errors import AudioTooLongError, ConfigError
from oasr_core.models.base import ChunkBatch, EncoderBatch, PagedKV, Slot

SMALL = {"output_size": 32, "attention_heads": 4, "linear_units": 64, "num_blocks": 2}


def small(**encoder):
    return random_model(random_config(vocab_size=11, **{**SMALL, **encoder}), seed=1)


@torch.inference_mode()
def encode(model, utterances, *, poison=0.0, packed=False, extra=0):
    longest = max(map(len, utterances)) + extra
    features = torch.full((len(utterances), longest, 80), poison)
    for row, utterance in enumerate(utterances):
        features[row, : len(utterance)] = utterance
    lengths = torch.tensor([len(utterance) for utterance in utterances])
    out = model.encoder.encode(EncoderBatch(features, lengths, packed=packed))
    assert out.hidden.shape[:2] == (len(utterances), model.encoder.output_frames(longest))
    return [out.hidden[row, :count] for row, count in enumerate(out.lengths.tolist())]


def utterances(*lengths):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(length, 80, generator=generator) * 3 + 10 for length in lengths]


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        if one.numel():
            assert (one - other).abs().max() <= 5e-5 * other.abs().max().clamp(min=1.0)


MODELS = {
    "causal": {},
    "causal_even_kernel": {"conv_kernel": 8},
    "causal_batch_norm": {"conv_norm": "batch_norm"},
    "symmetric": {"conv_causal": False, "dynamic_chunk": False},
    "symmetric_batch_norm": {"conv_causal": False, "conv_norm": "batch_norm", "dynamic_chunk": False},
    "static_chunk": {"dynamic_chunk": False, "static_chunk_size": 5},
    "no_positions": {"positions": "no_pos"},
    "no_convolution": {"conv_module": False, "conv_causal": False},
    "transformer": {
        "kind": "transformer", "positions": "abs_pos", "relative_attention": False, "macaron": False,
        "conv_module": False, "conv_causal": False, "activation": "relu",
    },
    "linear_input": {"input_layer": "linear", "activation": "gelu"},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True])
def test_batch_is_single(name, packed):
    model = small(**MODELS[name])
    rows = utterances(123, 15, 90, 7, 123, 64)
    alone = [encode(model, [row])[0] for row in rows]
    for poison in (1e4, float("nan")):
        same(encode(model, rows, poison=poison, packed=packed, extra=9), alone)
    back = encode(model, rows[::-1], packed=packed)
    same(back[::-1], alone)


def test_variants_padded_and_packed(load, variant, wenet_digits):
    model, _ = load(variant)
    feats = load_file(wenet_digits / "variants" / "feats.safetensors")
    oracle = load_file(variant / "oracle.safetensors")
    rows = [feats["feats0"], feats["feats1"]]
    want = [oracle["offline0.encoder_out"], oracle["offline1.encoder_out"]]
    for packed in (False, True):
        for got, expected in zip(encode(model, rows, poison=float("nan"), packed=packed), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_too_short_for_a_frame(packed):
    model = small()
    rows = utterances(6, 40, 0)
    empty, full, nothing = encode(model, rows, poison=float("nan"), packed=packed)
    assert len(empty) == len(nothing) == 0
    same([full], encode(model, rows[1:2]))
    assert [len(out) for out in encode(model, rows[:1], packed=packed)] == [0]


def test_static_chunk_offline_is_streaming(stream):
    model = small(dynamic_chunk=False, static_chunk_size=5)
    (features,) = utterances(150)
    same([stream(model.encoder, features, 5, -1)], encode(model, [features]))
    with pytest.raises(ConfigError, match="chunks of 5 only"):
        model.encoder.chunk_geometry(4)


def test_dynamic_chunk_uses_full_context_offline(stream):
    model = small()
    (features,) = utterances(150)
    chunked = stream(model.encoder, features, 5, -1)
    assert (chunked - encode(model, [features])[0]).abs().max() > 1e-3
    same([stream(model.encoder, features, 64, -1)], encode(model, [features]))


@pytest.mark.parametrize("encoder", [{}, {"conv_causal": False}, {"dynamic_chunk": False}])
def test_streaming_kind(encoder):
    model = small(**encoder)
    if not encoder:
        assert model.encoder.streaming_kind == "paged"
        with pytest.raises(ConfigError, match="at least 1"):
            model.encoder.chunk_geometry(0)
        return
    assert model.encoder.streaming_kind == "none"
    with pytest.raises(ConfigError, match="cannot stream"):
        model.encoder.chunk_geometry(16)


@pytest.mark.parametrize("left", [-1, 2])
@pytest.mark.parametrize("name", ["causal", "no_positions", "transformer", "linear_input"])
def test_streams_of_any_age_share_steps(name, left, stream, streaming):
    """Three streams start one step apart and end at different times; short last windows are padded with NaN."""
    model = small(**MODELS[name])
    rows = utterances(150, 97, 61)
    alone = [stream(model.encoder, row, 4, left) for row in rows]
    queues = [list(streaming.windows(model.encoder, row, 4)) for row in rows]
    states, outputs = [streaming.stream() for _ in rows], [[] for _ in rows]
    for turn in range(max(map(len, queues)) + len(rows)):
        active = [i for i, queue in enumerate(queues) if 0 <= turn - i < len(queue)]
        if not active:
            continue
        windows = [queues[i][turn - i] for i in active]
        results = streaming.run_step(model.encoder, [states[i] for i in active], windows, 4, left)
        for i, result in zip(active, results, strict=True):
            outputs[i].append(result)
    same([torch.cat(parts) for parts in outputs], alone)


@pytest.mark.parametrize("left", [-1, 2])
def test_state_of_the_core(left, stream, streaming):
    """The core's store gives what the written-out reference gives."""
    model = small()
    encoder = model.encoder
    chunk, (features, other) = 4, utterances(150, 150)
    want = [stream(encoder, features, chunk, left), stream(encoder, other, chunk, left)]
    pages = [spec for spec in encoder.state_specs if isinstance(spec, PagedKV)]
    cache = build_cache_config(
        pages[0], CacheOptions(), chunk_size=chunk, num_left_chunks=left, max_streams=2, element_size=4
    )
    slots = [spec for spec in encoder.state_specs if isinstance(spec, Slot)]
    store = StreamStateStore(cache, slots, max_streams=2, dtype=torch.float32, device=torch.device("cpu"))
    store.allocate("a")
    store.allocate("b")
    parts, offset = [], 0
    windows = zip(*(streaming.windows(encoder, row, chunk) for row in (features, other)), strict=True)
    for pair in windows:
        width = encoder.chunk_geometry(chunk).window
        batch = torch.zeros(2, width, 80)
        batch[:, : len(pair[0])] = torch.stack(pair)
        count = encoder.output_frames(len(pair[0]))
        offsets, counts = np.full(2, offset), np.full(2, count)
        with torch.inference_mode():
            out = encoder.encode_chunk(
                ChunkBatch(
                    features=batch,
                    valid=torch.full((2,), len(pair[0])),
                    offsets=torch.from_numpy(offsets),
                    out_lengths=torch.from_numpy(counts),
                    state=store.cohort(["a", "b"], offsets, counts, chunk),
                    uniform=offset,
                )
            )
        parts.append(out.hidden[:, :count])
        offset += count
    same(list(torch.cat(parts, dim=1)), want)


def test_positions_end_cleanly(streaming):
    model = small(input_layer="linear", num_blocks=1)
    assert model.encoder.max_positions == 5000
    (features,) = utterances(5001)
    assert len(encode(model, [features[:5000]])[0]) == 5000
    for packed in (False, True):
        with pytest.raises(AudioTooLongError, match="5001 encoder frames"):
            encode(model, [features], packed=packed)
    state = streaming.stream(offset=4998)
    assert len(streaming.run_step(model.encoder, [state], [features[:2]], 4, 0)[0]) == 2
    with pytest.raises(AudioTooLongError):
        streaming.run_step(model.encoder, [state], [features[:1]], 4, 0)
    free = small(input_layer="linear", num_blocks=1, positions="no_pos")
    assert free.encoder.max_positions is None
    assert len(encode(free, [features])[0]) == 5001


def test_tables_grow_without_a_trace():
    model, fresh = small(input_layer="linear"), small(input_layer="linear")
    short, long = utterances(40, 1200)
    before = encode(model, [short])
    same(encode(model, [long]), encode(fresh, [long]))
    same(encode(model, [short]), before)


def test_bfloat16_is_near_float32():
    config = random_config(vocab_size=11, **SMALL)
    exact, rounded = random_model(config), random_model(config, dtype=torch.bfloat16)
    assert rounded.encoder.global_cmvn.mean.dtype == torch.float32
    rows = utterances(123, 90, 40)
    want = encode(exact, rows)
    for packed in (False, True):
        for got, expected in zip(encode(rounded, rows, poison=float("nan"), packed=packed), want, strict=True):
            assert got.dtype == torch.bfloat16
            assert torch.nn.functional.cosine_similarity(got.float(), expected, dim=-1).min() > 0.999
    log_probs = rounded.interfaces["ctc"].log_probs(want[0][None].bfloat16())
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(log_probs.shape[:2]), atol=1e-3, rtol=0)


def test_prepare_twice_and_shared_weights(load, variant):
    """Folding leaves the checkpoint's tensors as they were, so that a second model can be made of them."""
    _, bundle = load(variant)
    from oasr_conformer.model import ConformerModel

    before = {name: tensor.clone() for name, tensor in bundle.state_dict.items()}
    rows, outputs = utterances(60), []
    for _ in range(2):
        model = ConformerModel.from_config(bundle.config)
        wanted = model.state_dict()
        weights = {name: tensor for name, tensor in bundle.state_dict.items() if name in wanted}
        model.load_state_dict(weights, assign=True)
        model.prepare()
        model.prepare()
        outputs.append(encode(model, rows))
    for name, tensor in bundle.state_dict.items():
        assert torch.equal(tensor, before[name]), name
    same(*outputs)
