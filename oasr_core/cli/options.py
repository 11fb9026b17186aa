"""Settings from the command line and from files: ``--set k=v``, ``--decode-option k=v``, ``--config FILE``."""

from __future__ import annotations

import json
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oasr_core.cli.logs import debug_wanted
from oasr_core.config import EngineConfig, Origin, resolve_config
from oasr_core.errors import ConfigError, OasrError, did_you_mean

_EXAMPLES = {"--set": "max_batch_size=8", "--decode-option": "beam_size=8"}
#: Options whose names are not those of their fields.
_OPTION_NAMES = {
    "ckpt_dir": "--model",
    "decode_options": "--decode-option",
    "max_batch_size": "--batch-size",
    "long_form_mode": "--long-form",
}


class Flags(dict[str, Any]):
    """Fields that the command line sets; ``options`` names the option that gave each."""

    def __init__(self, values: Mapping[str, Any], options: Mapping[str, str]) -> None:
        super().__init__(values)
        self.options = dict(options)


def parse_assignments(items: Sequence[str], option: str) -> dict[str, Any]:
    """Turn ``["a=1", "b.c=true"]`` into ``{"a": 1, "b": {"c": True}}``.

    A value is JSON where it parses as JSON, else the text as it stands; dots in a key descend into mappings; the last
    of two values for one key wins. Raises ``ConfigError`` naming ``option`` for an item without key or ``=``.
    """
    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            example = f"{key.strip()}=VALUE" if key.strip() and not equals else _EXAMPLES.get(option, "KEY=VALUE")
            raise ConfigError(f"{option} {item!r}: expected KEY=VALUE, for example {option} {example}")
        branch = settings
        for part in path[:-1]:
            below = branch.setdefault(part, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{option} {item!r}: {part!r} already has the value {below!r}, it is not a mapping")
            branch = below
        branch[path[-1]] = _parse_value(value.strip())
    return settings


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def merge_flags(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Join ``--set`` with the options that have a name of their own (``None``: not given); mappings are joined.

    Raises ``ConfigError`` where both give the same field different values.
    """
    merged = dict(settings)
    for name, value in flags.items():
        if value is None:
            continue
        have = merged.get(name)
        if isinstance(have, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_flags(have, value)
        elif name in merged and have != value:
            raise ConfigError(f"{name} is given twice: {have!r} by --set and {value!r} by its own option; drop one")
        else:
            merged[name] = value
    return merged


def load_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML, TOML or JSON file that holds one mapping of ``EngineConfig`` fields.

    Raises ``ConfigError`` for a missing or unreadable file, an unknown suffix, a syntax error, a key given twice, or
    anything but a mapping.
    """
    parsers: dict[str, Callable[[str], Any]] = {
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
        ".toml": _parse_toml,
        ".json": _parse_json,
    }
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"--config {path}: unknown kind of file {path.suffix!r}; allowed: {', '.join(parsers)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error})"
        raise ConfigError(f"--config {path}: cannot read it: {reason}") from error
    try:
        settings = parse(text)
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if settings is None:  # an empty YAML file
        return {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(
            f"--config {path}: expected a mapping of EngineConfig fields, got {type(settings).__name__}; "
            "'oasr config schema' lists the fields"
        )
    return settings


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from error


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def _unique_pairs(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} is given twice")
        mapping[key] = value
    return mapping


def _parse_yaml(text: str) -> Any:
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        """YAML's own loader keeps the last of two equal keys without a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            plain = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            _unique_pairs([(self.construct_object(key), None) for key in plain])
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not valid YAML: {' '.join(str(error).split())}") from error


def engine_flags(
    *,
    settings: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    model: str | None = None,
    beam_size: int | None = None,
    **named: Any,
) -> Flags:
    """All ``EngineConfig`` fields that the command line sets; ``named`` are fields with options of their own."""
    options = parse_assignments(decode_options, "--decode-option") if decode_options else None
    if beam_size is not None:
        options = options or {}
        if options.setdefault("beam_size", beam_size) != beam_size:
            raise ConfigError(
                f"beam_size is given twice: {options['beam_size']!r} by --decode-option and {beam_size} by its own "
                "option; drop one"
            )
    own = {"ckpt_dir": model, "decode_options": options, **named}
    given = parse_assignments(settings, "--set")
    origins = {name: f"--set {name}" for name in given} | {
        name: _OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
        for name, value in own.items()
        if value is not None and name not in given
    }
    return Flags(merge_flags(given, own), origins)


def resolve_sources(
    config_file: Path | None, flags: Mapping[str, Any], checkpoint: Mapping[str, Any] | None = None
) -> tuple[EngineConfig, dict[str, Origin]]:
    """Rank defaults, checkpoint, file and flags; a mapping in a flag (``decode_options``) extends the file's.

    Returns the configuration and the origin of each field; raises ``ConfigError``, naming the file or the option at
    fault, for whatever is no valid setting.
    """
    file = load_config_file(config_file) if config_file is not None else {}
    for name in file:
        if name not in EngineConfig.model_fields:
            raise ConfigError(
                f"--config {config_file}: unknown option {name!r}.{did_you_mean(name, EngineConfig.model_fields)} "
                "'oasr config schema' lists the options."
            )
    options = flags.options if isinstance(flags, Flags) else {}
    origins = {**dict.fromkeys(file, f"--config {config_file}"), **options}
    extended = {name: _extend(file.get(name), value) for name, value in flags.items()}
    try:
        return resolve_config(file=file, flags=extended, checkpoint=checkpoint)
    except ConfigError as error:
        where = dict.fromkeys(origins[name] for name in _fields_at_fault(error) if name in origins)
        if not where:
            raise
        raise ConfigError(f"{', '.join(where)}: {error}") from error


def _fields_at_fault(error: ConfigError) -> list[str]:
    """Fields that a validation found wrong; none where they contradict each other."""
    from pydantic import ValidationError

    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return []
    return [str(finding["loc"][0]) for finding in cause.errors() if finding["loc"]]


def _extend(base: Any, value: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(value, Mapping)):
        return value
    return {**base, **{key: _extend(base.get(key), below) for key, below in value.items()}}


def report(error: OasrError) -> None:
    """Say an error on standard error, with its traceback under ``oasr --debug``."""
    if debug_wanted():
        traceback.print_exception(error)
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
