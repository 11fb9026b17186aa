"""From what the user calls a checkpoint to a :class:`CheckpointBundle`: locate, choose a converter, convert."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oasr_core.checkpoints.bundle import CheckpointBundle
from oasr_core.checkpoints.converter import CheckpointConverter, Detection
from oasr_core.checkpoints.first_party import likely_distributions
from oasr_core.checkpoints.headers import FileKind, file_kind
from oasr_core.checkpoints.locate import locate_checkpoint
from oasr_core.checkpoints.native import CONFIG_NAME, NATIVE
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.errors import CheckpointError, OasrError, PluginError, did_you_mean
from oasr_core.registry import how_to_install, install_hint, registry

logger = logging.getLogger(__name__)

#: What a file that nobody recognises is.
_KINDS: Final[Mapping[FileKind, str]] = {
    "torch": "weights saved by torch",
    "torch-legacy": "saved by torch before 1.6, which is not read",
    "torchscript": "a TorchScript program",
    "safetensors": "weights in safetensors",
    "lfs-pointer": "a Git LFS pointer: run 'git lfs pull'",
    "unknown": "neither torch nor safetensors weights",
}


@dataclass(frozen=True)
class Choice:
    """A converter, the view of the checkpoint that it claimed, and the weights file to read (``None``: its default)."""

    name: str
    converter: CheckpointConverter
    peek: CheckpointPeek
    checkpoint_name: str | None
    reason: str


@dataclass
class _Survey:
    """What every converter said of a checkpoint."""

    claims: list[tuple[int, Choice]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def resolve_checkpoint(
    ckpt: str | Path, *, architecture: str | None = None, checkpoint_name: str | None = None
) -> CheckpointBundle:
    """Find, recognise and convert a checkpoint.

    ``ckpt`` is what :func:`~oasr_core.checkpoints.locate.locate_checkpoint` takes: a directory, a file, a pretrained
    name or a Hub id. A native bundle is taken as such; else ``architecture`` (an architecture or a converter's name)
    restricts who is asked; else every converter is asked and the highest rank wins. Raises ``CheckpointError`` naming
    who was asked, what they looked for and what would claim it, two converters that tie, or the file at fault.
    """
    path = locate_checkpoint(ckpt)
    choice = choose_converter(path, architecture=architecture, checkpoint_name=checkpoint_name)
    logger.info("%s: converter %s (%s)", path, choice.name, choice.reason)
    bundle = _convert(choice)
    if architecture not in (None, bundle.architecture, choice.name):
        raise CheckpointError(
            f"{path} holds the architecture {bundle.architecture!r}, but architecture={architecture!r} was asked for: "
            f"leave the setting out or give {bundle.architecture!r}."
        )
    bundle.converter = bundle.converter or choice.name
    bundle.source = bundle.source or str(ckpt)
    return bundle


def choose_converter(path: Path, *, architecture: str | None = None, checkpoint_name: str | None = None) -> Choice:
    """The converter for the checkpoint at ``path``; nothing is converted and torch is not imported."""
    views = _views(path, checkpoint_name)
    native = next((view for view, _ in views if view.exists(CONFIG_NAME)), None)
    if native is not None:
        return Choice(NATIVE, registry("converters").get(NATIVE)(), native, None, CONFIG_NAME)
    survey = _Survey()
    candidates = _candidates(architecture, survey)
    for name, converter in candidates:
        _ask(name, converter, views, survey)
    if not survey.claims:
        if architecture is not None and len(candidates) == 1 and not survey.failed:
            name, converter = candidates[0]
            return Choice(name, converter, *views[-1], f"architecture={architecture!r}")
        raise CheckpointError(_nobody_claims(path, views[-1][0], architecture, survey))
    return _winner(path, survey)


def _views(path: Path, checkpoint_name: str | None) -> list[tuple[CheckpointPeek, str | None]]:
    """A directory as it is; a file alone, then as the weights file of the directory that holds it."""
    peek = CheckpointPeek(path)
    if peek.is_directory:
        return [(peek, checkpoint_name)]
    return [(peek, checkpoint_name), (CheckpointPeek(peek.directory), checkpoint_name or path.name)]


def _candidates(architecture: str | None, survey: _Survey) -> list[tuple[str, CheckpointConverter]]:
    found, known = [], set()
    for name in registry("converters").names():
        if name == NATIVE:
            continue
        try:
            converter = registry("converters").get(name)()
        except PluginError as error:
            survey.failed.append(str(error))
            continue
        except Exception as error:  # a plugin's constructor may raise anything; it must not hide the others
            survey.failed.append(f"{_owned(name)} cannot be built: {type(error).__name__}: {error}")
            continue
        known.update({name, *converter.architectures})
        if architecture is None or architecture == name or architecture in converter.architectures:
            found.append((name, converter))
    if architecture is not None and not found:
        raise CheckpointError(
            f"No installed converter produces architecture {architecture!r}. "
            f"Known: {', '.join(sorted(known)) or 'none'}."
            f"{did_you_mean(architecture, known)}"
            f"{install_hint('models', architecture) or install_hint('converters', architecture)}"
            f"{_failures(survey)}"
        )
    return found


def _ask(
    name: str, converter: CheckpointConverter, views: Sequence[tuple[CheckpointPeek, str | None]], survey: _Survey
) -> None:
    """Record a converter's claim, silence or failure; the first view that it claims counts."""
    try:
        for peek, checkpoint_name in views:
            detection = converter.detect(peek)
            if detection is None:
                continue
            if not isinstance(detection, Detection):
                raise TypeError(f"detect() returned {detection!r}, expected a Detection or None")
            choice = Choice(name, converter, peek, checkpoint_name, detection.reason)
            survey.claims.append((detection.rank, choice))
            return
    except OasrError as error:  # the checkpoint is at fault, which matters where nobody claims it
        survey.failed.append(f"{_owned(name)}: {error}")
        logger.info("%s", survey.failed[-1])
        return
    except Exception as error:  # a broken plugin is reported and does not stop the others
        survey.failed.append(f"{_owned(name)} failed while looking: {type(error).__name__}: {error}")
        logger.warning("%s", survey.failed[-1], exc_info=True)
        return
    survey.silent.append(_looked_for(name, converter.looks_for))


def _winner(path: Path, survey: _Survey) -> Choice:
    best = max(rank for rank, _ in survey.claims)
    winners = [choice for rank, choice in survey.claims if rank == best]
    if len(winners) > 1:
        claims = " and ".join(f"{_owned(choice.name)} ({choice.reason})" for choice in winners)
        ways = " or ".join(f"architecture={choice.name!r}" for choice in winners)
        raise CheckpointError(f"{path} is claimed with equal rank {best} by {claims}. Choose one: {ways}.")
    return winners[0]


def _convert(choice: Choice) -> CheckpointBundle:
    try:
        bundle = choice.converter.convert(choice.peek, checkpoint_name=choice.checkpoint_name)
    except OasrError as error:
        weights = choice.checkpoint_name or choice.converter.default_checkpoint_name
        if weights is None or choice.peek.exists(weights) or repr(weights) not in str(error):
            raise
        raise CheckpointError(
            f"{error} Weights are read from {weights!r}; name another file of the checkpoint with "
            "checkpoint_name=FILE (--set checkpoint_name=FILE, or oasr convert --checkpoint-name FILE)."
        ) from error
    except Exception as error:  # plugins run here: what they raise is reported as theirs
        raise CheckpointError(
            f"{_owned(choice.name)} recognised {choice.peek.path} ({choice.reason}) but failed to convert it: "
            f"{type(error).__name__}: {error}. The checkpoint is malformed, or it is a variant that the converter does "
            "not know."
        ) from error
    if not isinstance(bundle, CheckpointBundle):
        raise CheckpointError(f"{_owned(choice.name)} returned {type(bundle).__name__}, expected a CheckpointBundle.")
    return bundle


def _nobody_claims(path: Path, peek: CheckpointPeek, architecture: str | None, survey: _Survey) -> str:
    restricted = f" for architecture {architecture!r}" if architecture else ""
    what = f"it has: {', '.join(peek.files()[:12]) or 'no files'}"
    if not path.is_dir():
        what = f"it is a file, {_KINDS[file_kind(path)]}"
    lines = [f"No converter{restricted} recognises {path} ({what})."]
    native = registry("converters").get(NATIVE)
    lines += [f"  - {line}" for line in (_looked_for(NATIVE, native.looks_for), *survey.silent, *survey.failed)]
    installed = {entry.distribution for entry in registry("converters").entries()}
    for distribution, marker in likely_distributions(peek):
        if distribution not in installed:
            lines.append(f"It looks like a checkpoint for {distribution} ({marker}): {how_to_install(distribution)}")
    lines.append(
        "'oasr models' lists what is installed; architecture=NAME (--set architecture=NAME, or oasr convert "
        "--architecture NAME) skips recognition."
    )
    return "\n".join(lines)


def _looked_for(name: str, markers: Sequence[str]) -> str:
    return f"{_owned(name)} looked for {'; '.join(markers)}"


def _failures(survey: _Survey) -> str:
    return "".join(f"\n  - {line}" for line in survey.failed)


def _owned(name: str) -> str:
    """``converter 'wenet' of oasr-conformer 0.1.0``."""
    return f"converter {name!r} of {registry('converters').find(name).owner}"
