"""Special tokens by name, from what a checkpoint lists (torch-free)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError
from oasr_core.tokenizers.whisper import read_vocabulary
from oasr_whisper.config import WhisperTokens

#: ``<|endoftext|>`` where GPT-2's vocabulary ends. English-only models use that; the others put a token in front.
_ENGLISH_ONLY_EOT = 50256
_LANGUAGE = re.compile(r"<\|([a-z]{2,4})\|>")
#: The vocabulary of a CTranslate2 directory, newest form first.
_VOCABULARIES = ("vocabulary.json", "vocabulary.txt")


def tokenizer_spec(peek: CheckpointPeek, vocab_size: int, tokens: WhisperTokens) -> TokenizerSpec:
    """Whichever of ``tokenizer.json``, ``tokenizer_config.json`` and ``vocabulary.*`` there are."""
    files = {}
    if peek.exists("tokenizer.json"):
        files["tokenizer"] = peek.file("tokenizer.json")
        if peek.exists("tokenizer_config.json"):
            files["config"] = peek.file("tokenizer_config.json")
    listing = next((name for name in _VOCABULARIES if peek.exists(name)), None)
    if listing is not None:
        files["vocabulary"] = peek.file(listing)
    options = {
        "vocab_size": vocab_size,
        "timestamp_begin": tokens.timestamp_begin,
        "multilingual": tokens.multilingual,
    }
    return TokenizerSpec("whisper", files, options)


def token_ids(peek: CheckpointPeek) -> tuple[str, dict[str, int]]:
    """The file that lists tokens, and their ids; ``CheckpointError`` where there is none."""
    if peek.exists("tokenizer.json"):
        return "tokenizer.json", _from_tokenizer(peek)
    for name in _VOCABULARIES:
        if peek.exists(name):
            return name, {token: index for index, token in enumerate(read_vocabulary(peek.file(name)))}
    raise CheckpointError(
        f"{peek.directory} has neither tokenizer.json nor a vocabulary ({', '.join(_VOCABULARIES)}). Of a directory "
        "with vocab.json and merges.txt, transformers makes tokenizer.json: "
        "WhisperTokenizerFast.from_pretrained(directory).save_pretrained(directory)."
    )


def find_tokens(
    peek: CheckpointPeek,
    *,
    multilingual: bool | None,
    suppress: Iterable[int],
    begin_suppress: Iterable[int],
    alignment_heads: Iterable[tuple[int, int]],
    max_initial_timestamp_index: int | None = None,
) -> WhisperTokens:
    """The special tokens of a checkpoint's tokenizer; ``CheckpointError`` names the one that is missing.

    ``multilingual`` ``None`` is told by the id of ``<|endoftext|>``. Languages are the tokens between
    ``<|startoftranscript|>`` and the tasks; English-only vocabularies have them, too, untrained, and they are left out.
    """
    name, ids = token_ids(peek)

    def find(*spellings: str) -> int:
        for spelling in spellings:
            if spelling in ids:
                return ids[spelling]
        raise CheckpointError(f"{peek.directory / name} has no token {spellings[0]}, so it is not of a Whisper model.")

    sot, eot, translate = find("<|startoftranscript|>"), find("<|endoftext|>"), find("<|translate|>")
    no_timestamps = find("<|notimestamps|>")
    if multilingual is None:
        multilingual = eot != _ENGLISH_ONLY_EOT
    languages = {}
    if multilingual:
        named = ((_LANGUAGE.fullmatch(token), index) for token, index in ids.items() if sot < index < translate)
        languages = {match[1]: index for match, index in sorted(named, key=lambda item: item[1]) if match}
    return WhisperTokens(
        sot=sot,
        eot=eot,
        sot_prev=find("<|startofprev|>"),
        no_speech=find("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=no_timestamps,
        transcribe=find("<|transcribe|>"),
        translate=translate,
        timestamp_begin=ids.get("<|0.00|>", no_timestamps + 1),
        language_ids=languages,
        multilingual=multilingual,
        suppress=tuple(sorted(set(suppress))),
        begin_suppress=tuple(sorted(set(begin_suppress))),
        alignment_heads=tuple(alignment_heads),
        max_initial_timestamp_index=50 if max_initial_timestamp_index is None else max_initial_timestamp_index,
    )


def alignment_heads(stated: Any, where: str, layers: int, heads: int) -> list[tuple[int, int]]:
    """``(layer, head)`` pairs as a checkpoint states them, else all heads of the last half of the layers.

    Distilled models state none, and this is what CTranslate2's converter writes for them. ``CheckpointError`` names
    ``where`` something else is stated.
    """
    if not stated:
        return [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    try:
        return [(int(layer), int(head)) for layer, head in stated]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: alignment_heads is {stated!r}, expected pairs [layer, head].") from error


def id_list(config: Mapping[str, Any], key: str, where: str) -> list[int]:
    """A list of token ids in a configuration, empty where it is absent or null."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise CheckpointError(f"{where}: {key} is {value!r}, expected a list of token ids.")
    return [each for each in value if each >= 0]  # -1 is OpenAI's word for a default list


def _from_tokenizer(peek: CheckpointPeek) -> dict[str, int]:
    content = peek.json("tokenizer.json")
    try:
        ids = {str(token): int(index) for token, index in content["model"]["vocab"].items()}
        ids |= {str(token["content"]): int(token["id"]) for token in content.get("added_tokens", ())}
        if peek.exists("tokenizer_config.json"):
            listed = peek.json("tokenizer_config.json").get("added_tokens_decoder", {})
            ids |= {str(token["content"]): int(index) for index, token in listed.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{peek.directory / 'tokenizer.json'} (or tokenizer_config.json) is no vocabulary of tokens and ids: "
            f"{type(error).__name__}: {error}."
        ) from error
    return ids
