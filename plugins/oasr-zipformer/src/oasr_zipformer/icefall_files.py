"""Which files of an icefall directory are what (torch-free)."""

from __future__ import annotations

import fnmatch
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oasr_core.checkpoints.headers import MAX_HEADER_BYTES, file_kind
from oasr_core.checkpoints.inert_pickle import read_structure
from oasr_core.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from oasr_core.checkpoints.peek import CheckpointPeek

#: Explicit model configuration, with the names of icefall's training options.
CONFIG_NAMES = ("zipformer.yaml", "zipformer.json")
#: Where published models keep their weights.
_USUAL_WEIGHTS = ("exp/pretrained.pt", "pretrained.pt")
_EXPORTS = ("*.onnx", "*.ncnn.param", "*.rknn", "*.tflite")
#: ``epoch-30-avg-9``: weights averaged over the epochs 22 to 30; ``-plain`` for the mean of the saved weights.
_AVERAGE = re.compile(r"epoch-(?P<epoch>\d+)-avg-(?P<avg>\d+)(?P<plain>-plain)?(\.pt)?")
_DISAMBIGUATION = re.compile(r"#\d+")


def weight_files(peek: CheckpointPeek) -> list[str]:
    """Names that may hold weights: ``*.pt``, ``*.safetensors`` at the top or in an ``exp`` folder, TorchScript last."""
    names = [name for name in peek.files() if name.endswith((".pt", ".safetensors")) and _is_experiment(name)]
    return sorted(names, key=lambda name: ("jit" in _base(name), _base(name) != "pretrained.pt", name.count("/"), name))


def exports(peek: CheckpointPeek) -> list[str]:
    """Models exported for another runtime."""
    return [name for name in peek.files() if any(fnmatch.fnmatch(name, pattern) for pattern in _EXPORTS)]


def token_tables(peek: CheckpointPeek) -> list[str]:
    """``tokens.txt`` at the top, in an ``exp`` folder or in a language folder."""
    return [name for name in peek.files() if _base(name) == "tokens.txt" and (_is_experiment(name) or "lang" in name)]


def choose_weights(peek: CheckpointPeek, checkpoint_name: str | None) -> str:
    """The weights file: the named one, ``pretrained.pt``, or the only one there is."""
    names = weight_files(peek)
    if checkpoint_name is not None:
        named = [name for name in names if checkpoint_name in (name, _base(name))]
        if len(named) > 1 and checkpoint_name not in named:
            raise CheckpointError(
                f"{peek.path}: {checkpoint_name!r} is ambiguous: {', '.join(named)}. Name the folder."
            )
        if named:
            return checkpoint_name if checkpoint_name in named else named[0]
        raise CheckpointError(
            f"{peek.path} has no weights file {checkpoint_name!r}; it has: {', '.join(names) or 'none'}."
            f"{did_you_mean(checkpoint_name, names)}"
        )
    found = exports(peek)
    if not names:
        raise CheckpointError(
            f"{peek.path} holds exported models ({', '.join(found[:4])}), which are not read. "
            "Give the training checkpoint (pretrained.pt or epoch-*.pt) that they were exported from."
            if found
            else f"{peek.path} has no weights (*.pt) at the top or in an exp folder."
        )
    usual = next((name for name in _USUAL_WEIGHTS if name in names), None)
    if usual is not None:
        return usual
    first = [name for name in names if _base(name) == "pretrained.pt"] or names
    plain = [name for name in first if "jit" not in _base(name)] or first
    if len(plain) > 1:
        raise CheckpointError(
            f"{peek.path} has several weights files: {', '.join(plain)}. Choose one by checkpoint_name, or the average "
            "over epochs by a name like 'epoch-30-avg-9'."
        )
    return plain[0]


def average_of(peek: CheckpointPeek, checkpoint_name: str | None) -> tuple[list[str], bool] | None:
    """The epoch files that a name like ``epoch-30-avg-9`` averages, oldest first, and whether it is the plain mean.

    ``None`` where the name asks for no average, or where a file of that name exists. The plain mean takes the last
    ``avg`` epochs; otherwise two files are enough, those before the first and after the last epoch.
    """
    match = _AVERAGE.fullmatch(_base(checkpoint_name or ""))
    names = {_base(name): name for name in weight_files(peek)}
    if match is None or _base(checkpoint_name or "") in names:
        return None
    epoch, avg, plain = int(match["epoch"]), int(match["avg"]), match["plain"] is not None
    if not 1 <= avg <= epoch - (0 if plain else 1):
        raise CheckpointError(
            f"checkpoint_name {checkpoint_name!r}: avg must be between 1 and {epoch - (0 if plain else 1)} for epoch "
            f"{epoch}, got {avg}."
        )
    epochs = range(epoch - avg + 1, epoch + 1) if plain else (epoch - avg, epoch)
    missing = [f"epoch-{number}.pt" for number in epochs if f"epoch-{number}.pt" not in names]
    if missing:
        raise CheckpointError(f"{peek.path}: {checkpoint_name!r} needs {', '.join(missing)}, which is not there.")
    return [names[f"epoch-{number}.pt"] for number in epochs], plain


def training_options(path: Path) -> Mapping[str, Any]:
    """Plain values beside the weights of a training checkpoint; nothing of the file is executed."""
    if file_kind(path) != "torch":
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.split("/", 1)[-1] == "data.pkl")
            with archive.open(name) as file:
                root = read_structure(file.read(MAX_HEADER_BYTES))
    except (zipfile.BadZipFile, StopIteration, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a readable torch checkpoint: {error}.") from error
    if not isinstance(root, Mapping):
        return {}
    return {key: value for key, value in root.items() if isinstance(value, (str, int, float, bool))}


def explicit_options(peek: CheckpointPeek, weights: str) -> Mapping[str, Any]:
    """``zipformer.yaml`` or ``zipformer.json`` beside the weights or at the top of the checkpoint, else nothing."""
    folder = weights.rsplit("/", 1)[0] + "/" if "/" in weights else ""
    for name in (prefix + name for prefix in dict.fromkeys((folder, "")) for name in CONFIG_NAMES):
        if peek.exists(name):
            content = peek.json(name) if name.endswith(".json") else peek.yaml(name)
            if not isinstance(content, Mapping):
                raise CheckpointError(f"{peek.path}/{name} holds no mapping, got {type(content).__name__}.")
            return content
    return {}


def choose_tokens(peek: CheckpointPeek, vocab_size: int) -> tuple[str, list[str]]:
    """The token table of a model with ``vocab_size`` outputs, and its symbols in the order of the file."""
    tables = {name: read_symbols(peek, name) for name in token_tables(peek)}
    if not tables:
        raise CheckpointError(
            f"{peek.path} has no tokens.txt, at the top or under data/lang_*. Give the directory that holds both the "
            "weights (exp/) and the tokens (data/lang_*/), with checkpoint_name where the weights have another name."
        )
    fitting = {name: symbols for name, symbols in tables.items() if _spoken(symbols) == vocab_size}
    if not fitting:
        counts = ", ".join(f"{name} has {_spoken(symbols)}" for name, symbols in tables.items())
        raise CheckpointError(
            f"{peek.path}: the model has {vocab_size} outputs, but {counts} tokens (disambiguation symbols not "
            "counted): weights and token table do not belong together."
        )
    contents = {tuple(symbols[:vocab_size]) for symbols in fitting.values()}
    if len(contents) > 1:
        raise CheckpointError(
            f"{peek.path} has several token tables that fit: {', '.join(fitting)}. Keep the one that the model was "
            "trained with."
        )
    return next(iter(fitting.items()))


def read_symbols(peek: CheckpointPeek, name: str) -> list[str]:
    """First fields of a table's lines."""
    return [line.split()[0] for line in peek.text(name).split("\n") if line.strip()]


def sentencepiece_model(peek: CheckpointPeek, tokens: str) -> str | None:
    """``bpe.model`` beside the tokens or at the top; byte-level models are refused."""
    folder = tokens.rsplit("/", 1)[0] + "/" if "/" in tokens else ""
    for name in dict.fromkeys((f"{folder}bbpe.model", "bbpe.model")):
        if peek.exists(name):
            raise CheckpointError(
                f"{peek.path}/{name}: the tokens are byte-level BPE (bytes in disguise), which is not served."
            )
    return next((name for name in dict.fromkeys((f"{folder}bpe.model", "bpe.model")) if peek.exists(name)), None)


def _spoken(symbols: list[str]) -> int:
    return sum(1 for symbol in symbols if not _DISAMBIGUATION.fullmatch(symbol))


def _is_experiment(name: str) -> bool:
    folder, _, _ = name.rpartition("/")
    return folder == "" or folder.split("/")[-1].startswith("exp")


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]
