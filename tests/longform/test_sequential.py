"""One window after another: positions, context, language."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oasr_core.longform.sequential import CONTEXT_TOKENS, SequentialPlan
from oasr_core.request import DecodingOptions, RequestOutput, Segment

RATE = 1000
#: Every window is asked where its segments end.
ASKED = {"segment_timestamps": True, "context_tokens": (), "prompt": None, "language": None}


def plan_for(recognizer, seconds: float = 100, **options) -> SequentialPlan:
    return SequentialPlan(round(seconds * RATE), RATE, recognizer.tokenizer, window_samples=30 * RATE, **options)


def test_the_next_window_begins_where_the_text_ended(recognizer, spoken):
    plan = plan_for(recognizer, 70)
    (child,) = plan.next({})
    assert (child.index, child.start, child.end, child.decoding) == (0, 0, 30000, ASKED)
    assert plan.next({}) == []  # one at a time
    output = replace(recognizer.output(spoken("a first sentence", 1.0)), consumed_seconds=25.5)
    (child,) = plan.next({0: output})
    assert (child.index, child.start, child.end) == (1, 25500, 55500)
    said = tuple(output.tokens[0])
    assert child.decoding == ASKED | {"context_tokens": said}
    assert plan.progress == 25.5
    assert plan.partial("r").text == "a first sentence"
    output = replace(recognizer.output(spoken("a second one", 26.0), 25.5), consumed_seconds=None)
    (child,) = plan.next({1: output})
    assert (child.index, child.start, child.end) == (2, 55500, 70000)
    assert not plan.done
    assert plan.next({2: recognizer.output(spoken("the end", 60.0), 55.5)}) == []
    assert plan.done
    assert plan.progress == 70.0
    result = plan.result("r")
    assert result.text == "a first sentence a second one the end"
    assert [word.start for word in result.words] == pytest.approx([1.0, 1.4, 1.8, 26.0, 26.4, 26.8, 60.0, 60.4])
    assert [(s.start, s.end) for s in result.segments] == [
        pytest.approx(pair) for pair in ((1.0, 2.1), (26.0, 27.1), (60.0, 60.7))
    ]
    assert recognizer.tokenizer.decode(result.tokens[0]) == result.text


@pytest.mark.parametrize("consumed", [None, 0.0, -3.0, 1e-9, 0.02, 29.95, 30.0, 1000.0])
def test_every_window_advances(recognizer, consumed):
    plan = plan_for(recognizer, 31)
    children = plan.next({})
    count = 0
    while children:
        (child,) = children
        assert child.end - child.start >= 0.1 * RATE
        children = plan.next({child.index: replace(recognizer.output([]), consumed_seconds=consumed)})
        assert plan.progress >= (child.start + 20) / RATE
        count += 1
    assert plan.done
    assert count <= 31 / 0.02


def test_a_sliver_at_the_end_opens_no_window(recognizer):
    plan = plan_for(recognizer, 30.09)
    plan.next({})
    assert plan.next({0: recognizer.output([])}) == []
    assert plan.done
    assert plan.progress == pytest.approx(30.09)


def test_what_lies_behind_the_consumed_audio_is_said_again(recognizer, spoken):
    plan = plan_for(recognizer, 70)
    plan.next({})
    first, cut = spoken("a first sentence", 1.0), spoken("begun", 26.0)
    output = recognizer.output([*first, *cut])
    count = len(recognizer.output(first).tokens[0])
    segments = [Segment("a first sentence", 1.0, 2.2), Segment("begun", 25.5, 26.4)]
    output = replace(output, segments=segments, consumed_seconds=25.5)
    output.tokens[0].insert(count, 0)  # the timestamp that ends the sentence
    output.timestamps.insert(count, 2.2)
    (child,) = plan.next({0: output})
    assert child.decoding["context_tokens"] == (*output.tokens[0][:count], 0)
    assert plan.partial("r").text == "a first sentence"
    plan.next({1: recognizer.output(spoken("begun and ended", 26.0), 25.5)})
    assert plan.partial("r").text == "a first sentence begun and ended"


@pytest.mark.parametrize(
    ("temperature", "carried"), [(None, True), (0.0, True), (0.4, True), (0.6, False), (1.0, False)]
)
def test_what_was_found_at_a_high_temperature_is_no_context(recognizer, spoken, temperature, carried):
    plan = plan_for(recognizer, decoding=DecodingOptions(prompt="Glossary: OASR."))
    (child,) = plan.next({})
    assert child.decoding == ASKED | {"prompt": "Glossary: OASR."}
    made_up = replace(recognizer.output(spoken("made up")), temperature=temperature)
    (child,) = plan.next({0: made_up})
    before = tuple(made_up.tokens[0]) if carried else ()
    prompt = "Glossary: OASR." if carried else None
    assert child.decoding == ASKED | {"context_tokens": before, "prompt": prompt}
    heard = replace(recognizer.output(spoken("heard well")), temperature=0.0)
    (child,) = plan.next({1: heard})
    assert child.decoding == ASKED | {"context_tokens": (*before, *heard.tokens[0]), "prompt": prompt}


def test_without_conditioning_only_the_first_window_has_the_prompt(recognizer, spoken):
    plan = plan_for(recognizer, decoding=DecodingOptions(prompt="Names."), condition_on_previous_text=False)
    assert plan.next({})[0].decoding == ASKED | {"prompt": "Names."}
    (child,) = plan.next({0: recognizer.output(spoken("some text"))})
    assert child.decoding == ASKED


def test_the_context_is_the_end_of_what_was_said(recognizer, spoken):
    plan = plan_for(recognizer, 400)
    children = plan.next({})
    said: list[int] = []
    while children:
        (child,) = children
        assert child.decoding["context_tokens"] == tuple(said[-CONTEXT_TOKENS:])
        text = " ".join(f"word{child.index}x{i}" for i in range(30))
        output = recognizer.output(spoken(text, child.start / RATE), child.start / RATE)
        said += output.tokens[0]
        children = plan.next({child.index: output})
    assert len(said) > CONTEXT_TOKENS


def test_the_language_that_was_found_first_is_kept(recognizer, spoken):
    plan = plan_for(recognizer)
    plan.next({})
    silent = replace(recognizer.output([]), language="nn")
    (child,) = plan.next({0: silent})
    assert child.decoding["language"] is None  # silence has no language
    (child,) = plan.next({1: replace(recognizer.output(spoken("hallo")), language="de")})
    assert child.decoding["language"] == "de"
    (child,) = plan.next({2: replace(recognizer.output(spoken("hello")), language="en")})
    assert child.decoding["language"] == "de"


def test_a_language_that_was_asked_for_is_left_alone(recognizer, spoken):
    plan = plan_for(recognizer, decoding=DecodingOptions(language="fr"))
    plan.next({})
    (child,) = plan.next({0: replace(recognizer.output(spoken("bonjour")), language="fr")})
    assert child.decoding["language"] == "fr"


def test_a_failed_window_is_named(recognizer, spoken):
    plan = plan_for(recognizer)
    plan.next({})
    plan.next({0: replace(recognizer.output(spoken("text")), consumed_seconds=28.0)})
    failed = RequestOutput("c", finished=True, finish_reason="error", error_stage="decode_oom", error="no memory")
    assert plan.next({1: failed}) == []
    result = plan.result("r")
    assert (result.finish_reason, result.error_stage) == ("error", "decode_oom")
    assert result.error == "window 2 (28.00 s to 58.00 s): no memory"
