"""icefall's averages over training checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from oasr_core.checkpoints.unpickle import load_torch_weights
from oasr_core.errors import CheckpointError
from oasr_zipformer.icefall_files import training_options


def plain_average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the ``model`` weights of several files (icefall's ``--use-averaged-model 0``)."""
    models = [load_torch_weights(path, "model") for path in paths]
    return _combine(models, [1 / len(models)] * len(models), paths)


def running_average(start: Path, end: Path) -> dict[str, Tensor]:
    """Mean over all steps between two files, from the ``model_avg`` that each has kept since training began.

    icefall's ``--use-averaged-model 1``: with ``n`` steps averaged in each, ``(n_end avg_end - n_start avg_start) /
    (n_end - n_start)``.
    """
    first, last = (_steps(path) for path in (start, end))
    if last <= first:
        raise CheckpointError(f"{end} has averaged {last} steps and {start} {first}: nothing lies between them.")
    averages = [load_torch_weights(path, "model_avg") for path in (end, start)]
    return _combine(averages, [last / (last - first), -first / (last - first)], [end, start])


def _steps(path: Path) -> int:
    """Steps in a file's running average: those up to the last update."""
    options = training_options(path)
    count, period = options.get("batch_idx_train"), options.get("average_period")
    if not isinstance(count, int) or not isinstance(period, int) or period < 1:
        raise CheckpointError(
            f"{path} has no batch_idx_train and average_period, so its model_avg cannot be weighted. "
            "Average the saved weights instead, with '-plain' behind the name."
        )
    return count // period * period


def _combine(
    models: Sequence[Mapping[str, Tensor]], weights: Sequence[float], paths: Sequence[Path]
) -> dict[str, Tensor]:
    names = models[0].keys()
    for model, path in zip(models, paths, strict=True):
        if model.keys() != names or any(model[name].shape != models[0][name].shape for name in names):
            raise CheckpointError(f"{path} and {paths[0]} hold different networks and cannot be averaged.")
    averaged = {}
    for name in names:
        first = models[0][name]
        if not first.is_floating_point():
            averaged[name] = first
            continue
        total = torch.zeros(first.shape, dtype=torch.float64)
        for model, weight in zip(models, weights, strict=True):
            total += model[name].double() * weight
        averaged[name] = total.to(first.dtype)
    return averaged
