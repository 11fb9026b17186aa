"""Tokenizers trained in a moment on generated text, in the flavours that differ in decoding."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.tokenizers.huggingface import HuggingFaceTokenizer
from oasr_core.tokenizers.sentencepiece import SentencePieceTokenizer

FLAVOURS = {
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "keeps_spaces": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "no_prefix": {"model_type": "bpe", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "icefall": {"model_type": "unigram", "user_defined_symbols": ["<blk>", "<sos/eos>"], "bos_id": -1, "eos_id": -1},
}


@pytest.fixture(scope="session")
def model_files(tmp_path_factory) -> dict[str, Path]:
    """Flavour -> model file, with byte fallback."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(1, 5))) for _ in range(60)]
    sentences = [" ".join(generator.choices(words, k=6)) for _ in range(200)] + ["a  b   c"] * 20
    paths = {}
    for name, flavour in FLAVOURS.items():
        buffer = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=buffer,
            vocab_size=320,
            hard_vocab_limit=False,
            byte_fallback=True,
            minloglevel=2,
            **flavour,
        )
        paths[name] = folder / f"{name}.model"
        paths[name].write_bytes(buffer.getvalue())
    return paths


@pytest.fixture(scope="session", params=list(FLAVOURS))
def sentencepiece_pair(request, model_files):
    """Our tokenizer and SentencePiece's own processor of one flavour."""
    path = model_files[request.param]
    spec = TokenizerSpec("sentencepiece", {"model": path})
    return SentencePieceTokenizer.from_spec(spec), sentencepiece.SentencePieceProcessor(model_file=str(path))


LANGUAGES = ("en", "zh", "de")
CONTROLS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


def library_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of the library's, trained in a moment on generated text, with one special and one plain token."""
    generator = random.Random(2)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(1, 5))) for _ in range(60)]
    sentences = [" ".join(generator.choices(words, k=6)) for _ in range(200)] + ["日本語 日本"] * 5
    special = ["<|endoftext|>"]
    if kind == "byte_level":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    elif kind == "byte_fallback":
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", *special]
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
        )
    elif kind == "metaspace":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        special = ["<unk>", *special]
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.decoder = decoders.WordPiece()
        special = ["[UNK]", *special]
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    made.train_from_iterator(sentences, trainer)
    if kind == "byte_fallback":  # the trainer takes byte tokens as special; in a checkpoint they are plain
        content = json.loads(made.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
        made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens(special)
    made.add_tokens(["<plain>"])
    return made


@pytest.fixture(scope="session")
def library_files(tmp_path_factory) -> dict[str, Path]:
    """Kind -> ``tokenizer.json``."""
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = {}
    for kind in ("byte_level", "byte_fallback", "metaspace", "word_pieces"):
        paths[kind] = folder / f"{kind}.json"
        library_tokenizer(kind).save(str(paths[kind]))
    return paths


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback", "metaspace", "word_pieces"])
def library_pair(request, library_files):
    """Our tokenizer and the library's own of one kind."""
    path = library_files[request.param]
    spec = TokenizerSpec("huggingface", {"tokenizer": path})
    return HuggingFaceTokenizer.from_spec(spec), tokenizers.Tokenizer.from_file(str(path))


@pytest.fixture(scope="session")
def whisper_files(tmp_path_factory) -> dict[str, Path]:
    """A multilingual Whisper tokenizer of our own: ``tokenizer.json`` without timestamps, both vocabulary files."""
    folder = tmp_path_factory.mktemp("whisper")
    made = library_tokenizer("byte_level")
    content = json.loads(made.to_str())
    content["added_tokens"] = []
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens(list(CONTROLS))
    made.save(str(folder / "tokenizer.json"))
    tokens = [made.id_to_token(index) for index in range(made.get_vocab_size())]
    tokens += [f"<|{index * 0.02:.2f}|>" for index in range(1501)]
    (folder / "vocabulary.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    (folder / "vocabulary.json").write_text(json.dumps(tokens), encoding="utf-8")
    return {path.name: path for path in folder.iterdir()}
