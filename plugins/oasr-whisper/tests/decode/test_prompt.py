"""What the decoder is given before it generates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_whisper.prompt import PromptBuilder


def encode(text):
    if "?" in text:
        raise RequestRefusedError("no id for ?")
    return [ord(char) % 32 for char in text]


@pytest.fixture(scope="module")
def ids(whisper_tokens):
    return whisper_tokens()


@pytest.fixture(scope="module")
def builder(whisper_tokens):
    """``builder(multilingual=True, positions=60) -> PromptBuilder``."""

    def build(*, multilingual=True, positions=60):
        return PromptBuilder(whisper_tokens(multilingual=multilingual), SimpleNamespace(encode=encode), positions)

    return build


def test_language_and_task_follow_the_start(ids, builder):
    prompts = builder()
    german = prompts.build(DecodingOptions(), "de", timestamps=False)
    assert german == ([ids.sot, ids.language_ids["de"], ids.transcribe, ids.no_timestamps], 0)
    translated = prompts.build(DecodingOptions(task="translate"), "ja", timestamps=True)
    assert translated.tokens == [ids.sot, ids.language_ids["ja"], ids.translate]


def test_english_only_models_know_neither(ids, builder):
    prompts = builder(multilingual=False)
    assert prompts.build(DecodingOptions(), "en", timestamps=True).tokens == [ids.sot]
    asked = DecodingOptions(language="en", task="transcribe")
    prompts.validate(asked)
    assert prompts.build(asked, "en", timestamps=False).tokens == [ids.sot, ids.no_timestamps]


def test_earlier_text_comes_first(ids, builder):
    options = DecodingOptions(prompt="  ab ", hotwords=("xy", "z "), context_tokens=(7, ids.timestamp_begin + 3))
    made = builder().build(options, "en", timestamps=False)
    context = [*encode(" xy, z"), *encode(" ab"), 7, ids.timestamp_begin + 3]
    assert made.tokens[: made.sot] == [ids.sot_prev, *context]
    assert made.tokens[made.sot] == ids.sot
    assert builder().ceiling(options) == len(made.tokens)


def test_the_latest_of_a_long_context_is_kept(ids, builder):
    prompts = builder(positions=20)
    made = prompts.build(DecodingOptions(prompt="abcdefghijklm"), "en", timestamps=True)
    assert made.tokens[1 : made.sot] == encode("efghijklm")
    made = prompts.build(DecodingOptions(prompt="abcdefghijklm", hotwords=("xyz",)), "en", timestamps=True)
    assert made.tokens[1 : made.sot] == [*encode(" xyz"), *encode("ijklm")]
    made = prompts.build(DecodingOptions(prompt="abc", hotwords=("x" * 30,)), "en", timestamps=True)
    assert made.tokens[1 : made.sot] == encode(" " + "x" * 8)


def test_blank_prompts_are_none(ids, builder):
    assert builder().build(DecodingOptions(prompt="  "), "en", timestamps=True).sot == 0


@pytest.mark.parametrize("multilingual", [True, False])
def test_ceilings_hold_for_every_prompt(builder, multilingual):
    prompts = builder(multilingual=multilingual)
    for options in (DecodingOptions(), DecodingOptions(prompt="abc"), DecodingOptions(prompt="a" * 100)):
        longest = len(prompts.build(options, "de" if multilingual else "en", timestamps=False).tokens)
        assert prompts.ceiling(options) == longest


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"language": "fr"}, "'fr' is not one of this checkpoint's: de, en, ja"),
        ({"language": "EN"}, "'EN' is not one"),
        ({"task": "sing"}, "tasks are transcribe and translate"),
        ({"hotwords": ({"phrase": "xy", "boost": 2.0},)}, r"hotwords \['xy'\] have a boost"),
        ({"prompt": "what?"}, "no id"),
        ({"hotwords": ("what?",)}, "no id"),
    ],
)
def test_what_the_checkpoint_does_not_know_is_refused(builder, options, match):
    with pytest.raises(RequestRefusedError, match=match):
        builder().validate(DecodingOptions(**options))


def test_what_english_only_models_do_not_know_is_refused(builder):
    prompts = builder(multilingual=False)
    with pytest.raises(RequestRefusedError, match="'de' is not one of this checkpoint's: en"):
        prompts.validate(DecodingOptions(language="de"))
    with pytest.raises(RequestRefusedError, match="needs a multilingual checkpoint"):
        prompts.validate(DecodingOptions(task="translate"))


def test_context_holds_no_control_tokens(ids, builder):
    for token in (ids.eot, ids.no_timestamps, 10**6):
        with pytest.raises(RequestRefusedError, match="no text and no timestamps"):
            builder().validate(DecodingOptions(context_tokens=(1, token)))
    builder().validate(DecodingOptions(context_tokens=(1, ids.timestamp_begin)))
