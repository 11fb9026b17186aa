"""Long audio through the engine: one request outside, its windows inside, seen by nobody."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest
import torch
from pydantic import BaseModel

from oasr_core.errors import AudioTooLongError, ConfigError, PluginContractError, RequestRefusedError, StreamClosedError
from oasr_core.hooks import hookimpl
from oasr_core.registry import registry
from oasr_core.request import DecodingOptions
from oasr_core.segmenters.base import Segmenter, SpeechSpan, Window
from oasr_core.testing import markers
from oasr_core.testing.autoregressive import HOP, word_audio, words

WINDOW = 32  # frames


#: Frames of a word with the pause behind it; eight of them fill a window.
EACH = 4


def tokens_of(count, seed=0):
    """Words without a repeat nearby, so that a seam has one place."""
    rng = random.Random(seed)
    order = [1 + n for n in range(60)]
    found = []
    while len(found) < count:
        rng.shuffle(order)
        found += order
    return found[:count]


def spoken(tokens):
    """Each word lasts three frames, and a silent one follows."""
    return word_audio([frame for token in tokens for frame in (token, token, token, 0)])


TOKENS = tokens_of(50)
AUDIO = spoken(TOKENS)


class NoOptions(BaseModel):
    pass


class Blocks(Segmenter):
    """Windows back to back; a waveform that begins with -1 holds no speech, one that begins with -0.5 cannot be cut."""

    oasr_api = "1.0"
    options_cls = NoOptions

    def speech(self, waveform):
        return [] if waveform[0] == -1.0 else [SpeechSpan(0, len(waveform))]

    def cut(self, waveform, max_samples):
        if waveform[0] == -0.5:
            raise RuntimeError("no seam")
        if waveform[0] == -1.0:
            return []
        edges = [*range(0, len(waveform), max_samples), len(waveform)]
        return [Window(start, end) for start, end in pairwise(edges)]


@pytest.fixture
def make(make_toy):
    with registry("segmenters").override("blocks", Blocks):
        yield lambda kind="window", **settings: make_toy(
            kind, **{"long_form": True, "segmenter": "blocks", "decode_steps_per_tick": 4, **settings}
        )


def sequential(**settings):
    return {"segmenter": None, "long_form_mode": "sequential", **settings}


def drain(engine, each=lambda: None):
    outputs = []
    for _ in range(2000):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        each()
    raise AssertionError(f"{engine.num_running} requests run and {engine.num_waiting} wait without end")


def windows_of(engine):
    """Requests inside that nobody outside knows."""
    return [each for each in engine._parts.scheduler.requests() if engine._loop.lookup(each.request_id) is None]


MODES = {
    "blocks": {},
    "overlap": {"segmenter": "overlap", "segmenter_options": {"overlap_seconds": 0.32}},
    "sequential": sequential(),
}


@pytest.mark.parametrize("mode", MODES)
def test_one_request_outside(make, assert_returned, mode):
    engine = make(**MODES[mode])
    request_id = engine.add_request(AUDIO, decoding=DecodingOptions(word_timestamps=True))
    assert (engine.num_running, engine.num_waiting) == (0, 1)
    counts = set()
    outputs = drain(engine, lambda: counts.add(engine.num_running + engine.num_waiting))
    assert counts <= {0, 1}
    assert {output.request_id for output in outputs} == {request_id}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    final = outputs[-1]
    assert (final.text, final.finish_reason) == (words(TOKENS), "stop")
    assert final.tokens == [TOKENS]
    starts = [0.04 * EACH * place for place in range(len(TOKENS))]
    tolerance = 0.04 if mode == "overlap" else 1e-6  # its windows begin anywhere
    assert final.timestamps == pytest.approx(starts, abs=tolerance)
    assert [word.start for word in final.words] == pytest.approx(starts, abs=tolerance)
    assert len(final.segments) > 5
    assert all(one.end <= other.start + 1e-9 for one, other in pairwise(final.segments))
    assert_returned(engine)


@pytest.mark.parametrize("mode", MODES)
def test_partials_grow_and_tell_how_far_they_are(make, mode):
    engine = make(**MODES[mode])
    engine.add_request(AUDIO)
    outputs = drain(engine)
    partials = outputs[:-1]
    assert len(partials) >= 3
    assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(outputs))
    reached = [output.consumed_seconds for output in partials]
    assert reached == sorted(reached)
    assert 0 < reached[0] <= 1.28
    assert reached[-1] <= len(AUDIO) / 16000
    assert [output.stable_prefix_chars for output in outputs] == [len(output.text) for output in outputs]


@pytest.mark.parametrize(("interval", "expected"), [(1, 6), (2, 3), (0, 0)])
def test_partial_decode_interval_counts_windows(make, interval, expected):
    engine = make(partial_decode_interval=interval)
    engine.add_request(AUDIO)
    outputs = drain(engine)
    assert sum(not output.finished for output in outputs) == expected
    assert outputs[-1].text == words(TOKENS)


def test_windows_of_a_pause_are_taken_where_the_last_one_ended(make):
    """Sequential: no window begins inside of what the one before has consumed, one is in the engine at a time."""
    engine = make(**sequential())
    starts, seen = [], set()
    engine.add_request(torch.cat([AUDIO[: 2 * HOP], AUDIO]))  # windows end inside of words

    def look():
        inside = windows_of(engine)
        assert len(inside) <= 1
        for each in inside:
            if each.request_id not in seen and each.audio is not None:
                seen.add(each.request_id)
                starts.append(round(float(each.audio[0]) * 128))

    look()
    outputs = drain(engine, look)
    assert outputs[-1].text == words([TOKENS[0], *TOKENS])
    assert len(seen) > 6
    assert all(start == 0 for start in starts[1:])  # each begins at the pause that the one before ended at


@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_in_flight_are_bounded(make, assert_returned, size):
    engine = make(max_batch_size=size)
    engine.add_request(spoken(tokens_of(160)))
    most = []
    outputs = drain(engine, lambda: most.append(len(windows_of(engine))))
    assert max(most) <= size
    assert outputs[-1].text == words(tokens_of(160))
    assert_returned(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ticks", [0, 1, 4, 14])
def test_an_abort_reaches_every_window(make, assert_returned, mode, ticks):
    engine = make(**MODES[mode], decode_steps_per_tick=1, decode_options={"kv_storage": "paged"})
    request_id = engine.add_request(AUDIO)
    neighbour = engine.add_request(AUDIO[: 20 * HOP], request_id="n")
    seen = [output for _ in range(ticks) for output in engine.step()]
    assert windows_of(engine)
    engine.abort_request(request_id)
    if mode != "sequential":  # there the neighbour has a window, too
        assert windows_of(engine) == []
    outputs = [output for output in seen + drain(engine) if output.finished]
    assert {output.request_id: output.finish_reason for output in outputs} == {request_id: "abort", neighbour: "stop"}
    (aborted,) = [output for output in outputs if output.request_id == request_id]
    shown = [output.text for output in seen if output.request_id == request_id]
    assert aborted.text == (shown[-1] if shown else "")
    with pytest.raises(StreamClosedError):
        engine.abort_request(request_id)
    assert_returned(engine)


def test_close_with_windows_in_flight(make, assert_returned):
    engine = make()
    ids = [engine.add_request(AUDIO) for _ in range(2)]
    engine.step()
    engine.step()
    engine.close()
    outputs = engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(name, "abort") for name in ids]
    assert_returned(engine)


@pytest.mark.parametrize("bad", [[2], [2, 3], [0, 1, 2, 3, 4, 5, 6]])
def test_a_failing_window_fails_the_request_once(make, assert_returned, monkeypatch, caplog, bad):
    """The message has the window's times, the text what was shown; the other windows are freed."""
    engine = make(max_batch_size=2)
    strategy = engine._parts.strategy
    original = strategy.finish

    def broken(row, memory):
        if any(int(memory[0][0, 0]) == TOKENS[place * WINDOW // EACH] for place in bad):
            raise RuntimeError("kernel")
        return original(row, memory)

    with monkeypatch.context() as patch:
        patch.setattr(strategy, "finish", broken)
        request_id = engine.add_request(AUDIO)
        with caplog.at_level(logging.ERROR, "oasr_core.step_loop"):
            outputs = drain(engine)
    assert [output.request_id for output in outputs if output.finished] == [request_id]
    final = outputs[-1]
    assert (final.finish_reason, final.error_stage) == ("error", "decode_step")
    messages = [f"window {n + 1} ({n * 1.28:.2f} s to {n * 1.28 + 1.28:.2f} s): RuntimeError: kernel" for n in bad]
    assert final.error in messages
    assert final.text == words(TOKENS[: bad[0] * WINDOW // EACH])
    assert [record for record in caplog.records if record.name == "oasr_core.step_loop"] == []
    assert_returned(engine)
    assert engine.transcribe(AUDIO) == words(TOKENS)


def test_a_plan_that_fails_fails_its_request(make, assert_returned, monkeypatch):
    """Also with windows that were about to begin."""
    engine = make(max_batch_size=2)
    with monkeypatch.context() as patch:
        patch.setattr("oasr_core.longform.parallel.ParallelPlan.partial", lambda self, name: 1 / 0)
        (output,) = engine.transcribe_outputs([AUDIO])
    assert (output.finish_reason, output.error_stage) == ("error", "long_form")
    assert "ZeroDivisionError" in output.error
    assert_returned(engine)


# -- admission -------------------------------------------------------------------------------------------------------


def test_over_long_audio_is_refused_without_long_form(make, assert_returned):
    engine = make(long_form=False, segmenter=None)
    exact = AUDIO[: WINDOW * HOP]
    assert engine.transcribe(exact) == words(TOKENS[: WINDOW // EACH])
    with pytest.raises(AudioTooLongError, match=r"1\.28 s of audio, the model's window is 1\.28 s; set long_form=True"):
        engine.add_request(torch.cat([exact, torch.zeros(1)]))
    assert_returned(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [0, 1, 3 * HOP])
def test_a_window_and_a_sample_more(make, assert_returned, mode, extra):
    engine = make(**MODES[mode])
    audio = AUDIO[: WINDOW * HOP + extra]
    request_id = engine.add_request(audio)
    is_long = extra > 0 or mode == "sequential"
    assert len(windows_of(engine)) == (0 if not is_long else 1 if mode == "sequential" else 2)
    (final,) = [output for output in engine.run() if output.finished]
    assert (final.request_id, final.text) == (request_id, words(TOKENS[: 8 if extra < HOP else 9]))
    assert_returned(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("samples", [0, 1, HOP - 1])
def test_audio_without_a_frame_ends_empty(make, assert_returned, mode, samples):
    engine = make(**MODES[mode])
    (output,) = engine.transcribe_outputs([torch.zeros(samples)])
    assert (output.text, output.finish_reason, output.error) == ("", "stop", None)
    assert_returned(engine)


def test_a_limit_of_positions_is_a_window_too(make):
    engine = make("limited", **MODES["overlap"])
    assert engine._parts.max_samples == 33 * HOP - 1
    assert engine.transcribe([AUDIO[: 33 * HOP - 1], AUDIO]) == [words(TOKENS[:8]), words(TOKENS)]
    without = make("limited", long_form=False, segmenter=None)
    with pytest.raises(AudioTooLongError, match=r"positions for 32 .*long_form=True"):
        without.add_request(AUDIO[: 33 * HOP])


def test_windows_without_speech_are_no_windows(make, assert_returned):
    """Where the cut leaves nothing, the request ends at once, with nothing."""
    engine = make()
    silent = torch.full((40 * HOP,), -1.0)
    request_id = engine.add_request(silent)
    assert [(o.request_id, o.text, o.finish_reason) for o in drain(engine)] == [(request_id, "", "stop")]
    assert engine.transcribe([silent, AUDIO]) == ["", words(TOKENS)]
    assert_returned(engine)


@pytest.mark.parametrize("overlap_admit", [False, True])
def test_a_segmenter_that_raises_costs_its_request(make, assert_returned, overlap_admit):
    engine = make(overlap_admit=overlap_admit)
    uncut = torch.full((40 * HOP,), -0.5)
    if overlap_admit:
        request_id = engine.add_request(uncut)
        (output,) = engine.run()
        assert (output.request_id, output.error_stage) == (request_id, "offline_prep")
        assert "no seam" in output.error
    else:
        with pytest.raises(PluginContractError, match=r"Blocks could not cut .* no seam"):
            engine.add_request(uncut)
    assert engine.transcribe(AUDIO) == words(TOKENS)
    assert_returned(engine)


def test_overlap_beyond_half_a_window_is_refused(make):
    with pytest.raises(ConfigError, match="more than half of a window"):
        make(segmenter=None).transcribe(AUDIO)  # 1 s of the default, and windows of 1.28 s


def test_ids_of_windows_are_nobodys(make, assert_returned):
    engine = make()
    engine.add_request(AUDIO[:HOP], request_id="x#0")
    engine.add_request(AUDIO, request_id="x")
    inside = windows_of(engine)
    assert len(inside) == 4
    for request_id in ("x", "x#0"):
        with pytest.raises(RequestRefusedError, match="in use"):
            engine.add_request(AUDIO, request_id=request_id)
    with pytest.raises(KeyError, match=r"no request .*; 2 others are waiting or running"):
        engine.abort_request(inside[0].request_id)
    outputs = {output.request_id: output.text for output in engine.run()}
    assert outputs == {"x": words(TOKENS), "x#0": words(TOKENS[:1])}
    with pytest.raises(KeyError, match="no request"):
        engine.abort_request(inside[0].request_id)
    assert_returned(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap_admit", [False, True])
def test_transcribe_of_several_keeps_their_order(make, assert_returned, mode, overlap_admit):
    engine = make(**MODES[mode], overlap_admit=overlap_admit)
    mine = engine.add_request(AUDIO)
    lengths = [30, 1, 17, 9, 8, 25]
    texts = engine.transcribe([spoken(tokens_of(length, seed=length)) for length in lengths])
    assert texts == [words(tokens_of(length, seed=length)) for length in lengths]
    rest = engine.run()
    assert {output.request_id for output in rest} <= {mine}
    assert_returned(engine)


def test_observers_see_the_request_only(make):
    class Watcher:
        def __init__(self):
            self.admitted, self.finished, self.told = [], [], []

        @hookimpl
        def oasr_request_admitted(self, request_id):
            self.admitted.append(request_id)

        @hookimpl
        def oasr_request_finished(self, output):
            self.finished.append(output.request_id)

        @hookimpl
        def oasr_step_done(self, outputs):
            self.told += outputs

    engine = make()
    watcher = Watcher()
    engine.observers.register(watcher)
    request_id = engine.add_request(AUDIO)
    outputs = drain(engine)
    assert watcher.admitted == watcher.finished == [request_id]
    assert watcher.told == outputs


def test_a_family_that_decodes_at_once_is_cut_too(tmp_path, make_engine):
    """The windows of a CTC model with a limit of positions; their encoder overlaps by three feature frames."""
    directory = markers.write_marker_bundle(tmp_path / "limited", max_positions=64)
    with registry("segmenters").override("blocks", Blocks):
        engine = make_engine(ckpt_dir=str(directory), long_form=True, segmenter="blocks", max_batch_size=2)
        limit = engine._parts.max_samples
        assert engine._parts.runner.encoder.output_frames(limit // 160) == 64
        assert engine._parts.runner.encoder.output_frames((limit + 1) // 160) == 65
        tokens = [1 + i % 15 for i in range(64)]
        assert engine.transcribe(markers.marker_audio(tokens), streaming=False) == markers.spell(tokens)
        audio = torch.cat([markers.marker_audio(tokens), torch.zeros(limit - 259 * 160)] * 3)
        request_id = engine.add_request(audio, streaming=False)
        assert (engine.num_running, engine.num_waiting) == (0, 1)
        outputs = drain(engine)
        assert {output.request_id for output in outputs} == {request_id}
        assert outputs[-1].text.replace(" ", "") == markers.spell(tokens) * 3
        (stream,) = engine.transcribe_outputs([audio], streaming=True)  # is never cut into windows
        assert (stream.finish_reason, stream.text) == ("length", markers.spell(tokens))


def test_windows_make_no_partials_of_their_own(make, monkeypatch):
    engine = make(decode_steps_per_tick=1)
    made = []
    partial = engine._parts.outputs.partial
    monkeypatch.setattr(
        engine._parts.outputs, "partial", lambda state, *rest: made.append(rest[0]) or partial(state, *rest)
    )
    engine.add_request(AUDIO)
    assert [output.text for output in engine.run()] == [words(TOKENS)]
    assert made == []
    short = engine.add_request(AUDIO[: WINDOW * HOP])
    engine.run()
    assert set(made) == {short}
