"""From a :class:`CheckpointBundle` to a model with weights, and the report of what went where."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oasr_core.checkpoints.bundle import CheckpointBundle
from oasr_core.checkpoints.native import NATIVE
from oasr_core.errors import CheckpointError, OasrError
from oasr_core.models.base import BaseAsrModel
from oasr_core.registry import registry

logger = logging.getLogger(__name__)

_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """Which tensors of a checkpoint the model took.

    ``mapped`` were loaded; ``unused`` are known to be of no use to the model; ``lost`` maps a capability to the tensors
    that would give it and that this model does not take; ``dropped`` are all others that it does not take. ``missing``
    are the model's that the checkpoint lacks, ``mismatched`` those whose shape differs (with both shapes); a model is
    only returned where these two are empty.
    """

    mapped: tuple[str, ...]
    unused: tuple[str, ...] = ()
    lost: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """One line with counts, then a line for each capability that is lost and for tensors that are dropped."""
        counts = (
            f"{len(self.mapped)} tensors loaded, {len(self.unused)} known and not needed, {len(self.dropped)} dropped"
        )
        lines = [counts]
        lines += [f"capability lost: {name} ({_names(tensors)})" for name, tensors in self.lost.items()]
        if self.dropped:
            lines.append(f"dropped: {_names(self.dropped)}")
        return "\n".join(lines)


def load_model(bundle: CheckpointBundle) -> tuple[BaseAsrModel, LoadReport]:
    """Build the bundle's model on the CPU, in evaluation mode, with the bundle's weights in their own dtypes.

    Weights are taken over, not copied: they stay mapped from the checkpoint's file until they are cast or moved. Raises
    ``CheckpointError`` listing tensors that are missing or have another shape, and what the registry raises for an
    architecture that is not installed.
    """
    cls = registry("models").get(bundle.architecture)
    model = _build(cls, bundle)
    report = compare_weights(model, bundle.state_dict)
    _require_complete(bundle, report)
    weights = {name: bundle.state_dict[name].detach().contiguous() for name in report.mapped}
    model.load_state_dict(weights, strict=False, assign=True)
    _log(bundle, report)
    return model.eval().requires_grad_(False), report


def compare_weights(model: BaseAsrModel, weights: Mapping[str, Tensor]) -> LoadReport:
    """Sort the tensors of ``weights`` by what ``model`` does with them."""
    expected = model.state_dict()
    lost: dict[str, list[str]] = {}
    unused, dropped = [], []
    for name in weights:
        if name in expected:
            continue
        capability = next((text for glob, text in model.capability_drop_hints.items() if fnmatchcase(name, glob)), None)
        if capability is not None:
            lost.setdefault(capability, []).append(name)
        elif any(fnmatchcase(name, glob) for glob in model.expected_unused):
            unused.append(name)
        else:
            dropped.append(name)
    mismatched = {
        name: f"the checkpoint has {_layout(weights[name])}, the model {_layout(tensor)}"
        for name, tensor in expected.items()
        if name in weights and not _fits(weights[name], tensor)
    }
    return LoadReport(
        mapped=tuple(name for name in expected if name in weights and name not in mismatched),
        unused=tuple(unused),
        lost={capability: tuple(names) for capability, names in lost.items()},
        dropped=tuple(dropped),
        missing=tuple(name for name in expected if name not in weights),
        mismatched=mismatched,
    )


def _build(cls: type[BaseAsrModel], bundle: CheckpointBundle) -> BaseAsrModel:
    try:
        with _NoRandomInit():
            return cls.from_config(bundle.config)
    except OasrError:
        raise
    except Exception as error:  # a model's constructor sees whatever the checkpoint's configuration holds
        raise CheckpointError(
            f"Architecture {bundle.architecture!r} cannot be built from the configuration of "
            f"{bundle.source or 'the bundle'}: {type(error).__name__}: {error}."
        ) from error


def _require_complete(bundle: CheckpointBundle, report: LoadReport) -> None:
    faults = []
    if report.missing:
        faults.append(f"{len(report.missing)} tensors are missing: {_names(report.missing)}")
    if report.mismatched:
        shown = [f"{name} ({text})" for name, text in list(report.mismatched.items())[:_SHOWN]]
        faults.append(f"{len(report.mismatched)} tensors do not fit: {'; '.join(shown)}")
    strangers = (*report.dropped, *report.unused, *(name for names in report.lost.values() for name in names))
    if bundle.converter == NATIVE and strangers:
        faults.append(f"a native bundle holds exactly the model's tensors, this one has others: {_names(strangers)}")
    if faults:
        raise CheckpointError(
            f"The weights of {bundle.source or 'the bundle'} do not fit architecture {bundle.architecture!r}: "
            f"{'. '.join(faults)}. The weights file and the configuration do not belong together, or the converter "
            f"{bundle.converter!r} does not know this variant."
        )


def _log(bundle: CheckpointBundle, report: LoadReport) -> None:
    for capability, names in report.lost.items():
        logger.warning("%s: %s is not available: %s are not loaded", bundle.source, capability, _names(names))
    if report.dropped:
        logger.warning("%s: %d tensors are not used: %s", bundle.source, len(report.dropped), _names(report.dropped))
    logger.info("%s: %s", bundle.source, report.summary().splitlines()[0])


def _fits(given: Tensor, expected: Tensor) -> bool:
    return given.shape == expected.shape and given.is_floating_point() == expected.is_floating_point()


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _names(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


class _NoRandomInit(TorchFunctionMode):
    """Leaves out random initialisation, which takes most of the time of building a network and is overwritten anyway.

    Constants, and buffers that a constructor computes, come out as they are; a parameter that no checkpoint tensor
    replaces is an error, so no uninitialised memory survives.
    """

    _SKIPPED = frozenset(
        {torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.log_normal_, torch.Tensor.exponential_}
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self._SKIPPED or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
