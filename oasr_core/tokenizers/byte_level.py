"""Byte-level vocabularies: tokens are spelled in an alphabet of 256 printable characters, one for each byte.

Source: the byte alphabet of OpenAI's GPT-2 ``encoder.py``, which Hugging Face's ``ByteLevel`` shares.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


def _alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that ``token`` spells; one with a character outside of the alphabet stands for itself, in UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class ByteDetokenizer:
    """Collects bytes until they form characters; bytes that never do become U+FFFD."""

    def __init__(self, spelling: Callable[[int], bytes], *, strips_leading_spaces: bool = False) -> None:
        self._spelling = spelling
        self._strips = strips_leading_spaces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        """The characters that ``token`` completes."""
        return self._stripped(self._decoder.decode(self._spelling(token)))

    def finish(self) -> str:
        """U+FFFD where bytes are left that form no character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        if self._strips and text:
            text = text.lstrip(" ")
            self._strips = not text
        return text
