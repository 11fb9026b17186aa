"""Whether the labels of a graph are the tokens that a model has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from oasr_core.errors import ConfigError
from oasr_core.tokenizers.base import Tokenizer
from oasr_wfst.symbols import SymbolTable

logger = logging.getLogger(__name__)

#: Columns that are compared at most, evenly spaced: another table differs nearly everywhere.
_COMPARED: Final = 512
#: How tables and tokenizers spell the edges of words; they differ in that alone.
_MARKS: Final = ("▁", "@@", "##", "|", " ")


def check_tokens(path: Path, tokens: SymbolTable, tokenizer: Tokenizer) -> None:
    """Raises ``ConfigError`` where most columns of the graph are named otherwise than the model's tokens.

    ``tokens`` names the columns; without names there is nothing to compare. Special tokens, tokens of single bytes and
    pure marks of word edges are passed over. Where the lesser part differs, a warning names the first.
    """
    size = min(len(tokens), tokenizer.vocab_size)
    compared, different = 0, []
    for column in range(0, size, -(-size // _COMPARED) or 1):
        named = _plain(tokens[column])
        meant = "" if column in tokenizer.special_ids else _plain(tokenizer.token_pieces([column])[0])
        if not named or not meant or "\ufffd" in meant or (named[0] == "<" and named[-1] == ">"):
            continue
        compared += 1
        if named != meant:
            different.append((column, tokens[column], tokenizer.token_pieces([column])[0]))
    if not different:
        return
    column, named, meant = different[0]
    found = (
        f"column {column} is {named!r} in the graph and {meant!r} in the model; {len(different)} of {compared} tokens "
        "that were compared differ"
    )
    if 2 * len(different) > compared:
        raise ConfigError(f"{path} was built for other tokens: {found}. Build it with the model's own table.")
    logger.warning("%s may have been built for other tokens: %s", path, found)


def _plain(token: str) -> str:
    for mark in _MARKS:
        token = token.replace(mark, "")
    return token
