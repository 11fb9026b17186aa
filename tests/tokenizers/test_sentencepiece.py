from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.errors import CheckpointError, RequestRefusedError
from oasr_core.registry import registry
from oasr_core.tokenizers.sentencepiece import SentencePieceTokenizer

ids_and_cuts = st.tuples(st.lists(st.integers(0, 2**20), max_size=24), st.lists(st.integers(0, 24), max_size=6))
texts = st.text(st.sampled_from("abcdefghij  äß日本語😀\u0301"), max_size=20)


def split(ids, cuts):
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(bounds)]


def decodes_incrementally(tokenizer, parts):
    """Push ``parts``; no string that comes out may end inside a character."""
    decoder = tokenizer.incremental()
    pieces = [decoder.push(part) for part in parts] + [decoder.flush()]
    return "".join(pieces)


@given(drawn=ids_and_cuts)
def test_three_views_agree_on_any_ids(sentencepiece_pair, drawn):
    tokenizer, _ = sentencepiece_pair
    ids = [index % tokenizer.vocab_size for index in drawn[0]]
    text = tokenizer.decode(ids)
    assert "".join(tokenizer.token_pieces(ids)) == text
    assert len(tokenizer.token_pieces(ids)) == len(ids)
    assert decodes_incrementally(tokenizer, split(ids, drawn[1])) == text
    assert decodes_incrementally(tokenizer, [[index] for index in ids]) == text


@given(drawn=st.lists(st.integers(0, 2**20), max_size=24))
def test_decode_equals_sentencepiece_where_bytes_form_characters(sentencepiece_pair, drawn):
    tokenizer, processor = sentencepiece_pair
    ids = [index % tokenizer.vocab_size for index in drawn]
    ids = [index for index in ids if not processor.is_byte(index) and index not in tokenizer.special_ids]
    assert tokenizer.decode(ids) == processor.decode(ids)


@given(text=texts, cuts=st.lists(st.integers(0, 24), max_size=6))
def test_texts_survive_encoding_and_any_split(sentencepiece_pair, text, cuts):
    tokenizer, processor = sentencepiece_pair
    ids = tokenizer.encode(text)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == processor.decode(ids) == decodes_incrementally(tokenizer, split(ids, cuts))


@given(text=texts)
def test_a_partial_never_shows_a_broken_character(sentencepiece_pair, text):
    tokenizer, _ = sentencepiece_pair
    decoder = tokenizer.incremental()
    for index in tokenizer.encode(text):
        assert "\ufffd" not in decoder.push([index])
    assert decoder.flush() == ""


@pytest.fixture
def bpe(model_files):
    return SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", {"model": model_files["bpe"]}))


def byte_ids(tokenizer, content: bytes) -> list[int]:
    processor = tokenizer._processor
    return [processor.piece_to_id(f"<0x{byte:02X}>") for byte in content]


def test_bytes_wait_until_they_form_a_character(bpe):
    decoder = bpe.incremental()
    assert [decoder.push([index]) for index in byte_ids(bpe, "日".encode())] == ["", "", "日"]
    assert decoder.flush() == ""
    assert [len(piece) for piece in bpe.token_pieces(byte_ids(bpe, "😀".encode()))] == [0, 0, 0, 1]


def test_bytes_that_never_form_a_character_become_one_replacement(bpe):
    decoder = bpe.incremental()
    ids = byte_ids(bpe, "日".encode()[:2])
    assert decoder.push(ids) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert bpe.token_pieces(ids) == ["", "\ufffd"]
    letter = bpe._processor.piece_to_id("a")
    assert bpe.decode([*ids, letter]) == "\ufffda"
    assert bpe.decode(byte_ids(bpe, b"\xff\x80a")) == "\ufffd\ufffda"


def test_special_ids_spell_nothing(model_files, bpe):
    assert bpe.special_ids == {1, 2}
    assert bpe.decode([1, *bpe.encode("a b"), 2]) == "a b"
    icefall = SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", {"model": model_files["icefall"]}))
    blank, end = (icefall._processor.piece_to_id(piece) for piece in ("<blk>", "<sos/eos>"))
    assert icefall.special_ids == {blank, end}
    assert icefall.decode([blank, *icefall.encode("a b"), blank, end]) == "a b"
    visible = TokenizerSpec("sentencepiece", {"model": model_files["icefall"]}, {"special_ids": [blank]})
    assert SentencePieceTokenizer.from_spec(visible).decode([blank, end]) == "<sos/eos>"


def test_a_special_id_between_bytes_does_not_break_the_character(bpe):
    first, second, third = byte_ids(bpe, "日".encode())
    assert bpe.decode([first, 1, second, 2, third]) == "日"


def test_the_unknown_piece_is_visible(bpe):
    assert bpe.decode([0]) == " ⁇ "
    assert bpe.decode([bpe.encode("a")[0], 0]) == "a ⁇ "


def test_case_is_changed_where_the_checkpoint_says_so(model_files):
    spec = TokenizerSpec("sentencepiece", {"model": model_files["bpe"]}, {"case": "lower"})
    tokenizer = SentencePieceTokenizer.from_spec(spec)
    assert tokenizer.decode(tokenizer.encode("A B")) == "a b"


def test_what_the_model_cannot_spell_is_refused(tmp_path):
    import io

    import sentencepiece

    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b ab ba"] * 10),
        model_writer=buffer,
        vocab_size=8,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "m.model").write_bytes(buffer.getvalue())
    tokenizer = SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", {"model": tmp_path / "m.model"}))
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"
    with pytest.raises(RequestRefusedError, match="'aXb' cannot be encoded: the model has no piece for 'X'"):
        tokenizer.encode("aXb")


@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_id_of_another_model_is_refused(bpe, index):
    with pytest.raises(CheckpointError, match=f"Token id {index} is not in the SentencePiece model"):
        bpe.decode([index])


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x0a\xff\xff", None])
def test_a_damaged_model_is_refused_by_name(tmp_path, model_files, content):
    path = tmp_path / "x.model"
    path.write_bytes(model_files["bpe"].read_bytes()[:200] if content is None else content)
    with pytest.raises(CheckpointError, match=r"x\.model"):
        SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", {"model": path}))


def test_a_missing_model_and_wrong_roles_and_options_are_refused(tmp_path, model_files):
    with pytest.raises(CheckpointError, match=r"gone\.model cannot be read"):
        SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", {"model": tmp_path / "gone.model"}))
    with pytest.raises(CheckpointError, match=r"got files \[\], needs 'model'"):
        SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece"))
    files = {"model": model_files["bpe"]}
    with pytest.raises(CheckpointError, match=r"knows \['model'\]"):
        SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", {**files, "other": tmp_path}))
    with pytest.raises(CheckpointError, match=r"colour: Extra inputs.*Options are: special_ids, case"):
        SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", files, {"colour": 1}))
    with pytest.raises(CheckpointError, match=r"special_ids \[9999\] are not in"):
        SentencePieceTokenizer.from_spec(TokenizerSpec("sentencepiece", files, {"special_ids": [9999]}))


def test_it_is_on_the_axis():
    assert registry("tokenizers").get("sentencepiece") is SentencePieceTokenizer
