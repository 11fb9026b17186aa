"""Through the engine: words, times, n-best, aliases, and no more errors than prefix beam search makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import soundfile
import torch

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import ConfigError, RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_core.testing.invariance import assert_equal, run_offline, run_streaming

DATA = Path(__file__).parent / "data"
GRAPH = {"fst_path": str(DATA / "HLG.pt"), "words": str(DATA / "words.txt")}


def build(directory, **settings):
    return ASREngine(EngineConfig(ckpt_dir=str(directory), device="cpu", dtype="float32", **settings))


def transcripts(directory):
    lines = (directory / "test_wavs" / "text").read_text().splitlines()
    return dict(line.split("\t") for line in lines)


def waveforms(directory):
    return [
        torch.from_numpy(soundfile.read(directory / "test_wavs" / f"{name}.wav", dtype="float32")[0])
        for name in sorted(transcripts(directory))
        if (directory / "test_wavs" / f"{name}.wav").exists()
    ]


@pytest.fixture(scope="module")
def checkpoint(repo_root):
    return repo_root / "tests" / "data" / "icefall_digits"


@pytest.fixture(scope="module")
def engine(checkpoint):
    return build(checkpoint, decode_method="ctc_wfst", decode_options=GRAPH)


def errors(reference, hypothesis):
    """Word errors: Levenshtein distance."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]


@pytest.mark.slow
def test_no_more_word_errors_than_prefix_beam_search(shared_fixtures):
    directory = shared_fixtures / "icefall_digits"
    audio, expected = waveforms(directory), [text.split() for _, text in sorted(transcripts(directory).items())]
    assert len(audio) == len(expected) == 15
    counts = {}
    for method, options in (("ctc", {}), ("ctc_wfst", GRAPH)):
        engine = build(directory, decode_method=method, decode_options=options)
        for mode, run in (("offline", run_offline), ("streaming", _stream)):
            found = [each.output.text.split() for each in run(engine, audio)]
            counts[method, mode] = sum(map(errors, expected, found))
    assert counts["ctc_wfst", "offline"] <= counts["ctc", "offline"]
    assert counts["ctc_wfst", "streaming"] <= counts["ctc", "streaming"]
    assert counts["ctc_wfst", "offline"] == 0


def _stream(engine, audio):
    return run_streaming(engine, audio, lambda stream, piece: 3000, stagger=0)


def test_aliases_select_strategy_and_graph(checkpoint):
    engine = build(
        checkpoint, decoder_type="ctc_wfst", fst_path=GRAPH["fst_path"], wfst_decoder_config={"words": GRAPH["words"]}
    )
    assert engine.transcribe(waveforms(checkpoint)[3]) == "FOUR FIVE NINE"
    engine = build(
        checkpoint, decoder_type="ctc_wfst", fst_path=GRAPH["fst_path"], decode_options={"words": GRAPH["words"]}
    )
    assert engine.transcribe(waveforms(checkpoint)[3]) == "FOUR FIVE NINE"


def test_a_missing_graph_is_named(checkpoint):
    with pytest.raises(ConfigError, match="fst_path"):
        build(checkpoint, decode_method="ctc_wfst")


def test_words_times_and_alternatives(checkpoint):
    engine = build(checkpoint, decode_method="ctc_wfst", decode_options={**GRAPH, "output_beam": 20.0})
    options = DecodingOptions(word_timestamps=True, n_best=3)
    (output,) = engine.transcribe_outputs(waveforms(checkpoint)[3], decoding=options)
    assert output.text == "FOUR FIVE NINE"
    assert [word.word for word in output.words] == ["FOUR", "FIVE", "NINE"]
    assert all(word.start < word.end for word in output.words)
    assert [word.start for word in output.words] == output.timestamps == sorted(output.timestamps)
    assert len(output.nbest_texts) == 3
    assert output.nbest_texts[0] == output.text
    assert len(set(output.nbest_texts)) == 3


def test_hotwords_are_refused(engine, checkpoint):
    with pytest.raises(RequestRefusedError, match="hotwords"):
        engine.transcribe_outputs(waveforms(checkpoint)[0], decoding=DecodingOptions(hotwords=("NINE",)))


def test_company_changes_nothing(engine, checkpoint):
    audio = waveforms(checkpoint)
    assert_equal(run_offline(engine, audio), [run_offline(engine, [one])[0] for one in audio])
    assert_equal(_stream(engine, audio), [_stream(engine, [one])[0] for one in audio])
