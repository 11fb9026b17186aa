"""The strategy on a random network: prompts, results, silence, fallback, failures."""

from __future__ import annotations

import math

import pytest
import torch

from oasr_core.decoding.budget import StepBudget
from oasr_core.decoding.decode_group import Candidate
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.errors import PluginContractError, RequestRefusedError
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_whisper.options import AedOptions
from oasr_whisper.strategy import AedStrategy


@pytest.fixture(scope="module")
def network(small):
    return small()


def heard(rows, seed=0):
    """Encoder outputs of ``rows`` windows."""
    hidden = torch.randn(rows, 50, 16, generator=torch.Generator().manual_seed(seed))
    return EncoderOutput(hidden, torch.tensor([20 + 5 * row for row in range(rows)]))


def part(out, row):
    return EncoderOutput(out.hidden[row : row + 1], out.lengths[row : row + 1])


REQUESTS = [
    {"language": "en"},
    {"language": "de", "task": "translate", "word_timestamps": True},
    {},
    {"segment_timestamps": True, "word_timestamps": True},
    {"prompt": "abc def"},
    {"hotwords": ("beg",), "language": "ja", "max_new_tokens": 5},
]


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"kv_storage": "paged"}, {"timestamps": True}])
def test_requests_of_all_kinds_together_give_what_each_gives_alone(network, options):
    out = heard(6)
    wanted = [DecodingOptions(**each) for each in REQUESTS]
    together = network.strategy(no_speech_gate=False, **options).decode_offline(out, wanted)
    alone = network.strategy(no_speech_gate=False, **options)
    for row, each in enumerate(wanted):
        (one,) = alone.decode_offline(part(out, row), [each])
        for hyps in (one, together[row]):
            hyps.best.token_log_probs = None
        assert one.best.score == pytest.approx(together[row].best.score, abs=1e-4)
        one.best.score = together[row].best.score
        assert one.no_speech_prob == pytest.approx(together[row].no_speech_prob, abs=1e-6)
        assert one.language_prob == pytest.approx(together[row].language_prob, abs=1e-5) or one.language_prob is None
        one.no_speech_prob, one.language_prob = together[row].no_speech_prob, together[row].language_prob
        assert one.best == together[row].best
        assert (one.segments, one.consumed_seconds, one.language) == (
            together[row].segments,
            together[row].consumed_seconds,
            together[row].language,
        )


def test_languages_are_those_given_or_the_most_probable(network):
    out = heard(3)
    strategy = network.strategy()
    asked = [DecodingOptions(), DecodingOptions(language="ja"), DecodingOptions()]
    found = strategy.decode_offline(out, asked)
    head = network.model.interfaces["aed"]
    ids = head.tokens
    with torch.inference_mode():
        cache = strategy.scratch(3)
        start = torch.full((3, 1), ids.sot)
        logits = head.logits(head.step(start, cache.begin(1), head.memory(out.hidden, out.lengths)))[:, -1]
    probabilities = logits[:, list(ids.language_ids.values())].softmax(-1)
    for row in (0, 2):
        best = probabilities[row].argmax().item()
        assert found[row].language == list(ids.language_ids)[best]
        assert found[row].language_prob == pytest.approx(probabilities[row, best].item(), abs=1e-5)
    assert (found[1].language, found[1].language_prob) == ("ja", None)
    assert torch.allclose(
        torch.tensor([hyps.no_speech_prob for hyps in found]), logits.softmax(-1)[:, ids.no_speech], atol=1e-6
    )


def test_english_only_models_speak_english(small):
    (hyps,) = small(multilingual=False).strategy().decode_offline(heard(1), [DecodingOptions()])
    assert (hyps.language, hyps.language_prob) == ("en", None)


def test_timestamps_are_the_request_s_or_the_option_s(network):
    out = heard(1)
    begin = network.model.interfaces["aed"].tokens.timestamp_begin
    for option, asked, extra, timed in (
        (False, False, {}, False),
        (True, False, {}, True),
        (False, True, {}, True),
        (True, False, {"timestamps": False}, False),
        (True, True, {"timestamps": False}, True),
        (False, False, {"timestamps": True}, True),
    ):
        options = DecodingOptions(segment_timestamps=asked, extra=extra)
        (hyps,) = network.strategy(timestamps=option, no_speech_gate=False).decode_offline(out, [options])
        assert (hyps.segments is not None) is timed
        assert not timed or hyps.best.tokens[0] >= begin


def test_segments_cover_the_text(network):
    options = DecodingOptions(word_timestamps=True)
    strategy = network.strategy(timestamps=True, no_speech_gate=False)
    outputs = network.outputs()
    for hyps in strategy.decode_offline(heard(6), [options] * 6):
        final = outputs.final("r", hyps, options, finish_reason="stop", duration=1.0)
        assert "".join(segment.text for segment in final.segments).replace(" ", "") == final.text.replace(" ", "")
        assert all(segment.words for segment in final.segments)
        seconds = [second for word in final.words for second in (word.start, word.end)]
        assert seconds == sorted(seconds)
        assert all(0.0 <= second <= 1.0 for second in seconds)
        assert final.consumed_seconds == hyps.consumed_seconds


def test_what_is_unfinished_is_timed_behind_what_is_finished(network, monkeypatch):
    """Attention may put words on the wrong side of the last pair; whoever goes on from there tells them by time."""
    begin = network.model.interfaces["aed"].tokens.timestamp_begin
    said = [begin, 1, 1, begin + 10, begin + 10, 2, 2, 2]
    options = DecodingOptions(word_timestamps=True, segment_timestamps=True)
    strategy = network.strategy(no_speech_gate=False)
    memory = network.model.interfaces["aed"].memory(heard(1).hidden, torch.tensor([40]))
    for frames, split in (([0, 14, 15, 16, 17, 18], 3), ([0, 2, 4, 5, 17, 18], 3)):
        monkeypatch.setattr("oasr_whisper.strategy.token_frames", lambda *args, frames=frames: frames)
        (row,) = strategy.rows([IncrementalRequest("r", options)], memory, [40])
        row.note.no_speech_prob = 0.0
        row.candidates = [Candidate(list(said), [-0.1] * len(said), -1.0, ended=True)]
        hyps = strategy.finish(row, memory)
        assert hyps.consumed_seconds == 0.2
        assert max(hyps.best.frames[:split]) < 10
        assert min(hyps.best.frames[5:]) >= 10
        assert all(a <= b for a, b in zip(hyps.best.frames, hyps.best.end_frames, strict=True))
        final = network.outputs().final("r", hyps, options, finish_reason="stop", duration=0.8)
        assert [segment.start >= 0.2 for segment in final.segments] == [False, True]


def test_words_are_timed_within_the_audio(network):
    options = DecodingOptions(word_timestamps=True)
    out = heard(4)
    for row, hyps in enumerate(network.strategy(no_speech_gate=False, beam_size=2).decode_offline(out, [options] * 4)):
        frames = int(out.lengths[row])
        assert len(hyps.best.frames) == len(hyps.best.end_frames) == len(hyps.best.tokens)
        assert hyps.best.frames == sorted(hyps.best.frames)
        assert all(a <= b <= frames for a, b in zip(hyps.best.frames, hyps.best.end_frames, strict=True))


def test_silence_gives_no_text(network):
    out = heard(1)
    always = {"no_speech_threshold": 0.0, "log_prob_threshold": None}
    for timestamps in (False, True):
        options = DecodingOptions(word_timestamps=True, segment_timestamps=timestamps)
        (hyps,) = network.strategy(**always).decode_offline(out, [options])
        assert hyps.best.tokens == []
        assert hyps.no_speech_prob > 0.0
        final = network.outputs().final("r", hyps, options, finish_reason="stop", duration=1.0)
        assert (final.text, final.words, final.segments, final.no_speech_prob) == ("", [], [], hyps.no_speech_prob)
        (kept,) = network.strategy(**always, no_speech_gate=False).decode_offline(out, [options])
        assert kept.best.tokens


def test_partials_promise_nothing_where_silence_may_take_them_back(network):
    request = IncrementalRequest("r", DecodingOptions())

    def promised(**options):
        strategy = network.strategy(**options)
        strategy.begin_offline(heard(1), [request])
        return max(progress.hypotheses.stable_tokens for progress in strategy.advance(StepBudget(2)))

    assert promised() > 0
    assert promised(no_speech_threshold=0.0) == 0
    assert promised(no_speech_threshold=0.0, no_speech_gate=False) > 0
    assert promised(temperature_fallback=(0.5,)) == 0


def test_bad_results_are_decoded_warmer(network):
    out = heard(3)
    options = [DecodingOptions(seed=row) for row in range(3)]
    plain = network.strategy(no_speech_gate=False).decode_offline(out, options)
    assert {hyps.temperature for hyps in plain} == {0.0}
    hopeless = {"log_prob_threshold": 0.0, "no_speech_threshold": None, "compression_ratio_threshold": None}
    strategy = network.strategy(temperature_fallback=(0.5, 1.0), best_of=3, **hopeless)
    tried = []
    finish = strategy.finish

    def watched(row, memory):
        tried.append((row.request.request_id, row.sampling.temperature, row.sampling.width, row.ranked()[0].score))
        return finish(row, memory)

    strategy.finish = watched
    found = strategy.decode_offline(out, options)
    for row, hyps in enumerate(found):
        mine = [each[1:3] for each in tried if each[0] == f"row-{row}"]
        assert mine == [(0.0, 1), (0.5, 3), (1.0, 3)]
        assert hyps.temperature == 1.0, "none was good: the last one tried"
        assert hyps.language
    easy = {"log_prob_threshold": -1e9, "compression_ratio_threshold": None, "no_speech_gate": False}
    fine = network.strategy(temperature_fallback=(0.5, 1.0), **easy)
    again = fine.decode_offline(out, options)
    assert [hyps.best.tokens for hyps in again] == [hyps.best.tokens for hyps in plain]


def test_a_fallback_does_not_know_its_company(network):
    out = heard(3)
    options = [DecodingOptions(seed=row, word_timestamps=row == 1) for row in range(3)]
    settings = {"log_prob_threshold": -1.2, "temperature_fallback": (0.8, 1.2), "no_speech_gate": False}
    together = network.strategy(**settings).decode_offline(out, options)
    for row, each in enumerate(options):
        (alone,) = network.strategy(**settings).decode_offline(part(out, row), [each])
        assert alone.best.tokens == together[row].best.tokens
        assert alone.temperature == together[row].temperature
        assert alone.best.frames == together[row].best.frames


def test_a_fallback_s_hypotheses_are_reserved(network):
    options = DecodingOptions(max_new_tokens=8)
    assert network.strategy().max_width(options) == 1
    assert network.strategy(temperature_fallback=(0.5,)).max_width(options) == 5
    assert network.strategy(temperature_fallback=(0.5,), best_of=2, beam_size=4).max_width(options) == 4


def test_a_window_without_numbers_fails_alone(network):
    out = heard(3)
    expected = network.strategy().decode_offline(out, [DecodingOptions()] * 3)
    out.hidden[1] = math.nan
    strategy = network.strategy()
    requests = [IncrementalRequest(f"r{row}", DecodingOptions()) for row in range(3)]
    strategy.begin_offline(out, requests)
    ended = {}
    while strategy.has_pending():
        ended |= {each.request_id: each for each in strategy.advance(StepBudget(8)) if each.finished or each.error}
    assert isinstance(ended["r1"].error, FloatingPointError)
    for row in (0, 2):
        assert ended[f"r{row}"].hypotheses.best.tokens == expected[row].best.tokens


def test_word_times_that_fail_cost_their_request_alone(network, monkeypatch):
    strategy = network.strategy(no_speech_gate=False)
    monkeypatch.setattr(strategy, "_time", lambda *args: 1 / 0)
    requests = [IncrementalRequest(f"r{row}", DecodingOptions(word_timestamps=row == 0)) for row in range(2)]
    strategy.begin_offline(heard(2), requests)
    ended = {}
    while strategy.has_pending():
        ended |= {each.request_id: each for each in strategy.advance(StepBudget(8)) if each.finished or each.error}
    assert isinstance(ended["r0"].error, ZeroDivisionError)
    assert ended["r1"].hypotheses.best.tokens


def test_requests_are_refused_at_admission(network):
    strategy = network.strategy()
    weighted = {"hotwords": ({"phrase": "a", "boost": 1.0},)}
    for options in ({"language": "fr"}, {"task": "sing"}, {"n_best": 2}, weighted):
        with pytest.raises(RequestRefusedError):
            strategy.validate(DecodingOptions(**options), "offline")
    strategy.validate(DecodingOptions(n_best=2, temperature=0.5), "offline")


def test_a_long_prompt_leaves_room(network):
    options = DecodingOptions(prompt="a b c " * 30, max_new_tokens=400, word_timestamps=True)
    strategy = network.strategy(no_speech_gate=False)
    strategy.validate(options, "offline")
    (hyps,) = strategy.decode_offline(heard(1), [options])
    assert len(hyps.best.tokens) <= 60 - 30 - 4


def test_a_text_that_fills_the_decoder_is_timed(network):
    options = DecodingOptions(max_new_tokens=400, word_timestamps=True)
    strategy = network.strategy(no_speech_gate=False, suppress_tokens=(network.model.interfaces["aed"].tokens.eot,))
    (hyps,) = strategy.decode_offline(heard(1), [options])
    assert hyps.reached_cap
    assert len(hyps.best.tokens) == 60 - 4
    assert len(hyps.best.frames) == 60 - 4


def test_options_of_another_strategy_are_refused(network):
    context = network.strategy().context
    context.options = object()
    with pytest.raises(PluginContractError, match="takes AedOptions"):
        AedStrategy(context)


def test_defaults_are_those_of_whisper():
    options = AedOptions()
    assert (options.max_new_tokens, options.beam_size, options.best_of) == (224, 1, 5)
    assert (options.compression_ratio_threshold, options.log_prob_threshold) == (2.4, -1.0)
    assert (options.no_speech_threshold, options.no_speech_gate, options.temperature_fallback) == (0.6, True, ())
