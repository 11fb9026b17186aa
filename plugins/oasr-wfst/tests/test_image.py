"""Graph images: what is written is read, and what is damaged is refused with its place."""

from __future__ import annotations

import mmap
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from oasr_wfst import image
from oasr_wfst.errors import GraphError
from oasr_wfst.graph import Graph
from oasr_wfst.image import open_image, write_image
from oasr_wfst.load import load_graph
from oasr_wfst.symbols import SymbolTable

DATA = Path(__file__).parent / "data"
ARRAYS = ("arc_begin", "dest", "label", "score", "word_begin", "words", "epsilon_count")


@pytest.fixture(scope="module")
def graph():
    return load_graph(DATA / "HLG_G_2_gram.fst", words=DATA / "words.txt", tokens=DATA / "tokens.txt")


@pytest.fixture
def path(graph, tmp_path):
    path = tmp_path / "graph.img"
    write_image(graph, path)
    return path


def places(path):
    """Section -> (offset, bytes), read from the header."""
    header = path.read_bytes()[: image.HEADER_SIZE]
    return {name: image._place(header, name) for name in image._DTYPES}


def patched(path, offset, new, *, checksums=True):
    """Overwrite bytes, and unless told otherwise bring the checksums up to date."""
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    if checksums:
        data[20:24] = struct.pack("<I", zlib.crc32(bytes(data[image.HEADER_SIZE :])))
        data[508:512] = struct.pack("<I", zlib.crc32(bytes(data[:508])))
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("verify", [True, False])
def test_an_image_holds_the_graph(graph, path, verify):
    read = open_image(path, verify=verify)
    for name in ARRAYS:
        array = getattr(read, name)
        np.testing.assert_array_equal(array, getattr(graph, name))
        assert array.dtype == getattr(graph, name).dtype
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0
    assert (read.max_label, read.has_epsilons) == (graph.max_label, graph.has_epsilons)
    assert read.symbols == graph.symbols
    assert read.tokens == graph.tokens
    assert read.note.startswith("OpenFst HLG_G_2_gram.fst (oasr-wfst ")


def test_the_arrays_are_mapped_from_the_file(path):
    read = open_image(path)
    owner = read.score
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, mmap.mmap)


def test_an_image_of_an_image_is_the_same_file(path, tmp_path):
    again = tmp_path / "again.img"
    assert write_image(open_image(path), again) == path.stat().st_size
    assert again.read_bytes() == path.read_bytes()


def test_a_graph_without_words_and_symbols_has_an_image(tmp_path):
    bare = load_graph(DATA / "HLG.pt")
    bare = Graph.checked(
        bare.arc_begin, bare.dest, bare.label, bare.score, np.zeros_like(bare.word_begin), np.zeros(0, np.int32)
    )
    write_image(bare, tmp_path / "bare.img")
    read = open_image(tmp_path / "bare.img")
    assert (len(read.words), len(read.symbols), len(read.tokens)) == (0, 0, 0)


def test_a_file_that_is_cut_anywhere_is_refused(path):
    data = path.read_bytes()
    for size in [*range(0, 600, 37), *range(600, len(data), 331), len(data) - 1]:
        path.write_bytes(data[:size])
        for verify in (True, False):
            with pytest.raises(GraphError):
                open_image(path, verify=verify)


def test_a_file_that_is_too_long_is_refused(path):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(GraphError, match=f"has {size + 1} bytes, its header says {size}"):
        open_image(path)


def test_a_flipped_bit_anywhere_is_refused(path):
    data = path.read_bytes()
    for offset in [*range(0, image.HEADER_SIZE, 29), *range(image.HEADER_SIZE, len(data), 97)]:
        damaged = bytearray(data)
        damaged[offset] ^= 4
        path.write_bytes(bytes(damaged))
        with pytest.raises(GraphError):
            open_image(path)


def test_another_version_is_refused(path):
    patched(path, 8, struct.pack("<I", 7))
    with pytest.raises(GraphError, match=r"byte 8: image version 7, this release reads 1\. .*--from") as caught:
        open_image(path)
    assert caught.value.offset == 8


def test_a_damaged_header_is_refused_without_reading_the_arrays(path):
    patched(path, 12, b"\x63", checksums=False)
    with pytest.raises(GraphError, match="the header does not have its checksum"):
        open_image(path, verify=False)


@pytest.mark.parametrize(
    ("section", "index", "value", "reason"),
    [
        ("dest", 5, 59, r"dest\[5\] is 59"),
        ("label", 7, -9, r"label\[7\] is -9"),
        ("score", 11, np.inf, r"score\[11\] is inf"),
        ("words", 2, 40, r"words\[2\] is 40"),
        ("arc_begin", 3, 400, r"arc_begin\[4\] is"),
        ("epsilon_count", 1, 2, "state 1 does not have this many"),
    ],
)
def test_arrays_out_of_range_are_refused_with_their_byte(path, section, index, value, reason):
    dtype = np.dtype(image._DTYPES[section])
    start = places(path)[section][0]
    patched(path, start + index * dtype.itemsize, np.array([value], dtype=dtype).tobytes())
    with pytest.raises(GraphError, match=rf"byte \d+: .*{reason}") as caught:
        open_image(path)
    named = index + 1 if section == "arc_begin" else index
    assert caught.value.offset == start + named * dtype.itemsize


def test_a_largest_label_that_is_not_the_arcs_is_refused(path):
    patched(path, 12, struct.pack("<i", 5))
    with pytest.raises(GraphError, match="not what the header says"):
        open_image(path)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("section", ["dest", "label", "word_begin", "epsilon_count", "symbol_text"])
def test_sections_outside_of_the_file_or_of_other_sizes_are_refused(path, section, verify):
    at = image._PREAMBLE.size + 16 * list(image._DTYPES).index(section)
    original = path.read_bytes()
    offset, size = places(path)[section]
    for place in (
        (offset + 64 * 10_000, size),
        (offset, size + 64 * 10_000),
        (offset + 4, size),
        (offset, size - 8),
        (64, size),
    ):
        path.write_bytes(original)
        patched(path, at, struct.pack("<QQ", *place))
        with pytest.raises(GraphError):
            open_image(path, verify=verify)


def test_symbols_whose_offsets_decrease_are_refused(path):
    start = places(path)["symbol_begin"][0]
    patched(path, start + 8, struct.pack("<q", 50_000))
    with pytest.raises(GraphError, match="offsets of the symbols decrease"):
        open_image(path)


def test_other_files_are_no_images(tmp_path):
    for name, content in (("empty", b""), ("text", b"0 1 2 3\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(GraphError):
            open_image(tmp_path / name)
    with pytest.raises(GraphError, match="cannot be read"):
        open_image(tmp_path / "missing")


def test_a_failed_write_leaves_nothing_behind(graph, tmp_path):
    with pytest.raises(GraphError, match="cannot be written"):
        write_image(graph, tmp_path / "no" / "graph.img")
    (tmp_path / "folder").mkdir()
    with pytest.raises(GraphError, match="cannot be written"):
        write_image(graph, tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_tables_given_at_loading_replace_those_of_the_image(path, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{'<eps>' if n == 0 else f'w{n}'} {n}\n" for n in range(14)), encoding="utf-8")
    assert load_graph(path, words=words).symbols == SymbolTable.of(["<eps>", *(f"w{n}" for n in range(1, 14))])
    words.write_text("<eps> 0\na 1\n", encoding="utf-8")
    with pytest.raises(GraphError, match="the table of words ends at 1"):
        load_graph(path, words=words)
