"""The network of silero-vad: windows of 32 ms to probabilities of speech.

The files are those that the distribution ``silero-vad`` carries; its Python package is found, not imported. Each window
is given to the network behind the last samples of the one before, and a recurrent state is carried on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oasr_core.errors import ConfigError, MissingExtraError

Floats = NDArray[np.float32]

#: Rate in Hz -> file, samples of a window, samples of context before it.
_NETWORKS = {8000: ("silero_vad.onnx", 256, 32), 16000: ("silero_vad_16k_sequence.onnx", 512, 64)}
#: Windows given to the network in one call: 16 s, a transient of a few megabytes.
_BLOCK = 512


@dataclass(slots=True)
class SpeechState:
    """What a stream carries from one window to the next."""

    context: Floats
    recurrent: Floats = field(default_factory=lambda: np.zeros((2, 1, 128), np.float32))


class SpeechModel:
    """The network for one sampling rate; stateless, so that any number of threads may share it."""

    def __init__(self, sample_rate: int) -> None:
        """Raises ``ConfigError`` for a rate that silero-vad has no network for."""
        if sample_rate not in _NETWORKS:
            served = " and ".join(str(rate) for rate in sorted(_NETWORKS))
            raise ConfigError(
                f"segmenter 'vad' serves audio at {served} Hz, and this model takes {sample_rate} Hz; "
                f"choose another segmenter ('quiet', 'overlap')."
            )
        name, self.window, self._context = _NETWORKS[sample_rate]
        self.sample_rate = sample_rate
        self._session = _session(name)

    def start(self) -> SpeechState:
        """The state before the first sample."""
        return SpeechState(np.zeros(self._context, np.float32))

    def probabilities(self, windows: Floats, state: SpeechState) -> Floats:
        """Probabilities of speech ``(n,)`` of consecutive windows ``(n, window)``; ``state`` is carried on in place."""
        found = [self._run(windows[first : first + _BLOCK], state) for first in range(0, len(windows), _BLOCK)]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def _run(self, windows: Floats, state: SpeechState) -> Floats:
        contexts = np.concatenate([state.context[None], windows[:-1, -self._context :]])
        inputs = np.concatenate([contexts, windows], axis=1)
        state.context = windows[-1, -self._context :].copy()
        if self.sample_rate == 16000:
            hidden, cell = state.recurrent[:1], state.recurrent[1:]
            found, hidden, cell = self._session.run(
                ["speech_probs", "hn", "cn"], {"input": inputs, "h": hidden, "c": cell}
            )
            state.recurrent = np.concatenate([hidden, cell])
            return np.asarray(found, np.float32).reshape(-1)
        return np.concatenate([self._step(row[None], state) for row in inputs])

    def _step(self, row: Floats, state: SpeechState) -> Floats:
        rate = np.array(self.sample_rate, np.int64)
        found, state.recurrent = self._session.run(
            ["output", "stateN"], {"input": row, "state": state.recurrent, "sr": rate}
        )
        return np.asarray(found, np.float32).reshape(-1)


@lru_cache(maxsize=len(_NETWORKS))
def _session(name: str) -> Any:
    """An onnxruntime session on one thread, shared by all that use this network."""
    path = _data_folder() / name
    if not path.is_file():
        raise MissingExtraError(f"the installed silero-vad has no {name}; pip install 'silero-vad>=6.2.3'")
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _data_folder() -> Path:
    found = find_spec("silero_vad")
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError("segmenter 'vad' needs silero-vad; pip install 'silero-vad>=6.2.3'")
    return Path(found.submodule_search_locations[0]) / "data"
