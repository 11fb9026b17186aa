"""Windows decoded in parallel: what is stitched is what was said."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_core.longform.parallel import ParallelPlan
from oasr_core.request import RequestOutput
from oasr_core.segmenters.base import Window
from oasr_core.segmenters.overlap import OverlapOptions, OverlapSegmenter

RATE = 1000


def windows_of(samples: int, longest: int, overlap: int) -> list[Window]:
    segmenter = OverlapSegmenter(OverlapOptions(overlap_seconds=overlap / RATE), RATE)
    return segmenter.windows(torch.zeros(samples), longest)


def run(plan: ParallelPlan, output: Callable[[int, int, int], RequestOutput], seed: int = 0) -> list[RequestOutput]:
    """Finish children in any order; the partials, then the result."""
    chooser = random.Random(seed)
    seen = []
    running = plan.next({})
    while running:
        child = running.pop(chooser.randrange(len(running)))
        running += plan.next({child.index: output(child.index, child.start, child.end)})
        assert len(running) <= plan.max_in_flight
        seen.append(plan.partial("r"))
    assert plan.done
    return [*seen, plan.result("r")]


def heard(recognizer, said, *, garbage=None, **options):
    """A recognizer that gets every word right that lies in its window; ``garbage`` stands for those cut through."""

    def output(index: int, start: int, end: int) -> RequestOutput:
        begin, stop = start / RATE, end / RATE
        inside = [each for each in said if each.start >= begin and each.end <= stop]
        left = [each for each in said if each.start < begin < each.end]
        right = [each for each in said if each.start < stop < each.end]
        if garbage is not None and left:
            inside.insert(0, replace(left[0], word=garbage(), start=begin))
        if garbage is not None and right:
            inside.append(replace(right[0], word=garbage(), end=stop))
        return recognizer.output(inside, begin, **options)

    return output


def check(outputs: Sequence[RequestOutput], said, recognizer, *, words: bool, times: bool) -> None:
    *partials, result = outputs
    assert result.text == " ".join(each.word for each in said)
    assert result.finished
    assert result.finish_reason == "stop"
    assert recognizer.tokenizer.decode(result.tokens[0]) == result.text
    assert result.nbest_texts == [result.text]
    for before, after in zip(partials, outputs[1:], strict=True):
        assert after.text.startswith(before.text)
        assert before.stable_prefix_chars == len(before.text)
        assert not before.finished
    if times:
        assert result.timestamps == sorted(result.timestamps)
        assert len(result.timestamps) == len(result.tokens[0])
        assert result.timestamps[0] == pytest.approx(said[0].start)
    else:
        assert result.timestamps is None
    if words:
        assert [(w.word, w.start, w.end) for w in result.words] == [
            (each.word, pytest.approx(each.start), pytest.approx(each.end)) for each in said
        ]
        assert [w for segment in result.segments for w in segment.words] == result.words
    else:
        assert result.words is None
    assert " ".join(segment.text for segment in result.segments) == result.text
    edges = [edge for segment in result.segments for edge in (segment.start, segment.end)]
    assert edges == sorted(edges)


NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
COMMON = ["no", "no", "yes", "well", "the", "wellington"]


class Script:
    """Words one after another: random letters, or often the same."""

    def __init__(self, seed: int, word_type, vocabulary: Sequence[str] = ()) -> None:
        self.chooser = random.Random(seed)
        clock, self.said = 0.0, []
        for _ in range(self.chooser.randint(1, 80)):
            clock += self.chooser.choice([0.02, 0.05, 0.1, 0.3, 1.5])
            length = self.chooser.uniform(0.12, 0.6)
            word = self.chooser.choice(vocabulary) if vocabulary else self.letters("bdfgklmnprstaeiou")
            self.said.append(word_type(word, round(clock, 3), round(clock + length, 3)))
            clock += length
        self.samples = round((clock + 0.3) * RATE)

    def letters(self, alphabet: str) -> str:
        return "".join(self.chooser.choices(alphabet, k=self.chooser.randint(6, 9)))

    def plan(self, recognizer) -> ParallelPlan:
        windows = windows_of(self.samples, 6000, 1000)
        return ParallelPlan(windows, self.samples, RATE, recognizer.tokenizer, max_in_flight=3)


SEEDS = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_perfect_recognition_is_stitched_exactly(recognizer_cls, word_type, seed, words, common):
    """With times, however often words are repeated."""
    recognizer, script = recognizer_cls(), Script(seed, word_type, COMMON if common else ())
    outputs = run(script.plan(recognizer), heard(recognizer, script.said, words=words), seed)
    check(outputs, script.said, recognizer, words=words, times=True)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_without_times_distinct_words_are_stitched_exactly(recognizer_cls, word_type, seed):
    recognizer, script = recognizer_cls(), Script(seed, word_type)
    outputs = run(script.plan(recognizer), heard(recognizer, script.said, words=False, times=False), seed)
    check(outputs, script.said, recognizer, words=False, times=False)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_garbled_words_at_the_edges_are_dropped(recognizer_cls, word_type, seed):
    """A word that an edge cuts through is heard as something else; its neighbour window has it right."""
    recognizer, script = recognizer_cls(), Script(seed, word_type)
    outputs = run(script.plan(recognizer), heard(recognizer, script.said, garbage=lambda: script.letters("hjvwxyz")))
    check(outputs, script.said, recognizer, words=True, times=True)


def test_a_quiet_seam_keeps_repeated_words(recognizer, spoken):
    """Where no audio is shared the words on both sides were said twice."""
    windows = [Window(0, 2000), Window(2000, 4000), Window(4500, 6000)]
    said = [*spoken("well no", 0.2), *spoken("no no", 2.2), *spoken("no way", 4.7)]
    for words, times in ((True, True), (False, True), (False, False)):
        plan = ParallelPlan(windows, 6000, RATE, recognizer.tokenizer)
        result = run(plan, heard(recognizer, said, words=words, times=times))[-1]
        assert result.text == "well no no no no way"
        assert recognizer.tokenizer.decode(result.tokens[0]) == result.text


def test_sentences_are_neither_lost_nor_doubled(recognizer, spoken):
    """Ten sentences over four windows, with misheard words in the shared audio."""
    sentences = [f"sentence {name} ends here now" for name in NUMBERS]
    said = [each for i, sentence in enumerate(sentences) for each in spoken(sentence, 3 * i + 0.1, 0.5, 0.4)]
    plan = ParallelPlan(windows_of(30000, 9000, 1500), 30000, RATE, recognizer.tokenizer)
    chooser = random.Random(1)

    def misheard(index, start, end):
        output = heard(recognizer, said)(index, start, end)
        inside = [each for each in said if each.start >= start / RATE and each.end <= end / RATE]
        if index:  # the first word of each later window is wrong
            inside[0] = replace(inside[0], word="".join(chooser.choices("xyz", k=5)))
            output = recognizer.output(inside, start / RATE)
        return output

    text = run(plan, misheard)[-1].text
    for sentence in sentences:
        assert text.split().count(sentence.split()[1]) == 1
    assert len(text.split()) == 50


def test_children_in_flight_are_bounded_and_come_in_order(recognizer):
    windows = [Window(i * 1000, i * 1000 + 1000) for i in range(10)]
    plan = ParallelPlan(windows, 10000, RATE, recognizer.tokenizer, max_in_flight=4)
    first = plan.next({})
    assert [(child.index, child.start, child.end) for child in first] == [
        (i, i * 1000, i * 1000 + 1000) for i in range(4)
    ]
    silent = recognizer.output([])
    assert plan.next({}) == []
    assert [child.index for child in plan.next({2: silent})] == [4]
    assert plan.partial("r").text == ""
    assert [child.index for child in plan.next({0: silent, 1: silent, 3: silent})] == [5, 6, 7]
    assert not plan.done
    assert plan.progress == 4.0


def test_progress_counts_what_is_left_out_and_ends_at_the_end(recognizer):
    windows = [Window(1000, 3000), Window(7000, 9000), Window(9000, 10000)]
    plan = ParallelPlan(windows, 12000, RATE, recognizer.tokenizer)
    plan.next({})
    assert plan.progress == 0.0
    silent = recognizer.output([])
    plan.next({1: silent})
    assert plan.progress == 6.0
    plan.next({0: silent})
    assert plan.progress == 9.0
    plan.next({2: silent})
    assert plan.progress == 12.0


def test_without_windows_the_plan_is_done_at_once(recognizer):
    plan = ParallelPlan([], 12000, RATE, recognizer.tokenizer)
    assert plan.next({}) == []
    assert plan.done
    result = plan.result("r")
    assert (result.text, result.tokens, result.finish_reason, result.finished) == ("", [[]], "stop", True)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_child_that_fails_ends_the_parent(recognizer, spoken, reason):
    windows = [Window(i * 1000, i * 1000 + 1000) for i in range(5)]
    plan = ParallelPlan(windows, 5000, RATE, recognizer.tokenizer, max_in_flight=3)
    plan.next({})
    failed = RequestOutput("c", finished=True, finish_reason=reason, error_stage="offline_oom", error="no memory")
    if reason == "abort":
        failed.error_stage = failed.error = None
    assert plan.next({1: failed, 0: recognizer.output(spoken("a"), 0.0)}) == []
    assert plan.done
    result = plan.result("r")
    assert (result.request_id, result.finished, result.finish_reason) == ("r", True, reason)
    assert result.error_stage == failed.error_stage
    assert result.error == f"window 2 (1.00 s to 2.00 s): {'no memory' if reason == 'error' else 'abort'}"
    assert plan.next({2: recognizer.output([])}) == []  # what still comes changes nothing
    assert plan.result("r").error == result.error


def test_a_window_goes_on_where_its_text_ended(recognizer, spoken):
    windows = [Window(0, 5000), Window(5000, 10000)]
    plan = ParallelPlan(windows, 10000, RATE, recognizer.tokenizer, max_in_flight=2)
    first, second = plan.next({})
    output = replace(recognizer.output(spoken("one two", 0.5)), consumed_seconds=2.0)
    (rest,) = plan.next({first.index: output})
    assert (rest.start, rest.end) == (2000, 5000)
    assert plan.partial("r").text == ""  # the window is not finished
    assert plan.next({second.index: recognizer.output(spoken("five", 6.0), 5.0)}) == []
    assert not plan.done
    assert plan.next({rest.index: recognizer.output(spoken("three four", 3.0), 2.0)}) == []
    assert plan.done
    assert plan.progress == 10.0
    assert plan.result("r").text == "one two three four five"
