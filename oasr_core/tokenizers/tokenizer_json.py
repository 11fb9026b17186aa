"""The files of the ``tokenizers`` library: ``tokenizer.json``, and the added tokens of ``tokenizer_config.json``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oasr_core.errors import CheckpointError, MissingExtraError, RequestRefusedError
from oasr_core.tokenizers.byte_level import token_bytes


@dataclass(frozen=True)
class Vocabulary:
    """What a ``tokenizer.json`` holds, the added tokens of ``tokenizer_config.json`` merged into it.

    ``tokens`` are by id, ``None`` where an id has none; ``added`` are the ids of added tokens, which spell themselves,
    ``special`` those of them that are no text. ``decoders`` are the types of the decoder's steps.
    """

    path: Path
    backend: Any
    tokens: list[str | None]
    added: frozenset[int]
    special: frozenset[int]
    decoders: tuple[str, ...]
    unknown_id: int | None

    @classmethod
    def read(cls, path: Path, config: Path | None = None) -> Vocabulary:
        """Read the files; ``CheckpointError`` names the one at fault and the token."""
        library = _library()
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise CheckpointError(f"{path} is no tokenizer.json of the tokenizers library: it has no 'model'.")
        try:
            backend = library.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not read by tokenizers {library.__version__}: {error}.") from error
        decoders = _decoder_types(content.get("decoder"))
        if "CTC" in decoders:
            raise CheckpointError(
                f"{path} has a CTC decoder, which merges repeats of its own; a table of its units is of kind "
                "'symbol_table'."
            )
        listed = {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()}
        special = _special(backend, path, path, listed)
        if config is not None:
            special |= _merge(library, backend, path, config)
        ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (1 + max(ids.values(), default=-1))
        for text, index in ids.items():
            tokens[index] = text
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # text that spells a special token stays text
        return cls(
            path,
            backend,
            tokens,
            frozenset(special),
            frozenset(index for index, flag in special.items() if flag),
            decoders,
            _unknown_id(content["model"], ids),
        )

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens spell bytes in the byte-level alphabet and nothing else is done to them."""
        return self.decoders == ("ByteLevel",)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: index for index, token in enumerate(self.tokens) if token is not None}

    def spelling(self) -> list[bytes]:
        """What each id spells, with a byte-level vocabulary; special tokens spell their own names."""
        return [
            (token or "").encode("utf-8") if index in self.added else token_bytes(token or "")
            for index, token in enumerate(self.tokens)
        ]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; ``RequestRefusedError`` where a part of it cannot be spelled."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if self.unknown_id is not None and self.unknown_id in ids:
            raise RequestRefusedError(f"{text!r} cannot be encoded: a part of it is unknown to {self.path.name}.")
        if self.is_byte_level:
            normalizer = self.backend.normalizer
            wanted = (normalizer.normalize_str(text) if normalizer else text).encode("utf-8")
            spelled = b"".join([self._spelled[index] for index in ids])
            if spelled not in (wanted, b" " + wanted):
                raise RequestRefusedError(
                    f"{text!r} cannot be encoded: {self.path.name} lacks bytes of it and would give "
                    f"{spelled.decode('utf-8', 'replace')!r}."
                )
        return ids

    @cached_property
    def _spelled(self) -> list[bytes]:
        return self.spelling()


def read_json(path: Path) -> Any:
    """The JSON value in ``path``; ``CheckpointError`` where it cannot be read, with the line at fault."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}, line {error.lineno}: not JSON ({error.msg}); is the file complete?") from error


def checked_size(path: Path, own: int, declared: int | None) -> int:
    """Number of ids; ``CheckpointError`` where the tokenizer has more than the weights."""
    if declared is not None and own > declared:
        raise CheckpointError(
            f"{path} has ids up to {own - 1}, the weights have {declared}: they do not belong together."
        )
    return declared or own


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise MissingExtraError(
            f"reading a tokenizer.json needs the package tokenizers, which cannot be imported ({error}); "
            f"install the extra 'huggingface': pip install 'oasr-core[huggingface]'"
        ) from error


def _merge(library: Any, backend: Any, path: Path, config: Path) -> dict[int, bool]:
    """Add the tokens that only ``tokenizer_config.json`` has; returns which of those it lists are special."""
    content = read_json(config)
    listed = content.get("added_tokens_decoder", {}) if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        raise CheckpointError(f"{config} is no tokenizer_config.json: added_tokens_decoder must map ids to tokens.")
    names: dict[int, str] = {}
    special: dict[int, bool] = {}
    for key, token in sorted(listed.items(), key=lambda item: _id(config, item)):
        index, name = int(key), token["content"]
        names[index], special[index] = name, bool(token.get("special", False))
        if backend.id_to_token(index) is None and backend.token_to_id(name) is None:
            flags = {flag: bool(token.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            added = library.AddedToken(name, **flags)
            (backend.add_special_tokens if special[index] else backend.add_tokens)([added])
    return _special(backend, config, path, names) | special


def _id(config: Path, item: tuple[str, Any]) -> int:
    key, token = item
    if not (key.isascii() and key.isdigit() and isinstance(token, Mapping) and isinstance(token.get("content"), str)):
        raise CheckpointError(
            f"{config}: added_tokens_decoder[{key!r}] is {token!r}; an id and its token with 'content' are expected."
        )
    return int(key)


def _special(backend: Any, claimant: Path, path: Path, names: Mapping[int, str]) -> dict[int, bool]:
    """Id -> whether it is special, of all added tokens.

    ``CheckpointError`` where ``claimant`` gives a token of ``names`` an id that it does not have.
    """
    added = backend.get_added_tokens_decoder()
    for index, name in names.items():
        # Of an added token id_to_token() gives the normalised form.
        holder = added[index].content if index in added else backend.id_to_token(index)
        actual = backend.token_to_id(name)
        if actual != index or holder != name:
            raise CheckpointError(
                f"{claimant} gives {name!r} the id {index}, but in {path} its id is {actual} and id {index} is "
                f"{holder!r}: the files are from different checkpoints, or one was edited."
            )
    return {index: bool(token.special) for index, token in added.items()}


def _decoder_types(decoder: Any) -> tuple[str, ...]:
    """The types of the decoder's steps in order."""
    if not isinstance(decoder, Mapping):
        return ()
    if decoder.get("type") == "Sequence":
        return tuple(name for part in decoder.get("decoders", ()) for name in _decoder_types(part))
    return (str(decoder.get("type")),)


def _unknown_id(model: Mapping[str, Any], ids: Mapping[str, int]) -> int | None:
    """The id that unknown symbols get: named by BPE and word models, numbered by Unigram."""
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    name = model.get("unk_token")
    return ids.get(name) if isinstance(name, str) else None
