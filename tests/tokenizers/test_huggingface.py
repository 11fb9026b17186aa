from __future__ import annotations

import itertools
import json
import re
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.errors import CheckpointError, MissingExtraError, RequestRefusedError
from oasr_core.registry import registry
from oasr_core.tokenizers.byte_level import token_bytes
from oasr_core.tokenizers.huggingface import HuggingFaceTokenizer

ids_and_cuts = st.tuples(st.lists(st.integers(0, 2**20), max_size=24), st.lists(st.integers(0, 24), max_size=6))
texts = st.text(st.sampled_from("abcdefghij  äß日本語😀👩\u200d🚀\u0301"), max_size=20)
words = st.lists(st.text(st.sampled_from("abcdefghij"), min_size=1, max_size=4), min_size=1, max_size=5).map(" ".join)

FIXTURES = ("nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt")
BYTE_LEVEL_FIXTURES = ("qwen2_audio", "qwen3_asr", "whisper_multilingual")


def read(path, config=None, **options):
    files = {"tokenizer": path} if config is None else {"tokenizer": path, "config": config}
    return HuggingFaceTokenizer.from_spec(TokenizerSpec("huggingface", files, options))


def split(ids, cuts):
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


def grown(tokenizer, parts):
    decoder = tokenizer.incremental()
    return "".join([decoder.push(part) for part in parts] + [decoder.flush()])


# --- text ------------------------------------------------------------------------------------------------------------


@given(drawn=ids_and_cuts)
def test_three_views_agree_on_any_ids(library_pair, drawn):
    tokenizer, _ = library_pair
    ids = [index % tokenizer.vocab_size for index in drawn[0]]
    text = tokenizer.decode(ids)
    assert "".join(tokenizer.token_pieces(ids)) == text
    assert len(tokenizer.token_pieces(ids)) == len(ids)
    assert grown(tokenizer, split(ids, drawn[1])) == text
    assert grown(tokenizer, [[index] for index in ids]) == text


@given(drawn=st.lists(st.integers(0, 2**20), max_size=24))
def test_text_is_the_librarys_where_bytes_form_characters(library_pair, drawn):
    tokenizer, library = library_pair
    ids = [index % tokenizer.vocab_size for index in drawn]
    broken = "\ufffd" in library.decode(ids, skip_special_tokens=True)
    if not broken or tokenizer._vocabulary.is_byte_level:
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


@given(text=texts, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_any_text_survives_bytes_and_any_split(library_files, text, cuts):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = cached(library_files[kind])
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text == grown(tokenizer, split(ids, cuts))


@given(text=texts)
def test_a_partial_never_shows_a_broken_character(library_files, text):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = cached(library_files[kind])
        decoder = tokenizer.incremental()
        for index in tokenizer.encode(text):
            assert "\ufffd" not in decoder.push([index])
        assert decoder.flush() == ""


@given(text=words)
def test_words_survive_every_kind(library_pair, text):
    tokenizer, library = library_pair
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


_CACHE: dict = {}


def cached(path):
    if path not in _CACHE:
        _CACHE[path] = read(path)
    return _CACHE[path]


def ids_of_bytes(tokenizer, content: bytes, kind):
    if kind == "byte_fallback":
        return [tokenizer.token_id(f"<0x{byte:02X}>") for byte in content]
    spelled = {token_bytes(token): index for token, index in tokenizer._vocabulary.ids.items() if len(token) == 1}
    return [spelled[bytes([byte])] for byte in content]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_wait_until_they_form_a_character(library_files, kind):
    tokenizer = cached(library_files[kind])
    ids = ids_of_bytes(tokenizer, "日😀".encode(), kind)
    decoder = tokenizer.incremental()
    assert [decoder.push([index]) for index in ids] == ["", "", "日", "", "", "", "😀"]
    assert tokenizer.token_pieces(ids) == ["", "", "日", "", "", "", "😀"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_that_never_form_a_character_become_one_replacement(library_files, kind):
    tokenizer = cached(library_files[kind])
    ids = ids_of_bytes(tokenizer, "日".encode()[:2], kind)
    decoder = tokenizer.incremental()
    assert decoder.push(ids) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert tokenizer.token_pieces(ids) == ["", "\ufffd"]
    assert tokenizer.decode([*ids, tokenizer.token_id("a")]) == "\ufffda"
    special = tokenizer.token_id("<|endoftext|>")
    whole = ids_of_bytes(tokenizer, "日".encode(), kind)
    assert tokenizer.decode([whole[0], special, *whole[1:]]) == "日"


def test_special_ids_are_the_added_tokens_flagged_so(library_pair):
    tokenizer, library = library_pair
    flagged = {index for index, token in library.get_added_tokens_decoder().items() if token.special}
    assert tokenizer.special_ids == flagged
    assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)
    end, plain = tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<plain>")
    assert tokenizer.decode([end, plain, end]) == "<plain>"
    assert tokenizer.token_id("<none>") is None


def test_text_that_spells_a_special_token_stays_text(library_files):
    tokenizer = cached(library_files["byte_level"])
    ids = tokenizer.encode("a<|endoftext|>b")
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


@pytest.mark.parametrize("kind", ["metaspace", "word_pieces"])
def test_what_the_model_cannot_spell_is_refused(library_files, kind):
    with pytest.raises(RequestRefusedError, match=rf"'ab 😀' cannot be encoded.*{kind}\.json"):
        cached(library_files[kind]).encode("ab 😀")


def test_bytes_that_the_vocabulary_lacks_are_refused(library_files, tmp_path):
    content = json.loads(library_files["byte_level"].read_text())
    vocab = content["model"]["vocab"]
    vocab["☃"] = vocab.pop("z")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(RequestRefusedError, match=r"'az' cannot be encoded: .* would give 'a'"):
        read(tmp_path / "tokenizer.json").encode("az")


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIXTURES, *BYTE_LEVEL_FIXTURES])
def test_checkpoints_round_trip_as_with_the_library(shared_fixtures, name):
    folder = shared_fixtures / "hf_tiny" / name
    tokenizer = read(folder / "tokenizer.json", folder / "tokenizer_config.json")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "hello world" if name in FIXTURES else "hello  wörld, 日本 👩\u200d🚀"
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text == grown(tokenizer, [[index] for index in ids])
    ids = list(range(tokenizer.vocab_size))
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_texts_of_a_ctc_checkpoint(shared_fixtures):
    folder = shared_fixtures / "hf_tiny" / "parakeet_ctc"
    oracle = json.loads((folder / "oracle.json").read_text())
    tokenizer = read(folder / "tokenizer.json")
    for best, text in zip(oracle["generate"], oracle["text"], strict=True):
        assert tokenizer.decode([index for index, _ in itertools.groupby(best)]) == text


@pytest.mark.parametrize(("name", "audio"), [("qwen2_audio", "<|AUDIO|>"), ("qwen3_asr", "<|audio_pad|>")])
def test_prompts_are_built_from_texts_and_special_ids(shared_fixtures, name, audio):
    folder = shared_fixtures / "hf_tiny" / name
    oracle = json.loads((folder / "oracle.json").read_text())
    tokenizer = read(folder / "tokenizer.json", folder / "tokenizer_config.json")
    prompt = (oracle if name == "qwen2_audio" else oracle["single0"])["prompt_text"][0]
    ids = []
    for part in re.split(r"(<\|\w+\|>)", prompt):
        special = tokenizer.token_id(part)
        ids += tokenizer.encode(part) if special is None else [special]
    expected = [
        index
        for index, run in itertools.groupby(oracle["single0"]["input_ids"][0])
        for _ in ([0] if index == tokenizer.token_id(audio) else run)
    ]
    assert ids == expected


def write_config(folder, tokens):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": tokens}))
    return path


def test_added_tokens_of_the_config_are_merged(library_files, tmp_path):
    path = library_files["byte_level"]
    size = read(path).vocab_size
    config = write_config(
        tmp_path,
        {
            str(size + 1): {"content": "<text>", "special": False},
            str(size): {"content": "<|audio|>", "special": True},
            str(size - 1): {"content": "<plain>", "special": True},
        },
    )
    tokenizer = read(path, config)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.token_id("<|audio|>") == size
    assert tokenizer.special_ids == {size - 2, size - 1, size}
    assert tokenizer.decode([size, size + 1, size - 1]) == "<text>"


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (0, "<|endoftext|>", r"gives '<\|endoftext\|>' the id \d+, but .* its id is \d+ and id \d+ is None"),
        (-1, "<other>", r"gives '<other>' the id \d+, but .* its id is None and id \d+ is '<plain>'"),
        (5, "<other>", r"gives '<other>' the id \d+, but .* and id \d+ is None"),
    ],
)
def test_ids_that_differ_between_the_files_are_told(library_files, tmp_path, offset, content, reason):
    path = library_files["byte_level"]
    config = write_config(tmp_path, {str(read(path).vocab_size + offset): {"content": content}})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json {reason}"):
        read(path, config)


@pytest.mark.parametrize("tokens", [[], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"content": 3}}])
def test_a_config_of_another_form_is_refused(library_files, tmp_path, tokens):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*added_tokens_decoder"):
        read(library_files["byte_level"], write_config(tmp_path, tokens))


def test_a_config_without_added_tokens_changes_nothing(library_files, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    path = library_files["byte_level"]
    assert read(path, tmp_path / "tokenizer_config.json").special_ids == read(path).special_ids


def test_rows_of_the_weights_without_a_token_spell_nothing(library_files):
    path = library_files["metaspace"]
    own = read(path).vocab_size
    tokenizer = read(path, vocab_size=own + 3)
    assert tokenizer.vocab_size == own + 3
    assert {own, own + 1, own + 2} < tokenizer.special_ids
    assert tokenizer.decode([own, *tokenizer.encode("ab"), own + 2]) == "ab"
    with pytest.raises(CheckpointError, match=rf"ids up to {own - 1}, the weights have {own - 1}"):
        read(path, vocab_size=own - 1)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_id_of_another_model_is_refused(library_files, kind, index):
    with pytest.raises(CheckpointError, match=rf"Token id {index} is not in .*{kind}\.json"):
        cached(library_files[kind]).decode([index])


def test_a_decoder_that_merges_repeats_is_refused(library_files, tmp_path):
    content = json.loads(library_files["byte_level"].read_text())
    content["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"CTC decoder.*symbol_table"):
        read(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"line 1: not JSON"),
        (b'{"model":\n {"type": ', r"line 2: not JSON .* is the file complete\?"),
        (b"\xff", r"not UTF-8 text \(byte 0\)"),
        (b"[]", r"has no 'model'"),
        (b'{"model": {"type": "Martian"}}', r"not read by tokenizers"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content, reason):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{reason}"):
        read(tmp_path / "tokenizer.json")


def test_a_missing_file_and_wrong_roles_and_options_are_refused(tmp_path, library_files):
    with pytest.raises(CheckpointError, match=r"gone\.json cannot be read"):
        read(tmp_path / "gone.json")
    with pytest.raises(CheckpointError, match=r"needs 'tokenizer' and knows \['config', 'tokenizer'\]"):
        HuggingFaceTokenizer.from_spec(TokenizerSpec("huggingface", {"model": tmp_path}))
    with pytest.raises(CheckpointError, match=r"colour: Extra inputs.*Options are: vocab_size"):
        read(library_files["byte_level"], colour=1)


def test_without_the_library_the_extra_is_named(monkeypatch, library_files):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"package tokenizers.*oasr-core\[huggingface\]"):
        read(library_files["byte_level"])


def test_it_is_on_the_axis():
    assert registry("tokenizers").get("huggingface") is HuggingFaceTokenizer
