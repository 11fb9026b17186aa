"""EngineConfig: composition, validation, aliases, origins, and fields that are not served yet."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from oasr_core.cache.options import CacheOptions
from oasr_core.config import COMPONENTS, NOT_SERVED, EngineConfig, owner_of, resolve_config
from oasr_core.errors import ConfigError, OasrError
from oasr_core.frontend.options import FeatureConfig

SEED_DEFAULTS = {
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
    "feature_graph_batch_buckets": None,
    "long_form": False,
    "long_form_overlap_seconds": 1.0,
    "recycle_streaming_history": False,
    "overlap_admit": False,
    "offline_decode_overlap": True,
    "offline_collate_prefetch": True,
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
    "enable_sequence_packing": False,
    "max_packed_frames": 8192,
    "max_batch_frames": None,
    "max_num_blocks": None,
    "gpu_memory_utilization": 0.90,
    "block_size_frames": 16,
    "max_blocks_per_seq": 512,
    "use_paged_cache": True,
    "feature_config": None,
    "fst_path": None,
    "sentencepiece_model": None,
    "unit_table": None,
    "max_pinned_audio_seconds": 300,
    "max_pinned_audio_total_seconds": 3600,
    "finalize_silence_pad": True,
    "partial_decode_interval": 1,
    "streaming_feature_lookahead": True,
    "overlap_partial_readback": False,
    "architecture": None,
    # where the issue says otherwise than the manual
    "device": "auto",
    "dtype": "auto",
    "service_mode": "mixed",
    "decode_method": "ctc",
    "partition_policy": "auto",
    "graph_backend": "auto",
}


@pytest.mark.parametrize("name", sorted(SEED_DEFAULTS))
def test_default(name):
    assert getattr(EngineConfig(), name) == SEED_DEFAULTS[name]


def test_derived_properties():
    config = EngineConfig(num_left_chunks=4)
    assert (config.subsampling_rate, config.right_context) == (4, 6)
    assert (config.decoding_window, config.stride) == (67, 64)
    assert config.required_cache_size == 64


def test_every_field_belongs_to_one_component():
    names = [name for component in COMPONENTS for name in component.model_fields]
    assert sorted(names) == sorted(EngineConfig.model_fields)
    assert owner_of("max_num_blocks") is CacheOptions
    assert all(field.description for field in EngineConfig.model_fields.values())


def test_unknown_keys_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown option 'chunksize'\. Did you mean 'chunk_size'") as caught:
        EngineConfig(chunksize=3)
    assert isinstance(caught.value, OasrError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"num_left_chunks": -2}, "num_left_chunks"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"service_mode": "both"}, "service_mode"),
        ({"max_batch_size": "many"}, "max_batch_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"preferred_batch_size": []}, "at least one size"),
        ({"decoder_type": "ctc_cpu"}, "decoder_type='ctc_cpu' is unknown; allowed: ctc_cuda, ctc_wfst"),
        ({"decoder_type": "ctc_wfst", "decode_method": "ctc"}, "contradicts"),
        ({"fst_path": "a.img"}, "fst_path is read by decode_method='ctc_wfst' only"),
        (
            {"ctc_decoder_config": {}, "decode_method": "ctc_wfst"},
            "ctc_decoder_config is read by the other CTC methods",
        ),
        ({"wfst_decoder_config": {}, "decode_method": "ctc"}, "wfst_decoder_config is read by"),
        ({"preferred_batch_size": [64]}, "cannot be reached with max_batch_size=32"),
        ({"enable_sequence_packing": True, "partition_policy": "count"}, "contradicts partition_policy='count'"),
        ({"feature_config": {"num_mels": 80}}, "feature_config.num_mels"),
    ],
)
def test_refusals_name_the_field(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


UNSERVED_VALUES = {
    "quantization": "int8_w8a8",
    "streaming_graph_batch_ladder": [1],
    "streaming_graph_pad_batch": True,
    "offline_graph_batch_buckets": [1],
    "feature_graph_batch_buckets": [1],
    "segmenter": "vad",
    "output_transforms": ["itn"],
}


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_what_is_not_served_says_so(name):
    default = EngineConfig.model_fields[name].get_default(call_default_factory=True)
    value = UNSERVED_VALUES.get(name, (not default) if isinstance(default, bool) else (default or 0) + 3)
    with pytest.raises(ConfigError, match=f"{name}=.* is not served by this version yet"):
        EngineConfig(**{name: value})
    EngineConfig(**{name: default})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.float16, "float16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        (torch.bfloat16, "bfloat16"),
        ("auto", "auto"),
    ],
)
def test_dtype_spellings(given, name):
    assert EngineConfig(dtype=given).dtype == name


def test_device_objects():
    assert EngineConfig(device=torch.device("cpu")).device == "cpu"


def test_decoder_aliases():
    config = EngineConfig(
        decoder_type="ctc_cuda", ctc_decoder_config={"search": "greedy"}, decode_options={"blank_id": 0}
    )
    assert config.decode_method == "ctc"
    assert config.decode_options == {"search": "greedy", "blank_id": 0}
    rescoring = EngineConfig(decode_method="ctc_aed_rescoring", ctc_decoder_config={"beam_size": 3})
    assert rescoring.decode_options == {"beam_size": 3}
    assert "decode_method" in EngineConfig(ctc_decoder_config={"beam_size": 3}).model_fields_set
    wfst = EngineConfig(decoder_type="ctc_wfst", fst_path="HLG.pt", wfst_decoder_config={"search_beam": 15})
    assert wfst.decode_method == "ctc_wfst"
    assert wfst.decode_options == {"search_beam": 15, "fst_path": "HLG.pt"}


def test_feature_config_may_be_a_mapping():
    assert EngineConfig(feature_config={"num_mel_bins": 40}).feature_config == FeatureConfig(num_mel_bins=40)


def test_sources_are_ranked_and_told():
    config, origins = resolve_config(
        file={"chunk_size": 8, "max_batch_size": 4},
        flags={"max_batch_size": 2},
        checkpoint={"chunk_size": 32, "audio_scale": 1.0},
    )
    assert (config.chunk_size, config.max_batch_size, config.audio_scale) == (8, 2, 1.0)
    assert (origins["chunk_size"], origins["max_batch_size"]) == ("file", "flag")
    assert (origins["audio_scale"], origins["max_wait_time"]) == ("checkpoint", "default")
    assert resolve_config(flags={"decoder_type": "ctc_cuda"})[1]["decode_method"] == "flag"


def test_options_keep_what_was_set_explicitly():
    options = EngineConfig(max_num_blocks=7).options(CacheOptions)
    assert options.max_num_blocks == 7
    assert options.model_fields_set == {"max_num_blocks"}


def test_configuration_is_frozen_and_replaceable():
    config = EngineConfig(chunk_size=8)
    assert config.replace(max_batch_size=2).model_fields_set == {"chunk_size", "max_batch_size"}
    with pytest.raises(ValueError, match="frozen"):
        config.chunk_size = 4


def test_configuration_imports_no_torch():
    code = "import sys, oasr_core.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
