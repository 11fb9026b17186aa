"""What has to hold on a GPU, in one command: parity with the CPU, invariance, cache discipline, then speed.

    python benchmarks/gpu_check.py [--device cuda] [--streams 32]

Runs on the trained digits checkpoint of tests/data, on a Conformer of real size with random weights, and on decoding
graphs (on CUDA only). Every check prints ``ok`` or what differs; the exit code counts the failures. ``--device cpu``
checks the script itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import torch
from engine import SECONDS, write_bundle

from oasr_core import ASREngine, DecodingOptions, EngineConfig
from oasr_core.testing.invariance import assert_equal, run_offline, run_streaming

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "tests" / "data" / "wenet_digits"
WFST_DATA = ROOT / "plugins" / "oasr-wfst" / "tests" / "data"


def clips() -> list[torch.Tensor]:
    """The twenty recordings, 16 kHz mono."""
    waveforms = []
    for path in sorted((DIGITS / "test_wavs").glob("*.wav")):
        with wave.open(str(path)) as file:
            data = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        waveforms.append(torch.from_numpy(data.astype(np.float32) / 32768))
    return waveforms


class Checks:
    """Runs checks and counts what fails."""

    def __init__(self) -> None:
        self.failed = 0

    def run(self, name: str, check) -> None:
        try:
            note = check() or ""
        except Exception as error:
            self.failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok      {name} {note}", flush=True)


def correctness(device: str, checks: Checks) -> None:
    """Parity of the device with the CPU, and invariance on the device, fp32 and bf16."""
    waves = clips()

    def engine(where: str, dtype: str = "float32", **settings) -> ASREngine:
        return ASREngine(EngineConfig(ckpt_dir=DIGITS, device=where, dtype=dtype, **settings))

    with engine("cpu") as host:
        offline = run_offline(host, waves)
        streamed = run_streaming(host, waves, lambda *_: 9000)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for batch in (1, 8, 32):
        with engine(device, max_batch_size=batch) as built:
            name = f"fp32, batch {batch}"
            checks.run(f"{name}, offline", lambda e=built: assert_equal(run_offline(e, waves), offline, tolerance=2e-4))
            checks.run(
                f"{name}, streaming",
                lambda e=built: assert_equal(
                    run_streaming(e, waves, lambda *_: 9000, stagger=1), streamed, tolerance=2e-4
                ),
            )
            checks.run(f"{name}, all state returned", lambda e=built: _returned(e))
    for settings in ({"use_paged_cache": False}, {"enable_sequence_packing": True}, {"num_left_chunks": 4}):
        with engine(device, **settings) as built, engine("cpu", **settings) as host:
            checks.run(f"fp32, {settings}", lambda e=built, h=host: _same_as_host(e, h, waves))
    with engine(device) as built, engine("cpu") as host:
        words = DecodingOptions(word_timestamps=True, n_best=3)
        for streaming in (False, True):
            got = built.transcribe_outputs(waves, streaming=streaming, decoding=words)
            want = host.transcribe_outputs(waves, streaming=streaming, decoding=words)
            checks.run(f"n-best and words, streaming={streaming}", lambda g=got, w=want: _same_words(g, w))
    for streaming in (False, True):
        with engine(device, "bfloat16") as built:
            texts = built.transcribe(waves, streaming=streaming)
        want = [o.output.text for o in (streamed if streaming else offline)]
        differing = sum(a != b for a, b in zip(texts, want, strict=True))
        checks.run(
            f"bf16, streaming={streaming}", lambda n=differing: f"{n} of {len(waves)} transcripts differ from fp32"
        )


def graph_search(device: str, checks: Checks) -> None:
    """The search of graphs on the device against that on the CPU: digits, and a large graph with epsilon arcs."""
    from oasr_wfst.beam import BeamRules
    from oasr_wfst.load import load_graph

    generator = np.random.default_rng(0)
    digits = load_graph(WFST_DATA / "HLG.pt", words=WFST_DATA / "words.txt")
    for name, graph in (("digits", digits), ("large", random_graph(generator, 200_000, 500))):
        rows = [random_log_probs(generator, frames, graph.num_columns) for frames in range(40, 200, 10)]
        for rules in (BeamRules(), BeamRules(8.0, 200, 1000), BeamRules(30.0, 0, 50_000)):
            for whole in (True, False):
                checks.run(
                    f"graph {name}, {rules}, whole={whole}",
                    lambda g=graph, r=rows, b=rules, w=whole: _same_search(g, r, b, w, device),
                )


def random_graph(generator: np.random.Generator, states: int, columns: int):
    """Four arcs a state, one in ten of them epsilon, and many final states."""
    from oasr_wfst.graph import EPSILON, FINAL, sorted_graph

    count = 4 * (states - 1)
    source = np.repeat(np.arange(states - 1), 4)
    dest = generator.integers(0, states - 1, count).astype(np.int32)
    label = generator.integers(0, columns, count).astype(np.int32)
    label[generator.random(count) < 0.1] = EPSILON
    final = generator.random(count) < 0.05
    dest[final], label[final] = states - 1, FINAL
    score = -generator.exponential(2.0, count).astype(np.float32)
    word_counts = (generator.random(count) < 0.2).astype(np.int64)
    words = generator.integers(1, 1000, int(word_counts.sum())).astype(np.int32)
    return sorted_graph(source, dest, label, score, word_counts, words, states)


def random_log_probs(generator: np.random.Generator, frames: int, columns: int) -> np.ndarray:
    """Log posteriors ``(frames, columns)`` in which some labels stand out."""
    rows = torch.from_numpy(generator.normal(size=(frames, columns)) * 3)
    return torch.log_softmax(rows, dim=1).to(torch.float32).numpy()


def _same_search(graph, rows, rules, whole: bool, device: str) -> str:
    from oasr_wfst.decoder import Decoder
    from oasr_wfst.triton_search import TritonDecoder

    results, took = [], []
    for decoder in (TritonDecoder(graph, rules, device=torch.device(device)), Decoder(graph, rules)):
        decoder.warm_up()
        begun = time.perf_counter()
        channels, traces = [decoder.open() for _ in rows], []
        decoder.advance(channels, rows, whole=whole, traces=traces)
        results.append((traces, [decoder.final(channel) for channel in channels]))
        took.append(time.perf_counter() - begun)
    (traces, paths), (host_traces, host_paths) = results
    for lane, (trace, host_trace) in enumerate(zip(traces, host_traces, strict=True)):
        if not np.array_equal(trace, host_trace):
            frame = int(np.flatnonzero((trace != host_trace).any(axis=1))[0])
            raise AssertionError(f"lane {lane}, frame {frame}: {trace[frame]} instead of {host_trace[frame]}")
    if paths != host_paths:
        raise AssertionError(f"{paths} instead of {host_paths}")
    return f"{took[0]:.3f} s, CPU {took[1]:.3f} s"


def _same_as_host(built: ASREngine, host: ASREngine, waves: list[torch.Tensor]) -> None:
    assert_equal(run_offline(built, waves), run_offline(host, waves), tolerance=2e-4)
    got, want = (run_streaming(engine, waves, lambda *_: 9000) for engine in (built, host))
    assert_equal(got, want, tolerance=2e-4)


def _returned(engine: ASREngine) -> None:
    store = engine._parts.runner.backend.store
    if store.num_streams or store.free_blocks != store.attention.config.num_blocks:
        raise AssertionError(f"{store.num_streams} streams, {store.free_blocks} free blocks")


def _same_words(got, want) -> None:
    for mine, reference in zip(got, want, strict=True):
        if mine.nbest_texts != reference.nbest_texts:
            raise AssertionError(f"{mine.nbest_texts} instead of {reference.nbest_texts}")
        times = [[(w.word, w.start, w.end) for w in output.words] for output in (mine, reference)]
        if times[0] != times[1]:
            raise AssertionError(f"{times[0]} instead of {times[1]}")


def speed(device: str, streams: int) -> None:
    """RTFx of the whole engine on a network of real size."""
    noise = [0.05 * torch.randn(SECONDS * 16000, generator=torch.Generator().manual_seed(i)) for i in range(streams)]
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder) / "bundle")
        for dtype in ("bfloat16", "float32"):
            config = EngineConfig(ckpt_dir=Path(folder) / "bundle", device=device, dtype=dtype, max_batch_size=streams)
            with ASREngine(config) as built:
                for streaming in (False, True):
                    built.transcribe_outputs(noise, streaming=streaming)
                    begun = time.perf_counter()
                    built.transcribe_outputs(noise, streaming=streaming)
                    took = time.perf_counter() - begun
                    mode = "streaming" if streaming else "offline"
                    print(f"speed   {dtype}, {mode}, {streams} x {SECONDS} s: RTFx {streams * SECONDS / took:.0f}")


def main() -> None:
    """Checks, then speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--skip-speed", action="store_true")
    options = parser.parse_args()
    checks = Checks()
    correctness(options.device, checks)
    if torch.device(options.device).type == "cuda":
        graph_search(options.device, checks)
    if not options.skip_speed:
        speed(options.device, options.streams)
    print(f"{checks.failed} checks failed")
    sys.exit(min(checks.failed, 100))


if __name__ == "__main__":
    main()
