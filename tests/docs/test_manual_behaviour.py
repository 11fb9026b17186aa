"""Behaviours that the manual states and that no component's own tests show: what the parts do together."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from oasr_core import model_runner
from oasr_core.config import EngineConfig
from oasr_core.decoding.base import DecodeStrategy
from oasr_core.engine import ASREngine
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.frontend.options import FeatureConfig
from oasr_core.model_runner import ModelRunner
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions
from oasr_core.testing import markers
from oasr_core.testing.markers import MarkerEncoder, MarkerFrontend, marker_audio, spell

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1]


@pytest.fixture(scope="module")
def marker_dir(tmp_path_factory) -> Iterator[str]:
    with markers.registered():
        yield str(markers.write_marker_bundle(tmp_path_factory.mktemp("marker") / "bundle"))


@pytest.fixture
def make_engine(marker_dir) -> Iterator[Callable[..., ASREngine]]:
    engines: list[ASREngine] = []

    def make(**settings) -> ASREngine:
        values = {"ckpt_dir": marker_dir, "device": "cpu", "dtype": "float32", "max_batch_size": 4, "gc_freeze": False}
        engines.append(ASREngine(EngineConfig(**{**values, **settings})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def record(monkeypatch, target, name, log, note):
    """Write ``note(...)`` into ``log`` at each call of ``target.name``."""
    original = getattr(target, name)

    def recorded(*args, **kwargs):
        log.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, recorded)


def test_micro_batches_of_one_step_run_one_after_another(make_engine, monkeypatch):
    engine = make_engine(partition_policy="frames", max_batch_frames=80, schedule_policy="fcfs", max_wait_time=0.0)
    shapes = []
    record(monkeypatch, engine._parts.runner, "forward_offline", shapes, lambda features, lengths, **_: list(lengths))
    ids = [engine.add_request(marker_audio(TOKENS[:n]), streaming=False) for n in (16, 4, 15)]
    outputs = engine.step()
    assert len(shapes) == 3
    assert sorted(length for lengths in shapes for length in lengths) == sorted(4 * n + 3 for n in (16, 4, 15))
    assert [output.request_id for output in outputs] == ids


def test_admission_of_a_stream_computes_no_features(make_engine, monkeypatch):
    engine = make_engine()
    calls = []
    record(monkeypatch, MarkerFrontend, "compute_frames", calls, lambda self, frames: len(frames))
    engine.add_request(marker_audio(TOKENS), streaming=True)
    assert calls == []
    engine.step()
    assert sum(calls) > 0


@pytest.mark.parametrize("piece", [320, 640, 2560, 10**6])
def test_a_step_takes_one_stride_however_the_audio_arrived(make_engine, monkeypatch, piece):
    engine = make_engine()
    assert engine.stride_samples == 4 * 4 * 160
    taken = []
    record(monkeypatch, MarkerFrontend, "compute_frames", taken, lambda self, frames: len(frames))
    audio = marker_audio(TOKENS)
    stream = engine.add_streaming_request()
    for start in range(0, len(audio), piece):
        engine.feed_chunk(stream, audio[start : start + piece], is_last=start + piece >= len(audio))
    finals = []
    while not finals:
        finals = [output for output in engine.step() if output.finished]
    assert taken == [19, 16, 16, 16]  # the first window, then one stride of frames a step
    assert finals[0].text == spell(TOKENS)


def test_a_step_does_offline_work_before_streams_and_features_before_the_forward(make_engine, monkeypatch):
    engine = make_engine()
    log = []
    record(monkeypatch, engine._parts.streaming, "open", log, lambda request: "allocate")
    record(monkeypatch, engine._parts.offline, "run", log, lambda batch: "offline")
    record(monkeypatch, engine._inputs, "extract_streaming_batch", log, lambda streams: "features")
    record(monkeypatch, engine._parts.runner, "forward_streaming", log, lambda chunks: "forward")
    engine.add_request(marker_audio(TOKENS), streaming=True)
    engine.add_request(marker_audio(TOKENS), streaming=False)
    engine.step()
    assert log == ["allocate", "offline", "features", "forward"]


def test_the_final_comes_in_the_step_of_the_last_forward(make_engine, monkeypatch):
    engine = make_engine()
    forwards = []
    record(monkeypatch, engine._parts.runner, "forward_streaming", forwards, len)
    engine.add_request(marker_audio(TOKENS[:4]), streaming=True)
    (final,) = engine.step()
    assert final.finished
    assert forwards == [1]


def test_streams_of_different_age_share_one_forward(make_engine, monkeypatch):
    engine = make_engine()
    cohorts = []
    record(monkeypatch, engine._parts.runner, "forward_streaming", cohorts, lambda chunks: [c.offset for c in chunks])
    for _ in range(3):
        engine.add_request(marker_audio(TOKENS), streaming=True)
        engine.step()
    assert cohorts == [[0], [4, 0], [8, 4, 0]]


def test_the_last_window_is_part_of_the_cohort(make_engine, monkeypatch):
    engine = make_engine()
    cohorts = []
    record(monkeypatch, engine._parts.runner, "forward_streaming", cohorts, len)
    ids = [engine.add_request(marker_audio(TOKENS[:n]), streaming=True) for n in (16, 14, 13)]
    finals = {output.request_id: output.text for output in engine.run()}
    assert [finals[i] for i in ids] == [spell(TOKENS[:n]) for n in (16, 14, 13)]
    assert cohorts == [3, 3, 3, 3]


def test_blocks_of_a_cohort_are_taken_in_one_call(make_engine, monkeypatch):
    engine = make_engine()
    pool = engine._parts.runner.backend.store.attention.pool
    calls = []
    record(monkeypatch, pool, "allocate", calls, len)
    for _ in range(3):
        engine.add_request(marker_audio(TOKENS), streaming=True)
    engine.step()
    assert calls == [3]


def test_freeing_a_stream_touches_its_own_blocks_only(make_engine, monkeypatch):
    engine = make_engine(max_num_blocks=40_000)
    freed = []
    record(monkeypatch, engine._parts.runner.backend.store.attention.pool, "free", freed, lambda blocks: len(blocks))
    engine.add_request(marker_audio(TOKENS), streaming=True)
    engine.run()
    assert freed == [4]


def test_an_offline_engine_builds_no_backend_and_no_pool(make_engine):
    engine = make_engine(service_mode="offline", max_num_blocks=1)  # without effect here; too few for four streams
    assert engine._parts.runner.backend is None
    with pytest.raises(ConfigError, match="not one block a stream"):
        make_engine(max_num_blocks=1)


def test_nothing_is_measured_when_the_capacity_is_given(make_engine, caplog):
    with caplog.at_level(logging.INFO, logger="oasr_core"):
        make_engine(max_num_blocks=40)
    assert "utilization" not in caplog.text
    with caplog.at_level(logging.INFO, logger="oasr_core"):
        make_engine()
    assert "cpu_memory_utilization=0.50 -> available=" in caplog.text


@pytest.mark.parametrize(("mode", "frames"), [("mixed", 3000), ("streaming", 19)])
def test_the_probe_is_the_widest_forward(make_engine, monkeypatch, caplog, mode, frames):
    """The figures of CUDA are made up; which forward is measured, and what follows from it, is not."""
    mib = 2**20
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * mib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700 * mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7168 * mib, 8192 * mib))
    monkeypatch.setattr(ModelRunner, "_available_bytes", ModelRunner._probe_cuda)
    probes = []
    record(
        monkeypatch, ModelRunner, "forward_offline", probes, lambda self, features, lengths: (features.shape, lengths)
    )
    with caplog.at_level(logging.INFO, logger="oasr_core"):
        make_engine(service_mode=mode)
    assert [(shape[:2], lengths) for shape, lengths in probes] == [((4, frames), [frames] * 4)]
    assert "total=8192 MiB resident=1024 MiB cap=0.90 activation_reserve=900 MiB -> available=5448 MiB" in caplog.text


def test_the_log_says_what_limits_the_pool(make_engine, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="oasr_core"):
        engine = make_engine(max_blocks_per_seq=8)
    assert "the pool is limited by max_blocks_per_seq, each stream by 32 frames" in caplog.text
    assert "limited by memory" not in caplog.text
    block = engine._parts.runner.backend.store.attention.config.bytes_per_block
    monkeypatch.setattr(model_runner, "available_on_cpu", lambda options: 4 * 5 * block)
    with caplog.at_level(logging.INFO, logger="oasr_core"):
        make_engine(max_blocks_per_seq=8)
    assert "the pool is limited by memory, each stream by 20 frames" in caplog.text


def test_the_manuals_ctc_settings_reach_the_search(make_engine):
    engine = make_engine(decoder_type="ctc_cuda", ctc_decoder_config={"beam_size": 10, "blank_threshold": 0.95})
    assert engine.config.decode_method == "ctc"
    options = engine._parts.strategy.context.options
    assert (options.search, options.beam_size, options.blank_threshold) == ("beam", 10, 0.95)
    assert engine.transcribe(marker_audio(TOKENS)) == spell(TOKENS)
    with pytest.raises(ConfigError, match="unknown option 'beam'"):
        make_engine(decoder_type="ctc_cuda", ctc_decoder_config={"beam": 10})


def test_the_manuals_request_options_are_honoured_or_refused_by_name(make_engine):
    engine = make_engine()
    audio = marker_audio(TOKENS)
    (output,) = engine.transcribe_outputs([audio], streaming=False, decoding=DecodingOptions(n_best=3))
    assert len(output.nbest_texts) == len(output.tokens) == len(output.scores) == 3
    assert output.nbest_texts[0] == output.text == spell(TOKENS)
    with pytest.raises(RequestRefusedError, match=r"'ctc' does not honour max_new_tokens=64"):
        engine.add_request(audio, decoding=DecodingOptions(n_best=3, max_new_tokens=64))


def test_a_chunk_size_that_an_encoder_refuses_fails_at_construction(make_engine, monkeypatch):
    asked = []

    def refuse(self, chunk_size):
        asked.append(chunk_size)
        raise ConfigError(f"chunk_size={chunk_size}: trained for 8")

    monkeypatch.setattr(MarkerEncoder, "chunk_geometry", refuse)
    with pytest.raises(ConfigError, match="chunk_size=5: trained for 8"):
        make_engine(chunk_size=5)
    assert asked == [5]


def test_windows_are_the_encoders_own(make_engine, monkeypatch):
    from dataclasses import replace

    original = MarkerEncoder.chunk_geometry
    monkeypatch.setattr(
        MarkerEncoder, "chunk_geometry", lambda self, chunk_size: replace(original(self, chunk_size), first_window=35)
    )
    engine = make_engine()
    widths = []
    record(
        monkeypatch,
        engine._parts.runner,
        "forward_streaming",
        widths,
        lambda chunks: [chunk.features.shape[0] for chunk in chunks],
    )
    engine.add_request(marker_audio(TOKENS), streaming=True)
    engine.step()
    engine.step()
    assert widths[0] == [35]


def test_a_method_whose_interface_the_model_lacks_names_it(make_engine):
    class Needy(DecodeStrategy):
        oasr_api = "1.0"
        requires = ("ctc", "transducer")

        def decode_offline(self, out, options):
            raise NotImplementedError

    with (
        registry("decode_strategies").override("needy", Needy),
        pytest.raises(ConfigError, match=r"requires the interface transducer, which MarkerModel .* offers: ctc"),
    ):
        make_engine(decode_method="needy")


def test_an_explicit_feature_config_wins_with_a_warning(wenet_digits, caplog):
    settings = {"ckpt_dir": str(wenet_digits), "device": "cpu", "dtype": "float32", "gc_freeze": False}
    with caplog.at_level(logging.WARNING, logger="oasr_core"), ASREngine(EngineConfig(**settings)) as trained:
        assert "feature_config" not in caplog.text
        assert trained._inputs.frontend.options.low_freq == 20.0
    changed = FeatureConfig(low_freq=60.0)
    with caplog.at_level(logging.WARNING, logger="oasr_core"):
        engine = ASREngine(EngineConfig(**settings, feature_config=changed))
    assert engine._inputs.frontend.options.low_freq == 60.0
    assert "low_freq: trained 20.0, set 60.0" in caplog.text
    engine.close()


def test_an_explicit_audio_scale_outranks_the_checkpoints(marker_dir, make_engine):
    assert make_engine()._inputs.frontend.audio_scale == 1.0
    engine = make_engine(audio_scale=2.0)
    assert engine._inputs.frontend.audio_scale == 2.0


def test_public_calls_of_other_threads_wait_for_the_step(make_engine, monkeypatch):
    engine = make_engine()
    inside, go_on, fed = threading.Event(), threading.Event(), threading.Event()
    stream = engine.add_streaming_request()
    engine.add_request(marker_audio(TOKENS), streaming=False)
    record(monkeypatch, engine._parts.offline, "run", [], lambda batch: (inside.set(), go_on.wait(10)))
    stepping = threading.Thread(target=engine.step)
    feeding = threading.Thread(target=lambda: (engine.feed_chunk(stream, marker_audio(TOKENS), True), fed.set()))
    stepping.start()
    assert inside.wait(10)
    feeding.start()
    assert not fed.wait(0.05)
    go_on.set()
    for thread in (stepping, feeding):
        thread.join(10)
    assert fed.is_set()
    assert [output.text for output in engine.run()] == [spell(TOKENS)]


def test_feature_defaults():
    features = FeatureConfig()
    assert (features.num_mel_bins, features.sample_rate, features.dither) == (80, 16000, 0.0)


def test_defaults_of_fields_that_the_manual_lacks():
    config = EngineConfig()
    assert (config.cpu_memory_utilization, config.segmenter, config.output_transforms) == (0.5, None, [])
    assert config.hold_unstable_partials is False
    assert (config.long_form_mode, config.condition_on_previous_text) == ("parallel", True)
    assert (config.segmenter_options, config.frontend_options) == ({}, {})
    assert (config.silence_gate, config.endpoint_silence) == ("auto", "decoder")
    assert (config.decoder_type, config.ctc_decoder_config, config.wfst_decoder_config) == (None, None, None)


def test_features_are_deterministic(wenet_digits):
    frontend = registry("frontends").get("fbank").from_options({}, 32768.0)
    audio = torch.sin(torch.arange(16000) * 0.05)[None]
    first, _ = frontend.extract(audio, torch.tensor([16000]))
    second, _ = frontend.extract(audio, torch.tensor([16000]))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("n_best", 0, 30),
        ("max_new_tokens", 0, 448),
        ("temperature", -0.1, 100.0),
        ("temperature", 100.5, 0.0),
        ("top_k", -1, 0),
        ("top_p", 0.0, 1.0),
        ("top_p", 1.1, 0.5),
    ],
)
def test_request_options_have_ranges(name, wrong, right):
    assert getattr(DecodingOptions(**{name: right}), name) == right
    with pytest.raises(RequestRefusedError, match=name):
        DecodingOptions(**{name: wrong})


def test_an_unknown_request_option_is_refused():
    with pytest.raises(RequestRefusedError, match="beam"):
        DecodingOptions(beam=3)


def test_parts_know_neither_the_engine_nor_each_others_business(repo_root):
    """The engine joins the parts; no part imports it, and the scheduler sees no tensor."""
    core = repo_root / "oasr_core"
    parts = {
        "frontend/input.py": {"engine", "scheduling", "executors", "model_runner", "outputs"},
        "scheduling/scheduler.py": {"engine", "frontend", "executors", "model_runner", "outputs", "torch"},
        "model_runner.py": {"engine", "executors", "scheduling", "outputs"},
        "outputs.py": {"engine", "executors", "scheduling", "model_runner"},
        "executors/offline.py": {"engine"},
        "executors/streaming.py": {"engine"},
    }
    for name, forbidden in parts.items():
        assert not imports_of(core / name) & forbidden, name


def imports_of(path: Path) -> set[str]:
    """First component below ``oasr_core`` (or the top-level name) of everything that a module imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.removeprefix("oasr_core.").split(".")[0] for name in names}


def test_an_engine_touches_a_model_through_the_base_classes_only(make_engine, monkeypatch):
    """A model that has only what the contract declares is served in both modes; anything else would be missing."""
    engine = make_engine()
    allowed = {"encoder", "interfaces", "vocab_size", "prepare", "from_config", "architecture", "expected_unused"}
    own = {name for name in vars(type(engine._parts.runner.model)) if not name.startswith("_")}
    assert own - {"oasr_api"} <= allowed
    audio = marker_audio(TOKENS)
    assert engine.transcribe(audio, streaming=False) == engine.transcribe(audio, streaming=True) == spell(TOKENS)


def test_a_wenet_directory_brings_its_units_and_its_sentencepiece_model(wenet_digits):
    settings = {"ckpt_dir": str(wenet_digits), "device": "cpu", "dtype": "float32", "gc_freeze": False}
    with ASREngine(EngineConfig(**settings)) as engine:
        files = engine._parts.bundle.tokenizer.files
        assert {role: path.name for role, path in files.items()} == {
            "symbols": "units.txt",
            "sentencepiece": "train.bpe.model",
        }
        assert engine.transcribe(wenet_digits / "test_wavs" / "utt07_3d.wav", streaming=False) == "SIX THREE THREE"


def test_an_explicit_unit_table_replaces_the_checkpoints(make_engine, tmp_path):
    table = tmp_path / "units.txt"
    table.write_text("<blank> 0\n" + "".join(f"{chr(64 + n)} {n}\n" for n in range(1, markers.VOCAB)))
    engine = make_engine(unit_table=str(table))
    assert engine.transcribe(marker_audio(TOKENS), streaming=False) == spell(TOKENS).upper()
