"""`oasr transcribe` on the icefall digits checkpoint: both decode methods, both modes, icefall's error rates."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from oasr_core.cli.transcribe import app
from oasr_core.metrics import ErrorCounts, count_errors

OFFLINE, STREAMING = ["--mode", "offline"], ["--mode", "streaming", "--chunk-size"]
CTC = ["--decode-method", "ctc", "--decode-option", "search=greedy"]
TRANSDUCER = ["--decode-method", "transducer"]
BEAM = ["--decode-option", "search=beam", "--decode-option", "beam_size=4"]
CASES = {
    "ctc": ([*OFFLINE, *CTC], 0),
    "transducer": ([*OFFLINE, *TRANSDUCER], 1),
    "transducer beam 4": ([*OFFLINE, *TRANSDUCER, *BEAM], 0),
    "streaming ctc, chunk 16": ([*STREAMING, "8", *CTC], 2),
    "streaming ctc, chunk 32": ([*STREAMING, "16", *CTC], 1),
    "streaming transducer, chunk 16": ([*STREAMING, "8", *TRANSDUCER], 0),
    "streaming transducer, chunk 32": ([*STREAMING, "16", *TRANSDUCER], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_error_counts_are_icefalls(shared_fixtures, case):
    """icefall's chunk sizes count frames of the front-end, ours encoder frames: half as many."""
    model = shared_fixtures / "icefall_digits"
    options, errors = CASES[case]
    wavs = sorted((model / "test_wavs").glob("*.wav"))
    assert len(wavs) == 15
    lines = (model / "test_wavs" / "text").read_text().splitlines()
    reference = {line.split()[0]: line.split()[1:] for line in lines}
    arguments = [*map(str, wavs), "--model", str(model), "--device", "cpu", "--dtype", "float32", "--format", "jsonl"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    texts = {json.loads(line)["file"].split("/")[-1]: json.loads(line)["text"] for line in result.stdout.splitlines()}
    counts = ErrorCounts()
    for wav in wavs:
        counts += count_errors(reference[wav.stem], texts[wav.name].split())
    assert counts.reference == 85
    assert counts.errors == errors
