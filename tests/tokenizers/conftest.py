"""SentencePiece models trained in a moment on generated text, in the flavours that differ in decoding."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import sentencepiece

from oasr_core.checkpoints.bundle import TokenizerSpec
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
