"""A tokenizer and a perfect recognizer: outputs of windows over words whose times are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.request import RequestOutput, Segment, WordTiming
from oasr_core.tokenizers.base import IncrementalDecoder, Tokenizer


class Pieces(Tokenizer):
    """Ids of pieces, given out as they come; ``▁`` begins a word; id 0 spells nothing."""

    oasr_api = "1.0"

    def __init__(self) -> None:
        self.table = ["<s>"]
        self.ids = {"<s>": 0}

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> Pieces:
        return cls()

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({0})

    def token_pieces(self, ids: Sequence[int]) -> list[str]:
        pieces = ["" if token == 0 else self.table[token].replace("▁", " ") for token in ids]
        for index, piece in enumerate(pieces):
            pieces[index] = piece.lstrip()
            if piece.strip():
                break
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.token_pieces(ids))

    def incremental(self) -> IncrementalDecoder:
        raise NotImplementedError

    def id(self, piece: str) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.table)
            self.table.append(piece)
        return self.ids[piece]

    def split(self, word: str) -> list[int]:
        """A word in pieces of up to three characters."""
        marked = "▁" + word
        return [self.id(marked[i : i + 3]) for i in range(0, len(marked), 3)]


@dataclass(frozen=True)
class Said:
    """A word and when it is said, seconds."""

    word: str
    start: float
    end: float


class Recognizer:
    """Outputs for windows, each word cut into tokens whose times lie evenly in the word."""

    def __init__(self) -> None:
        self.tokenizer = Pieces()

    def output(
        self,
        said: Sequence[Said],
        start: float = 0.0,
        *,
        words: bool = True,
        times: bool = True,
        confidence: float | None = 0.5,
    ) -> RequestOutput:
        """What a window that begins at ``start`` gives for ``said``."""
        tokens: list[int] = []
        stamps: list[float] = []
        for each in said:
            ids = self.tokenizer.split(each.word)
            tokens += ids
            stamps += [each.start - start + (each.end - each.start) * i / len(ids) for i in range(len(ids))]
        text = self.tokenizer.decode(tokens)
        timings = [WordTiming(each.word, each.start - start, each.end - start, 0.9) for each in said]
        return RequestOutput(
            "child",
            text=text,
            tokens=[tokens],
            scores=[-1.0],
            finished=True,
            segments=[Segment(text, timings[0].start, timings[-1].end, tuple(timings) if words else None)]
            if said
            else [],
            words=timings if words else None,
            timestamps=stamps if times else None,
            confidence=confidence,
            nbest_texts=[text],
            finish_reason="stop",
        )


@pytest.fixture
def recognizer() -> Recognizer:
    return Recognizer()


@pytest.fixture
def spoken() -> Callable[..., list[Said]]:
    """``spoken("a b c", at=1.0, every=0.4)``: words one after another, each 0.3 s long."""

    def speak(text: str, at: float = 0.0, every: float = 0.4, length: float = 0.3) -> list[Said]:
        return [
            Said(word, round(at + i * every, 3), round(at + i * every + length, 3))
            for i, word in enumerate(text.split())
        ]

    return speak


@pytest.fixture(scope="session")
def recognizer_cls() -> type[Recognizer]:
    return Recognizer


@pytest.fixture(scope="session")
def word_type() -> type[Said]:
    return Said
