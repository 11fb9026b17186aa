"""The random multilingual model against transformers and CTranslate2 (``hf_tiny/whisper_multilingual*/ORACLE.md``)."""

from __future__ import annotations

import json

import pytest

from oasr_core.request import DecodingOptions

NEW = 24  # ids that transformers generated
CT2_NEW = 28  # ids that CTranslate2 generated


@pytest.fixture(scope="module")
def reference(shared_fixtures):
    return json.loads((shared_fixtures / "hf_tiny" / "whisper_multilingual" / "oracle.json").read_text())


@pytest.fixture(scope="module")
def clips(tiny_multilingual, shared_fixtures, reference):
    return tiny_multilingual.hear(*(shared_fixtures / "audio" / name for name in reference["audio"]))


def generate(whisper, clips, options, **settings):
    strategy = whisper.strategy(**{"max_new_tokens": NEW, "no_speech_gate": False, **settings})
    return strategy.decode_offline(clips, [options] * 2)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("plain_greedy_en", {"language": "en"}),
        ("plain_greedy_zh_translate", {"language": "zh", "task": "translate"}),
    ],
)
def test_greedy_ids_and_log_posteriors(tiny_multilingual, clips, reference, key, options):
    for hyps, wanted in zip(
        generate(tiny_multilingual, clips, DecodingOptions(**options)), reference["generate"][key], strict=True
    ):
        assert hyps.best.tokens == wanted["ids"]
        assert hyps.best.token_log_probs == pytest.approx(wanted["logprobs"], abs=1e-3)
        assert hyps.language == options["language"]


@pytest.mark.parametrize(
    ("key", "options", "beam"),
    [
        ("greedy_en_transcribe", {"language": "en", "task": "transcribe"}, 1),
        ("greedy_de_translate", {"language": "de", "task": "translate"}, 1),
        ("greedy_auto", {}, 1),
        ("greedy_en_prompt", {"language": "en", "prompt": "hello world"}, 1),
        ("beam4_en_transcribe", {"language": "en"}, 4),
    ],
)
def test_sequences_of_transformers(tiny_multilingual, clips, reference, key, options, beam):
    found = generate(tiny_multilingual, clips, DecodingOptions(**options), beam_size=beam)
    for hyps, sequence in zip(found, reference["generate"][key]["sequences"], strict=True):
        assert hyps.best.tokens == sequence[-NEW:]


def test_detected_languages(tiny_multilingual, clips, reference):
    found = generate(tiny_multilingual, clips, DecodingOptions())
    for hyps, wanted in zip(found, reference["language_probs"], strict=True):
        assert hyps.language == max(wanted, key=wanted.get)
        assert hyps.language_prob == pytest.approx(wanted[hyps.language], abs=1e-3)


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("quantization", ["float32", "float16"])
def test_results_of_ctranslate2(load_whisper, shared_fixtures, quantization, beam):
    directory = shared_fixtures / "hf_tiny" / "whisper_multilingual_ct2"
    reference = json.loads((directory / "oracle.json").read_text())
    whisper = load_whisper(directory / quantization)
    clips = whisper.hear(*(shared_fixtures / "audio" / name for name in reference["audio"]))
    for key, options in (
        ("en", {"language": "en"}),
        ("zh_translate", {"language": "zh", "task": "translate"}),
        ("en_timestamps", {"language": "en", "segment_timestamps": True}),
    ):
        found = generate(whisper, clips, DecodingOptions(**options), beam_size=beam, max_new_tokens=CT2_NEW)
        for hyps, wanted in zip(found, reference[quantization][f"{key}_beam{beam}"], strict=True):
            assert hyps.best.tokens == wanted["ids"]
            assert hyps.best.score == pytest.approx(wanted["score"], abs=1e-3)
            assert hyps.no_speech_prob == pytest.approx(wanted["no_speech_prob"], abs=1e-6)
            assert hyps.reached_cap
