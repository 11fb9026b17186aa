"""The fields of EngineConfig against the manual's tables: defaults, derived properties, aliases, what is not served."""

from __future__ import annotations

import pytest

from oasr_core.config import NOT_SERVED, EngineConfig
from oasr_core.errors import ConfigError
from oasr_core.frontend.options import FeatureConfig

#: The manual's defaults, typed from its tables. Fields with a default of ours (docs/decisions.md) follow in ``OURS``.
MANUAL = {
    "ckpt_dir": "",
    "checkpoint_name": None,
    "quantization": None,
    "audio_scale": 32768.0,
    "use_cuda_graphs": True,
    "streaming_graph_cache_growth": 1.5,
    "streaming_graph_batch_ladder": None,
    "streaming_graph_pad_batch": None,
    "streaming_graph_max_shapes": 512,
    "use_offline_cuda_graphs": True,
    "offline_graph_batch_buckets": None,
    "offline_graph_frame_granularity": 64,
    "offline_graph_max_frames": 4096,
    "offline_graph_max_captures": 64,
    "long_form": False,
    "recycle_streaming_history": False,
    "overlap_admit": False,
    "offline_decode_overlap": True,
    "gc_freeze": True,
    "decode_options": {},
    "decode_steps_per_tick": 32,
    "max_tick_ms": 25,
    "max_decode_slots": None,
    "decode_admit_window_ms": 0,
    "decode_kv_budget_gib": None,
    "chunk_size": 16,
    "num_left_chunks": -1,
    "max_batch_size": 32,
    "preferred_batch_size": None,
    "length_bucket_ratio": 0.0,
    "max_offline_pad_ratio": 4.0,
    "max_wait_time": 0.2,
    "schedule_policy": "window",
    "length_window_factor": 4,
    "streaming_cohort_admit": True,
    "max_num_blocks": None,
    "gpu_memory_utilization": 0.90,
    "block_size_frames": 16,
    "max_blocks_per_seq": 512,
    "use_paged_cache": True,
    "fst_path": None,
    "sentencepiece_model": None,
    "unit_table": None,
    "enable_sequence_packing": False,
    "max_packed_frames": 8192,
    "max_batch_frames": None,
    "offline_collate_prefetch": True,
    "feature_graph_batch_buckets": None,
    "max_pinned_audio_seconds": 300,
    "max_pinned_audio_total_seconds": 3600,
    "long_form_overlap_seconds": 1.0,
    "finalize_silence_pad": True,
    "partial_decode_interval": 1,
    "streaming_feature_lookahead": True,
    "overlap_partial_readback": False,
}
OURS = {
    "device": "auto",
    "dtype": "auto",
    "service_mode": "mixed",
    "decode_method": "ctc",
    "decoder_type": None,
    "ctc_decoder_config": None,
    "wfst_decoder_config": None,
    "feature_config": None,
    "partition_policy": "auto",
    "graph_backend": "auto",
    "architecture": None,
    "cpu_memory_utilization": 0.5,
    "segmenter": None,
    "output_transforms": [],
}
ANOTHER_VALUE = {
    "decode_admit_window_ms": 5.0,
    "quantization": "int8_w8a8",
    "preferred_batch_size": [8],
    "max_decode_slots": 4,
    "decode_kv_budget_gib": 1.0,
    "streaming_graph_batch_ladder": [4],
    "streaming_graph_pad_batch": True,
    "offline_graph_batch_buckets": [4],
    "feature_graph_batch_buckets": [4],
    "segmenter": "vad",
    "output_transforms": ["itn"],
}


@pytest.mark.parametrize("name", [*MANUAL, *OURS])
def test_default(name):
    assert getattr(EngineConfig(), name) == {**MANUAL, **OURS}[name]


def test_there_are_no_other_fields():
    assert set(EngineConfig.model_fields) == set(MANUAL) | set(OURS)


def test_feature_defaults():
    features = FeatureConfig()
    assert (features.num_mel_bins, features.sample_rate, features.dither) == (80, 16000, 0.0)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_when_set(name):
    default = getattr(EngineConfig(), name)
    value = ANOTHER_VALUE[name] if name in ANOTHER_VALUE else not default if default in (True, False) else default + 1
    with pytest.raises(ConfigError, match=rf"{name}=.*not served by this version"):
        EngineConfig(**{name: value})
    assert getattr(EngineConfig(**{name: default}), name) == default


@pytest.mark.parametrize(("chunk_size", "window", "stride"), [(16, 67, 64), (8, 35, 32), (1, 7, 4)])
def test_derived_window_and_stride(chunk_size, window, stride):
    config = EngineConfig(chunk_size=chunk_size)
    assert (config.subsampling_rate, config.right_context) == (4, 6)
    assert (config.decoding_window, config.stride) == (window, stride)


def test_derived_cache_size():
    assert EngineConfig(num_left_chunks=4).required_cache_size == 64
    assert EngineConfig().required_cache_size < 0


@pytest.mark.parametrize(("decoder_type", "method"), [("ctc_cuda", "ctc"), ("ctc_wfst", "ctc_wfst")])
def test_decoder_type_is_an_alias(decoder_type, method):
    assert EngineConfig(decoder_type=decoder_type).decode_method == method
    with pytest.raises(ConfigError, match="contradicts"):
        EngineConfig(decoder_type=decoder_type, decode_method="transducer")
    with pytest.raises(ConfigError, match="allowed: ctc_cuda, ctc_wfst"):
        EngineConfig(decoder_type="ctc_gpu")


def test_decoder_configs_become_decode_options():
    ctc = EngineConfig(ctc_decoder_config={"beam_size": 10, "blank_threshold": 0.95}, decode_options={"beam_size": 4})
    assert ctc.decode_options == {"beam_size": 4, "blank_threshold": 0.95}
    wfst = EngineConfig(decoder_type="ctc_wfst", fst_path="HLG.pt", wfst_decoder_config={"search_beam": 20.0})
    assert wfst.decode_options == {"search_beam": 20.0, "fst_path": "HLG.pt"}
    with pytest.raises(ConfigError, match="fst_path is read by decode_method='ctc_wfst' only"):
        EngineConfig(fst_path="HLG.pt")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("fp16", "float16"), ("torch.bfloat16", "bfloat16"), ("float32", "float32"), ("auto", "auto")],
)
def test_dtype_spellings(given, dtype):
    assert EngineConfig(dtype=given).dtype == dtype


def test_unknown_keys_name_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown option 'max_batchsize'.*'max_batch_size'"):
        EngineConfig(max_batchsize=8)
