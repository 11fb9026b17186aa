"""Public bug cases on decoding, text and times: scripted posteriors through ``ctc`` and the output processor."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from oasr_core.decoding.base import DecodeContext, Hypotheses, Hypothesis
from oasr_core.outputs import OutputProcessor
from oasr_core.request import DecodingOptions, RequestOutput
from oasr_core.testing.decoding import ByteTokenizer, Run, scripted_output
from oasr_ctc.options import CtcOptions
from oasr_ctc.strategy import CtcStrategy

WORDS = DecodingOptions(word_timestamps=True)
TOKENIZER = ByteTokenizer()
VOCAB = TOKENIZER.vocab_size
PROCESSOR = OutputProcessor(TOKENIZER, frame_seconds=0.04)
#: First and last characters of two, three and four bytes, and common ones between them.
CHARACTERS = ["\u0080", "é", "\u07ff", "\u0800", "你", "\uffee", "\U00010000", "😀", "\U0010fffd"]


@pytest.fixture
def ctc():
    def build(vocab_size=VOCAB):
        model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=0, vocab_size=vocab_size)})
        return CtcStrategy(DecodeContext(model, TOKENIZER, CtcOptions()))

    return build


def spoken(text: str, gap: int = 1) -> list[Run]:
    """One frame for each byte, ``gap`` blank frames behind each."""
    return [run for token in TOKENIZER.encode(text) for run in (Run(token), Run(0, gap))]


def final(hyps: Hypotheses, duration: float = 100.0, options: DecodingOptions = WORDS) -> RequestOutput:
    return PROCESSOR.final("r", hyps, options, finish_reason="stop", duration=duration)


def test_case_03_a_ten_millisecond_clip_ends_after_ten_milliseconds(ctc):
    # Blaizzy/mlx-audio#928: the end is that of the audio, not of what it was padded to.
    (hyps,) = ctc().decode_offline(scripted_output([[Run(TOKENIZER.encode("a")[0])]], VOCAB), [WORDS])
    out = final(hyps, duration=160 / 16000)
    assert [(word.word, word.start, word.end) for word in out.words] == [("a", 0.0, 0.01)]
    assert out.segments[0].end == 0.01
    assert out.language is None
    assert "None" not in out.text


def test_case_17_results_own_their_memory(ctc):
    # NVIDIA-NeMo/Speech#12376: timestamps of all but the last batch were overwritten.
    strategy = ctc()
    scripts = [[Run(0, index), *spoken("abcdefghijkl"[: index + 1], gap=index + 1)] for index in range(12)]
    alone = [final(strategy.decode_offline(scripted_output([script], VOCAB), [WORDS])[0]) for script in scripts]
    kept = []
    for start in range(0, 12, 4):
        out = scripted_output(scripts[start : start + 4], VOCAB)
        kept += [final(hyps) for hyps in strategy.decode_offline(out, [WORDS] * 4)]
        out.log_probs.fill_(0.0)
    assert kept == alone
    assert len({tuple(out.timestamps) for out in kept}) == 12


def test_case_17_earlier_partials_stay_as_they_were(ctc):
    strategy = ctc()
    session, state = strategy.open(WORDS), PROCESSOR.open()
    kept, copies = [], []
    for letter in "abcd":
        hyps = strategy.decode_chunk([session], scripted_output([spoken(letter)], VOCAB), [letter == "d"])[0]
        kept.append(PROCESSOR.partial(state, "r", hyps, WORDS))
        copies.append(json.dumps(kept[-1].to_dict()))
    last = final(strategy.current(session))
    session.tokens.clear()
    state.timestamps.clear()
    assert [json.dumps(out.to_dict()) for out in kept] == copies
    assert [out.text for out in kept] == ["a", "ab", "abc", "abcd"]
    assert (last.text, len(last.timestamps), last.tokens) == ("abcd", 4, [TOKENIZER.encode("abcd")])


@pytest.mark.parametrize("silent_chunks", [0, 1, 5])
def test_case_22_silence_at_the_end_keeps_the_text(ctc, silent_chunks):
    # wenet-e2e/wenet#1657: the final is the accumulated text.
    strategy = ctc()
    session = strategy.open(WORDS)
    strategy.decode_chunk([session], scripted_output([spoken("hi")], VOCAB), [False])
    for _ in range(silent_chunks):
        strategy.decode_chunk([session], scripted_output([[Run(0, 16)]], VOCAB), [False])
    strategy.decode_chunk([session], scripted_output([[]], VOCAB), [True])
    hyps = strategy.current(session)
    assert final(hyps).text == "hi"
    assert hyps.trailing_silence_frames == 1 + 16 * silent_chunks


def test_case_26_silence_after_another_request_is_empty(ctc):
    # vllm-project/vllm#51376: silence gave the text of the request before.
    strategy = ctc()
    for letters, text in (("abc", "abc"), ("", ""), ("c", "c"), ("", "")):
        session = strategy.open(WORDS)
        for step in (spoken(letters), [Run(0, 8)]):
            strategy.decode_chunk([session], scripted_output([step], VOCAB), [False])
        out = final(strategy.current(session))
        strategy.close(session)
        assert (out.text, out.tokens, len(out.words)) == (text, [TOKENIZER.encode(text)], bool(text))


@pytest.mark.parametrize("frames", range(1, 6))
def test_cases_33_and_34_every_path_of_three_labels_collapses_right(ctc, frames):
    # espnet/espnet#1508 and wenet-e2e/wenet#2398: blank is never a token; "aa" needs a blank between.
    paths = list(itertools.product(range(3), repeat=frames))
    out = scripted_output([[Run(label) for label in path] for path in paths], 3)
    for path, hyps in zip(paths, ctc(3).decode_offline(out, [DecodingOptions()] * len(paths)), strict=True):
        assert hyps.best.tokens == [label for label, _ in itertools.groupby(path) if label != 0]


@pytest.mark.parametrize("frames", [1, 2, 15, 16, 17, 250])
def test_case_40_blank_alone_is_an_empty_transcript(ctc, frames):
    # k2-fsa/sherpa-onnx#2258: the same frames, all at once and one by one.
    strategy = ctc()
    (whole,) = strategy.decode_offline(scripted_output([[Run(0, frames)]], VOCAB), [WORDS])
    session = strategy.open(WORDS)
    for _ in range(frames):
        strategy.decode_chunk([session], scripted_output([[Run(0)]], VOCAB), [False])
    for hyps in (whole, strategy.current(session)):
        out = final(hyps)
        assert (out.text, out.words, out.segments, out.confidence) == ("", [], [], None)
        assert hyps.trailing_silence_frames == frames


@pytest.mark.parametrize("character", CHARACTERS)
def test_case_41_no_partial_ends_inside_a_character(ctc, character):
    # ggml-org/whisper.cpp#1798, absadiki/pywhispercpp#39: bytes of one character in several tokens and chunks.
    text = f"a{character}b {character}{character}"
    strategy = ctc()
    session, state = strategy.open(WORDS), PROCESSOR.open()
    before = ""
    for token in TOKENIZER.encode(text):
        hyps = strategy.decode_chunk([session], scripted_output([[Run(token), Run(0)]], VOCAB), [False])[0]
        out = PROCESSOR.partial(state, "r", hyps, WORDS)
        assert out.text.encode().decode() == out.text
        assert text.startswith(out.text)
        assert out.text.startswith(before)
        before = out.text
    out = final(strategy.current(session))
    assert before == out.text == text
    assert "".join(word.word for word in out.words) == "".join(text.split())


@pytest.mark.parametrize(("character", "kept"), [(c, kept) for c in CHARACTERS for kept in range(1, len(c.encode()))])
def test_case_41_a_character_cut_off_at_the_end_is_one_replacement(character, kept):
    tokens = TOKENIZER.encode("ab" + character)[: 2 + kept]
    hyps = Hypotheses([Hypothesis(tokens, list(range(len(tokens))), [-0.1] * len(tokens))])
    state = PROCESSOR.open()
    assert PROCESSOR.partial(state, "r", hyps, WORDS).text == "ab"
    out = final(hyps)
    assert out.text == "ab\ufffd"
    assert [word.word for word in out.words] == ["ab\ufffd"]


def test_case_44_every_output_is_plain(ctc):
    # NVIDIA-NeMo/Speech#14714, #8451: timestamps of tensor types could not be serialised.
    strategy = ctc()
    session, state = strategy.open(WORDS), PROCESSOR.open()
    (hyps,) = strategy.decode_chunk([session], scripted_output([spoken("ab é")], VOCAB), [True])
    for out in (PROCESSOR.partial(state, "r", hyps, WORDS), final(hyps), final(hyps, options=DecodingOptions())):
        again = json.loads(json.dumps(out.to_dict(), allow_nan=False))
        assert again["tokens"] == [TOKENIZER.encode("ab é")]
        assert type(out.scores[0]) is float
        assert all(type(time) is float for time in out.timestamps)
        assert all(type(token) is int for token in out.tokens[0])


def test_case_52_no_silent_cap_of_tokens(ctc):
    # A decoder that stopped after 200 tokens without saying so.
    text = "ab" * 125
    strategy = ctc()
    (hyps,) = strategy.decode_offline(scripted_output([spoken(text)], VOCAB), [WORDS])
    assert final(hyps).text == text
    session = strategy.open(WORDS)
    for start in range(0, 250, 10):
        strategy.decode_chunk([session], scripted_output([spoken(text[start : start + 10])], VOCAB), [False])
    assert strategy.current(session).best.tokens == TOKENIZER.encode(text)
