from __future__ import annotations

import itertools
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.errors import CheckpointError, MissingExtraError, RequestRefusedError
from oasr_core.registry import registry
from oasr_core.tokenizers.whisper import WhisperTokenizer, read_vocabulary

texts = st.text(st.sampled_from("abcdefghij  äß日本語😀👩\u200d🚀\u0301"), max_size=20)
SOURCES = (("tokenizer.json",), ("vocabulary.txt",), ("vocabulary.json",), ("tokenizer.json", "vocabulary.txt"))


def read(*paths, **options):
    files = {path.stem.removeprefix("tokenizer_"): path for path in paths}
    return WhisperTokenizer.from_spec(TokenizerSpec("whisper", files, options))


@pytest.fixture(scope="session", params=SOURCES, ids=" ".join)
def made(request, whisper_files):
    return read(*(whisper_files[name] for name in request.param))


@pytest.fixture(scope="session")
def encoder(whisper_files):
    return read(whisper_files["tokenizer.json"])


def grown(tokenizer, ids, cuts):
    decoder = tokenizer.incremental()
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [decoder.push(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    return "".join([*parts, decoder.flush()])


# --- text ------------------------------------------------------------------------------------------------------------


@given(drawn=st.lists(st.integers(0, 2**20), max_size=24), cuts=st.lists(st.integers(0, 24), max_size=6))
def test_three_views_agree_on_any_ids(made, drawn, cuts):
    ids = [index % made.vocab_size if index % 3 else index % made.eot_id for index in drawn]
    text = made.decode(ids)
    assert not text.startswith(" ")
    assert "".join(made.token_pieces(ids)) == text
    assert len(made.token_pieces(ids)) == len(ids)
    assert grown(made, ids, cuts) == text
    assert grown(made, ids, range(24)) == text


@given(text=texts, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_any_text_survives_every_source_and_split(made, encoder, text, cuts):
    ids = encoder.encode(text)
    assert made.decode(ids) == text.lstrip(" ") == grown(made, ids, cuts)


@given(text=texts)
def test_a_partial_never_shows_a_broken_character(made, encoder, text):
    decoder = made.incremental()
    for index in encoder.encode(text):
        assert "\ufffd" not in decoder.push([index])
    assert decoder.flush() == ""


@given(text=texts, places=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**20)), max_size=8))
def test_controls_and_timestamps_spell_nothing_wherever_they_stand(made, encoder, text, places):
    ids = encoder.encode(text)
    for place, drawn in places:
        ids.insert(place, made.eot_id + drawn % (made.vocab_size - made.eot_id))
    assert made.decode(ids) == text.lstrip(" ")


def test_leading_spaces_go_and_pieces_keep_the_others(made, encoder):
    ids = [made.sot_id, made.timestamp_begin, *encoder.encode(" ab"), made.timestamp_begin + 9, *encoder.encode(" c")]
    assert made.decode(ids) == "ab c"
    pieces = made.token_pieces(ids)
    assert pieces[:2] == ["", ""]
    assert "".join(pieces[:-1]).rstrip() == "ab"
    assert made.decode(encoder.encode("   ab ")) == "ab "
    assert made.decode(encoder.encode("   ")) == ""


def test_bytes_that_never_form_a_character_become_one_replacement(made, encoder):
    ids = encoder.encode(" 😀")
    broken = ids[: next(n for n in range(len(ids), 0, -1) if made.decode(ids[:n]) != "😀")]
    decoder = made.incremental()
    assert decoder.push(broken) == ""
    assert decoder.flush() == "\ufffd"
    assert made.token_pieces(broken)[-1] == "\ufffd"


# --- control tokens --------------------------------------------------------------------------------------------------


def test_ids_by_name(made, whisper_files):
    tokens = json.loads(whisper_files["vocabulary.json"].read_text())
    assert made.vocab_size == len(tokens)
    named = {
        "<|endoftext|>": made.eot_id,
        "<|startoftranscript|>": made.sot_id,
        "<|startofprev|>": made.sot_prev_id,
        "<|nospeech|>": made.no_speech_id,
        "<|notimestamps|>": made.no_timestamps_id,
        "<|0.00|>": made.timestamp_begin,
    }
    assert {tokens[index]: index for index in named.values()} == named
    assert {code: tokens[index] for code, index in made.language_ids.items()} == {
        "en": "<|en|>",
        "zh": "<|zh|>",
        "de": "<|de|>",
    }
    assert {task: tokens[index] for task, index in made.task_ids.items()} == {
        "translate": "<|translate|>",
        "transcribe": "<|transcribe|>",
    }
    assert made.is_multilingual
    assert made.special_ids == set(range(made.eot_id, len(tokens)))


def test_timestamps(made, whisper_files):
    tokens = json.loads(whisper_files["vocabulary.json"].read_text())
    for index in range(made.timestamp_begin, len(tokens)):
        assert made.is_timestamp(index)
        assert f"<|{made.timestamp_seconds(index):.2f}|>" == tokens[index]
    for index in (-1, 0, made.timestamp_begin - 1, made.vocab_size):
        assert not made.is_timestamp(index)
        with pytest.raises(CheckpointError, match=f"Token id {index} is no timestamp; those are"):
            made.timestamp_seconds(index)


def test_the_early_name_of_no_speech(whisper_files, tmp_path):
    text = whisper_files["vocabulary.txt"].read_text(encoding="utf-8")
    (tmp_path / "vocabulary.txt").write_text(text.replace("<|nospeech|>", "<|nocaptions|>"), encoding="utf-8")
    assert read(tmp_path / "vocabulary.txt").no_speech_id == read(whisper_files["vocabulary.txt"]).no_speech_id


def test_options(whisper_files):
    path = whisper_files["tokenizer.json"]
    own = read(path)
    assert read(path, multilingual=False).language_ids == {}
    assert read(path, multilingual=False).task_ids == {}
    padded = read(path, vocab_size=own.vocab_size + 7)
    assert padded.special_ids - own.special_ids == set(range(own.vocab_size, own.vocab_size + 7))
    assert padded.timestamp_end == own.timestamp_end == own.vocab_size
    short = read(path, vocab_size=own.timestamp_begin + 10)
    assert (short.vocab_size, short.timestamp_end) == (own.timestamp_begin + 10,) * 2
    moved = read(path, timestamp_begin=own.timestamp_begin + 4)
    assert moved.timestamp_seconds(own.timestamp_begin + 5) == 0.02
    assert moved.special_ids == set(range(own.eot_id, own.vocab_size + 4))
    with pytest.raises(CheckpointError, match=r"the weights have 20"):
        read(path, vocab_size=20)
    with pytest.raises(CheckpointError, match=r"timestamp_begin=3, but in .* the id of <\|0\.00\|> is"):
        read(whisper_files["vocabulary.txt"], timestamp_begin=3)


# --- encoding --------------------------------------------------------------------------------------------------------


def test_a_list_of_tokens_cannot_encode(whisper_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    listed = read(whisper_files["vocabulary.json"])
    assert not listed.supports_encode
    with pytest.raises(RequestRefusedError, match=r"vocabulary\.json lists .* ships no tokenizer\.json"):
        listed.encode("a")
    with pytest.raises(MissingExtraError, match=r"oasr-core\[huggingface\]"):
        read(whisper_files["tokenizer.json"])


def test_prompts_cannot_smuggle_control_tokens_in(encoder, shared_fixtures):
    assert encoder.supports_encode
    ids = encoder.encode(" a <|endoftext|> <|en|>")
    assert not encoder.special_ids & set(ids)
    assert encoder.decode(ids) == "a <|endoftext|> <|en|>"
    with_timestamps = read(shared_fixtures / "hf_tiny" / "whisper_multilingual" / "tokenizer.json")
    with pytest.raises(RequestRefusedError, match=r"<\|1\.00\|> is a control token; leave it out"):
        with_timestamps.encode("a <|1.00|>")


# --- files -----------------------------------------------------------------------------------------------------------


def test_line_ends_and_the_empty_token_of_multilingual_vocabularies(tmp_path):
    path = tmp_path / "vocabulary.txt"
    path.write_bytes("a\r\nĠb\r\n\r\n<|endoftext|>\r\n".encode())
    assert read_vocabulary(path) == ["a", "Ġb", "", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("vocabulary.txt", b"", "is empty; expected one token a line"),
        ("vocabulary.txt", b"a\n\xff\n", r"is not UTF-8 text \(byte 2\)"),
        ("vocabulary.txt", b"a\nb\n", r"has no token <\|endoftext\|>, so it is not of a Whisper model"),
        ("vocabulary.json", b"[", "not JSON"),
        ("vocabulary.json", b"[]", "a list of tokens is expected"),
        ("vocabulary.json", b'{"a": 0}', "a list of tokens is expected"),
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}.*{reason}"):
        read(tmp_path / name)


def test_files_of_different_checkpoints_are_told(whisper_files, tmp_path):
    tokens = json.loads(whisper_files["vocabulary.json"].read_text())
    tokens[70], tokens[71] = tokens[71], tokens[70]
    (tmp_path / "vocabulary.json").write_text(json.dumps(tokens))
    with pytest.raises(CheckpointError, match=r"Token id 70 is .* but spells .*different checkpoints"):
        read(whisper_files["tokenizer.json"], tmp_path / "vocabulary.json")


def test_missing_files_and_wrong_roles_and_options_are_refused(tmp_path, whisper_files, library_files):
    with pytest.raises(CheckpointError, match=r"vocabulary\.txt cannot be read"):
        read(tmp_path / "vocabulary.txt")
    for files in ({}, {"config": tmp_path}, {"model": tmp_path}, {"vocabulary": tmp_path, "config": tmp_path}):
        with pytest.raises(CheckpointError, match=r"knows \['config', 'tokenizer', 'vocabulary'\]"):
            WhisperTokenizer.from_spec(TokenizerSpec("whisper", files))
    with pytest.raises(CheckpointError, match=r"Options are: vocab_size, timestamp_begin, multilingual"):
        read(whisper_files["tokenizer.json"], colour=1)
    with pytest.raises(CheckpointError, match="no ByteLevel decoder"):
        WhisperTokenizer.from_spec(TokenizerSpec("whisper", {"tokenizer": library_files["metaspace"]}))


@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_id_of_another_model_is_refused(encoder, index):
    with pytest.raises(CheckpointError, match=rf"Token id {index} is not in .*tokenizer\.json"):
        encoder.decode([index])


def test_it_is_on_the_axis():
    assert registry("tokenizers").get("whisper") is WhisperTokenizer


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("tokenizer.json", "vocabulary.txt"), ("tokenizer.json",), ("vocabulary.txt",)], ids=" ".join
)
def test_tiny_en(tiny_en, shared_fixtures, names):
    made = read(*(tiny_en / name for name in names), vocab_size=51864)
    assert (made.eot_id, made.sot_id, made.sot_prev_id, made.no_speech_id) == (50256, 50257, 50360, 50361)
    assert (made.no_timestamps_id, made.timestamp_begin, made.vocab_size) == (50362, 50363, 51864)
    assert (made.is_multilingual, dict(made.language_ids), dict(made.task_ids)) == (False, {}, {})
    assert made.timestamp_seconds(51863) == 30.0
    seen = 0
    for path in (shared_fixtures / "whisper_tiny_en" / "oracle").glob("*.json"):
        for windows in json.loads(path.read_text()).get("conventions", {}).values():
            for window in windows:
                for run in window.values():
                    if isinstance(run, dict):
                        text = [index for index in run["ids"] if not made.is_timestamp(index)]
                        assert made.decode(text).rstrip() == run["text"].strip()
                        assert made.decode(run["ids"]) == made.decode(text)
                        if made.supports_encode and "greedy" in run:
                            assert made.encode(run["text"]) == text
                        seen += 1
    assert seen > 20


@pytest.mark.parametrize("folder", ["whisper_multilingual", "whisper_multilingual_ct2/float16"])
def test_the_small_multilingual_checkpoint(shared_fixtures, folder):
    folder = shared_fixtures / "hf_tiny" / folder
    made = read(*(folder / name for name in ("tokenizer.json", "vocabulary.txt") if (folder / name).exists()))
    oracle = json.loads((shared_fixtures / "hf_tiny" / "whisper_multilingual" / "oracle.json").read_text())
    assert made.vocab_size == 1917
    assert list(made.language_ids) == list(oracle["language_probs"][0])
    assert [made.language_ids["en"]] * 2 == oracle["detect_language_ids"]
    prompt = oracle["generate"]["greedy_en_prompt"]["sequences"][0]
    start = prompt.index(made.sot_id)
    assert prompt[0] == made.sot_prev_id
    assert made.encode(" hello world") == prompt[1:start]
    assert prompt[start + 1 : start + 4] == [
        made.language_ids["en"],
        made.task_ids["transcribe"],
        made.no_timestamps_id,
    ]
