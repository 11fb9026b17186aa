"""The native format: ``oasr_config.json``, ``model.safetensors`` and ``tokenizer/`` (torch is imported when used)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oasr_core.checkpoints.bundle import CheckpointBundle, DecodingDefaults, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.converter import RANK_KEYED_VALUE, CheckpointConverter, Detection
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

NATIVE: Final = "native"
CONFIG_NAME: Final = "oasr_config.json"
WEIGHTS_NAME: Final = "model.safetensors"
FORMAT_VERSION: Final = 1

DTypeName = Literal["fp32", "bf16", "fp16"]
_DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Tokenizer(_Strict):
    kind: str
    files: dict[str, str]
    options: dict[str, Any]


class _Feature(_Strict):
    kind: str
    audio_scale: float
    options: dict[str, Any]


class _Decoding(_Strict):
    decode_method: str
    options: dict[str, Any]
    chunk_size: int | None
    num_left_chunks: int | None


class _File(_Strict):
    sha256: str
    size: int


class NativeConfig(_Strict):
    """The content of ``oasr_config.json``, format version 1."""

    format: Literal["oasr"] = "oasr"
    format_version: int = Field(default=FORMAT_VERSION, ge=1)
    architecture: str
    config: dict[str, Any]
    tokenizer: _Tokenizer
    feature: _Feature
    decoding: _Decoding
    metadata: dict[str, Any]
    files: dict[str, _File]


class NativeConverter(CheckpointConverter):
    """Reads what :func:`save_native` writes; every file must be there and have the recorded hash."""

    oasr_api: ClassVar[str] = "1.0"
    looks_for = (f"{CONFIG_NAME} (native format, written by 'oasr convert')",)
    #: A native bundle holds any architecture; the one that it names must be installed.
    architectures: ClassVar[tuple[str, ...]] = ()
    default_checkpoint_name = WEIGHTS_NAME

    def detect(self, peek: CheckpointPeek) -> Detection | None:
        """Claim a directory with ``oasr_config.json``."""
        return Detection(RANK_KEYED_VALUE, CONFIG_NAME) if peek.exists(CONFIG_NAME) else None

    def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
        """Read the bundle; ``CheckpointError`` where a file is missing, damaged or of a newer format."""
        from oasr_core.checkpoints.unpickle import load_safetensors

        config = read_native_config(peek)
        for name, expected in config.files.items():
            _verify(peek.file(name), expected)
        weights = checkpoint_name or WEIGHTS_NAME
        for name in (weights, *config.tokenizer.files.values()):
            if name not in config.files:
                raise CheckpointError(
                    f"{peek.path / CONFIG_NAME}: {name!r} is not among its files {list(config.files)}."
                )
        return CheckpointBundle(
            architecture=config.architecture,
            config=config.config,
            state_dict=load_safetensors(peek.file(weights)),
            tokenizer=TokenizerSpec(
                kind=config.tokenizer.kind,
                files={role: peek.file(name) for role, name in config.tokenizer.files.items()},
                options=config.tokenizer.options,
            ),
            feature=FeatureSpec(**config.feature.model_dump()),
            decoding=DecodingDefaults(**config.decoding.model_dump()),
            source=str(peek.path),
            converter=NATIVE,
            metadata=config.metadata,
        )


def read_native_config(peek: CheckpointPeek) -> NativeConfig:
    """The validated ``oasr_config.json``; ``CheckpointError`` names the field at fault, or the newer format version."""
    content = peek.json(CONFIG_NAME)
    where = peek.path / CONFIG_NAME
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version}; this oasr-core reads up to {FORMAT_VERSION}: upgrade oasr-core."
        )
    try:
        return NativeConfig.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}" for fault in error.errors())
        raise CheckpointError(f"{where} is not a native checkpoint's configuration: {faults}.") from error


def save_native(
    bundle: CheckpointBundle, directory: str | Path, *, dtype: DTypeName | None = None, force: bool = False
) -> Path:
    """Write ``bundle`` in the native format and return the directory.

    ``dtype`` casts floating weights (``None`` keeps them). Equal bundles give equal bytes. A directory that is not
    empty is refused unless ``force``, which replaces the bundle's own files and leaves others alone;
    ``oasr_config.json`` is written last, so that a half-written bundle is not taken for one.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    require_writable(directory, force)
    weights = _weights(bundle.state_dict, dtype)
    names = _tokenizer_names(bundle.tokenizer.files)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_NAME).unlink(missing_ok=True)
        for role, name in names.items():
            _copy(bundle.tokenizer.files[role], directory / name)
        partial = directory / f"{WEIGHTS_NAME}.partial"
        partial.touch()
        mode = partial.stat().st_mode  # as the umask has it; safetensors writes a file for its owner alone
        save_file(weights, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        os.replace(partial, directory / WEIGHTS_NAME)
        config = _native_config(bundle, directory, names)
        partial = directory / f"{CONFIG_NAME}.partial"
        partial.write_text(config, encoding="utf-8")
        os.replace(partial, directory / CONFIG_NAME)
    except OSError as error:
        raise CheckpointError(f"The native checkpoint cannot be written to {directory}: {error}.") from error
    return directory


def _native_config(bundle: CheckpointBundle, directory: Path, names: Mapping[str, str]) -> str:
    config = NativeConfig(
        architecture=bundle.architecture,
        config=dict(bundle.config),
        tokenizer=_Tokenizer(kind=bundle.tokenizer.kind, files=dict(names), options=dict(bundle.tokenizer.options)),
        feature=_Feature(
            kind=bundle.feature.kind,
            audio_scale=bundle.feature.audio_scale,
            options=dict(bundle.feature.options),
        ),
        decoding=_Decoding(
            decode_method=bundle.decoding.decode_method,
            options=dict(bundle.decoding.options),
            chunk_size=bundle.decoding.chunk_size,
            num_left_chunks=bundle.decoding.num_left_chunks,
        ),
        # Folders of the machine that converts are nobody's business and would make equal bundles differ.
        metadata={"source": PurePath(bundle.source).name, "converter": bundle.converter, **bundle.metadata},
        files={name: _describe(directory / name) for name in sorted({WEIGHTS_NAME, *names.values()})},
    )
    try:
        return json.dumps(config.model_dump(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The bundle of converter {bundle.converter!r} has values that JSON cannot hold: {error}. Configurations, "
            "options and metadata are JSON types."
        ) from error


def _weights(state_dict: Mapping[str, Tensor], dtype: DTypeName | None) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory (safetensors stores none that do), in the order of their names."""
    import torch

    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is unknown; expected one of {', '.join(_DTYPES)}.")
    target = getattr(torch, _DTYPES[dtype]) if dtype else None
    seen: set[int] = set()
    weights = {}
    for name, tensor in sorted(state_dict.items()):
        value = tensor.detach().to(target) if target is not None and tensor.is_floating_point() else tensor.detach()
        value = value.contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        weights[name] = value
    return weights


def _tokenizer_names(files: Mapping[str, Path]) -> dict[str, str]:
    """Role -> relative name; base names are kept where they are unique."""
    taken: set[str] = set()
    names = {}
    for role, path in sorted(files.items()):
        base = path.name if path.name not in taken else f"{role}-{path.name}"
        taken.add(base)
        names[role] = f"tokenizer/{base}"
    return names


def require_writable(directory: Path, force: bool) -> None:
    """Refuse a file, or a directory that is not empty unless ``force``."""
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; expected a directory to write the native checkpoint to.")
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise CheckpointError(
            f"{directory} is not empty. Give a new directory, or --force (force=True) to replace {CONFIG_NAME}, "
            f"{WEIGHTS_NAME} and the tokenizer's files in it."
        )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    shutil.copyfile(source, partial)
    os.replace(partial, target)


def _describe(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def _verify(path: Path, expected: _File) -> None:
    size = path.stat().st_size
    if size != expected.size:
        raise CheckpointError(
            f"{path} has {size} bytes instead of {expected.size}: it is truncated or was replaced. Copy it again."
        )
    if _describe(path).sha256 != expected.sha256:
        raise CheckpointError(f"{path} does not have the recorded sha256: it is damaged or was edited. Copy it again.")
