from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.errors import CheckpointError, RequestRefusedError
from oasr_core.registry import registry
from oasr_core.tokenizers.symbol_table import SymbolTableTokenizer, read_symbol_table


def table(folder, *lines: str):
    path = folder / "units.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokenizer(folder, *symbols: str, **options):
    path = table(folder, *(f"{symbol} {index}" for index, symbol in enumerate(symbols)))
    return SymbolTableTokenizer.from_spec(TokenizerSpec("symbol_table", {"symbols": path}, options))


@pytest.fixture(scope="session")
def digits(wenet_digits):
    files = {"symbols": wenet_digits / "units.txt", "sentencepiece": wenet_digits / "train.bpe.model"}
    return SymbolTableTokenizer.from_spec(TokenizerSpec("symbol_table", files))


# --- text ------------------------------------------------------------------------------------------------------------


def test_texts_of_the_digits_checkpoint_equal_wenets(digits, wenet_digits):
    results = json.loads((wenet_digits / "oracle" / "decode_results.json").read_text())
    seen = 0
    for modes in results["utterances"].values():
        for mode in modes.values():
            for method in ("ctc_greedy_search", "ctc_prefix_beam_search", "attention_rescoring"):
                if method in mode:
                    assert digits.decode(mode[method]["tokens"]) == mode[method]["text"]
                    seen += 1
    assert seen > 100


def test_digits_are_encoded_as_wenet_does(digits):
    expected = {"ZERO": [46, 7], "one": [41], "FOUR FIVE": [38, 25, 38, 18], "SEVEN": [42, 9], "nine": [39, 21]}
    assert {text: digits.encode(text) for text in expected} == expected
    assert digits.supports_encode
    assert digits.special_ids == {0, 47}
    assert digits.vocab_size == 48


@given(ids=st.lists(st.integers(0, 47), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=5))
def test_three_views_agree_on_any_ids(digits, ids, cuts):
    text = digits.decode(ids)
    joined = "".join(digits.symbols[index] for index in ids if index not in (0, 47))
    assert text == joined.replace("▁", " ").strip()
    assert "".join(digits.token_pieces(ids)) == text
    assert len(digits.token_pieces(ids)) == len(ids)
    decoder = digits.incremental()
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [decoder.push(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    assert "".join(parts) + decoder.flush() == text
    assert all(not "".join(parts[: i + 1]).endswith(" ") for i in range(len(parts)))


def test_spaces_wait_for_a_character(tmp_path):
    made = tokenizer(tmp_path, "<blank>", "▁", "▁A", "B")
    decoder = made.incremental()
    assert [decoder.push([index]) for index in (1, 2, 1, 1, 0, 3, 1)] == ["", "A", "", "", "", "  B", ""]
    assert decoder.flush() == ""
    assert made.token_pieces([1, 2, 1, 3]) == ["", "A", "", " B"]


def test_unknown_stays_visible_and_specials_go(tmp_path):
    made = tokenizer(tmp_path, "<blank>", "<unk>", "<sos/eos>", "A", "<pad>")
    assert made.special_ids == {0, 2, 4}
    assert made.decode([0, 2, 3, 1, 4]) == "A<unk>"
    assert tokenizer(tmp_path, "A", "<unk>", "B", special_ids=[1]).decode([0, 1, 2]) == "AB"
    assert tokenizer(tmp_path, "A", "B", special_ids=[]).decode([0, 1]) == "AB"


def test_tables_of_whole_words_are_joined_by_a_symbol(tmp_path):
    made = tokenizer(tmp_path, "<blank>", "HELLO", "WORLD", connect_symbol=" ")
    assert made.decode([1, 0, 2, 2]) == "HELLO WORLD WORLD"
    assert made.token_pieces([1, 0, 2]) == ["HELLO", "", " WORLD"]


def test_another_word_separator(tmp_path):
    assert tokenizer(tmp_path, "<blank>", "|", "A", word_separator="|").decode([1, 2, 1, 2]) == "A A"


@pytest.mark.parametrize("index", [-1, 3])
def test_an_id_outside_of_the_table_is_refused(tmp_path, index):
    with pytest.raises(CheckpointError, match=f"Token id {index} is not in the symbol table, whose ids are 0 to 2"):
        tokenizer(tmp_path, "<blank>", "A", "B").decode([index])


# --- encoding --------------------------------------------------------------------------------------------------------


def test_tables_of_characters_encode_by_character(tmp_path):
    made = tokenizer(tmp_path, "<blank>", "<unk>", "一", "丁", "▁", "[NOISE]", "<sos/eos>")
    assert made.supports_encode
    assert made.encode(" 一 丁 ") == [2, 4, 3]
    assert made.decode(made.encode("一 丁")) == "一 丁"
    with pytest.raises(RequestRefusedError, match="'一七' cannot be encoded: '七' is not among the checkpoint's units"):
        made.encode("一七")
    assert made.encode("一七", strict=False) == [2, 1]


def test_tables_of_pieces_need_a_model_to_encode(tmp_path):
    made = tokenizer(tmp_path, "<blank>", "▁A", "B")
    assert not made.supports_encode
    with pytest.raises(RequestRefusedError, match="ships no SentencePiece model"):
        made.encode("A")


def test_what_the_digits_units_cannot_spell_is_refused(digits):
    with pytest.raises(RequestRefusedError, match=r"'QUEEN' cannot be encoded: '.*' is not among"):
        digits.encode("QUEEN")
    assert 1 in digits.encode("QUEEN", strict=False)


def test_ideographs_are_kept_apart_from_the_model(digits, wenet_digits, tmp_path):
    symbols = [*digits.symbols[:-1], "好", "<sos/eos>"]
    path = table(tmp_path, *(f"{symbol} {index}" for index, symbol in enumerate(symbols)))
    files = {"symbols": path, "sentencepiece": wenet_digits / "train.bpe.model"}
    made = SymbolTableTokenizer.from_spec(TokenizerSpec("symbol_table", files))
    assert made.encode("好one好") == [47, 41, 47]


# --- tables ----------------------------------------------------------------------------------------------------------


def test_lines_may_stand_in_any_order(tmp_path):
    lines = ["<blank> 0", "A 1", "B\t2", "  C   3 "]
    random.Random(0).shuffle(lines)
    assert read_symbol_table(table(tmp_path, *lines, "")) == ["<blank>", "A", "B", "C"]


def test_line_ends_and_byte_order_marks_of_other_systems_are_read(tmp_path):
    path = tmp_path / "units.txt"
    path.write_bytes(b"\xef\xbb\xbf<blank> 0\r\n\xe4\xb8\x80 1\r\n")
    assert read_symbol_table(path) == ["<blank>", "一"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["<blank> 0", "A 1", "B 1"], r"line 3: id 1 stands already in line 2"),
        (["<blank> 0", "A 1", "A 2"], r"line 3: unit 'A' stands already in line 2"),
        (["<blank> 0", "B 3", "A 1"], r"line 2: id 3 is there, but no line has id 2"),
        (["A 1", "B 2"], r"line 1: id 1 is there, but no line has id 0"),
        (["<blank> 0", "A"], r"line 2: expected 'unit id', got 'A'"),
        (["<blank> 0", "A B 1"], r"line 2: expected 'unit id', got 'A B 1'"),
        (["<blank> 0", "A x"], r"line 2: expected 'unit id', got 'A x'"),
        (["<blank> 0", "A -1"], r"line 2: expected 'unit id'"),
        (["<blank> 0", "A ²"], r"line 2: expected 'unit id'"),
        (["", ""], r"is empty; expected lines of 'unit id'"),
    ],
)
def test_faulty_tables_name_file_and_line(tmp_path, lines, reason):
    with pytest.raises(CheckpointError, match=rf"units\.txt.*{reason}"):
        read_symbol_table(table(tmp_path, *lines))


def test_tables_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"units\.txt cannot be read: No such file"):
        read_symbol_table(tmp_path / "units.txt")
    (tmp_path / "units.txt").write_bytes(b"A 0\n\xff 1\n")
    with pytest.raises(CheckpointError, match=r"units\.txt is not UTF-8 text \(byte 4\)"):
        read_symbol_table(tmp_path / "units.txt")


def test_wrong_specs_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="needs 'symbols'"):
        SymbolTableTokenizer.from_spec(TokenizerSpec("symbol_table", {"sentencepiece": tmp_path}))
    with pytest.raises(CheckpointError, match=r"word_separator: .*Options are: special_ids, word_separator"):
        tokenizer(tmp_path, "<blank>", word_separator="")
    with pytest.raises(CheckpointError, match=r"special_ids \[5\] are not in .*units\.txt, whose ids are 0 to 1"):
        tokenizer(tmp_path, "<blank>", "A", special_ids=[0, 5])


def test_a_damaged_model_beside_the_table_is_found_at_once(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"<html>")
    files = {"symbols": table(tmp_path, "<blank> 0", "A 1"), "sentencepiece": tmp_path / "bad.model"}
    with pytest.raises(CheckpointError, match=r"bad\.model is not a SentencePiece model"):
        SymbolTableTokenizer.from_spec(TokenizerSpec("symbol_table", files))


def test_it_is_on_the_axis():
    assert registry("tokenizers").get("symbol_table") is SymbolTableTokenizer
