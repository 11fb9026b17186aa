"""The stable prefix of a partial: never shrinks, is never taken back, and can be all that is shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oasr_core.decoding.base import Hypotheses, Hypothesis
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer

OPTIONS = DecodingOptions()


def ids(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


def partial(processor, state, tokens, stable):
    hyps = Hypotheses([Hypothesis(tokens, list(range(len(tokens))))], stable_tokens=stable)
    return processor.partial(state, "r", hyps, OPTIONS)


def test_a_revised_tail_does_not_touch_the_stable_prefix():
    processor = OutputProcessor(ByteTokenizer(), 0.04)
    state = processor.open()
    first = partial(processor, state, ids("recogn"), 3)
    second = partial(processor, state, ids("reckon"), 3)
    assert (first.text, first.text[: first.stable_prefix_chars]) == ("recogn", "rec")
    assert (second.text, second.text[: second.stable_prefix_chars]) == ("reckon", "rec")


def test_held_partials_show_the_stable_prefix_only():
    processor = OutputProcessor(ByteTokenizer(), 0.04, hold_unstable=True)
    state = processor.open()
    output = partial(processor, state, ids("recogn"), 3)
    assert (output.text, output.stable_prefix_chars, output.tokens, len(output.timestamps)) == (
        "rec",
        3,
        [ids("rec")],
        3,
    )


def test_a_final_is_stable_as_a_whole():
    processor = OutputProcessor(ByteTokenizer(), 0.04)
    hyps = Hypotheses([Hypothesis(ids("done"))])
    final = processor.final("r", hyps, OPTIONS, finish_reason="stop", duration=1.0)
    assert final.stable_prefix_chars == 4


@given(
    text=st.text(min_size=1, max_size=12),
    stable=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    tails=st.lists(st.text(max_size=5), min_size=8, max_size=8),
)
def test_the_prefix_only_grows_and_is_kept(text, stable, tails):
    """Whatever the tails do, also where a stable token is half a character."""
    processor = OutputProcessor(ByteTokenizer(), 0.04)
    state = processor.open()
    tokens = ids(text)
    shown = ""
    for count, tail in zip(sorted(min(n, len(tokens)) for n in stable), tails, strict=False):
        output = partial(processor, state, tokens[:count] + ids(tail), count)
        prefix = output.text[: output.stable_prefix_chars]
        assert prefix.startswith(shown)
        assert text.startswith(prefix)
        shown = prefix
