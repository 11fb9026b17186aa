"""The axes as data: entry-point group, contract and API version of each, and what first-party distributions bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: The distribution whose built-ins are never narrowed by an allow list.
CORE_DISTRIBUTION = "oasr-core"


@dataclass(frozen=True)
class Axis:
    """One kind of thing that can be plugged in.

    ``contract`` is ``"module:Class"``, imported when an entry is resolved; ``None`` where an axis has no contract yet.
    ``kind`` says whether entries are subclasses or instances of it. ``required`` names members that the contract
    declares without a value. ``parts`` are contracts of objects that a resolved entry builds
    (:meth:`~oasr_core._plugins.registry.Registry.check_part`).
    """

    name: str
    group: str
    singular: str
    contract: str | None = None
    kind: Literal["class", "instance"] = "class"
    required: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    api: tuple[int, int] = (1, 0)

    @property
    def api_text(self) -> str:
        """The API version as ``"major.minor"``."""
        return f"{self.api[0]}.{self.api[1]}"


_AXES = (
    Axis(
        "models",
        "oasr.models",
        "model",
        "oasr_core.models.base:BaseAsrModel",
        required=("architecture",),
        parts={"encoder": "oasr_core.models.base:BaseEncoder"},
    ),
    Axis(
        "converters",
        "oasr.converters",
        "converter",
        "oasr_core.checkpoints.converter:CheckpointConverter",
        required=("looks_for", "architectures"),
    ),
    Axis(
        "decode_strategies",
        "oasr.decode_strategies",
        "decode strategy",
        "oasr_core.decoding.base:DecodeStrategy",
    ),
    Axis(
        "streaming_backends",
        "oasr.streaming_backends",
        "streaming backend",
        "oasr_core.streaming.base:StreamingEncoderBackend",
    ),
    Axis(
        "batching_policies", "oasr.batching_policies", "batching policy", "oasr_core.scheduling.policies:BatchingPolicy"
    ),
    Axis(
        "partition_policies",
        "oasr.partition_policies",
        "partition policy",
        "oasr_core.scheduling.partition:PartitionPolicy",
    ),
    Axis("tokenizers", "oasr.tokenizers", "tokenizer", "oasr_core.tokenizers.base:Tokenizer"),
    Axis(
        "frontends",
        "oasr.frontends",
        "feature frontend",
        "oasr_core.frontend.base:FeatureFrontend",
        required=("options_cls",),
    ),
    Axis("graph_backends", "oasr.graph_backends", "graph backend", "oasr_core.graphs.backends:GraphBackend"),
    Axis("quantization", "oasr.quantization", "quantization scheme"),
    Axis(
        "pretrained",
        "oasr.pretrained",
        "pretrained model",
        "oasr_core.checkpoints.pretrained:PretrainedModel",
        kind="instance",
        required=("description", "licence", "languages", "sample_rate"),
    ),
    Axis(
        "segmenters",
        "oasr.segmenters",
        "segmenter",
        "oasr_core.segmenters.base:Segmenter",
        required=("options_cls",),
    ),
    Axis("output_transforms", "oasr.output_transforms", "output transform"),
    Axis("commands", "oasr.commands", "CLI command", "typer:Typer", kind="instance"),
    # Observers are not chosen by name; they share discovery, guarded loading and the allow and block lists.
    Axis("observers", "oasr", "observer"),
)

#: Axis name -> axis, in the order in which listings show them.
AXES: Mapping[str, Axis] = {axis.name: axis for axis in _AXES}

#: ``axis/name`` -> the first-party distribution that provides it, for "pip install ..." hints.
FIRST_PARTY: Mapping[str, str] = {
    "models/conformer": "oasr-conformer",
    "models/zipformer": "oasr-zipformer",
    "models/nemotron": "oasr-nemotron",
    "models/parakeet": "oasr-nemotron",
    "models/whisper": "oasr-whisper",
    "models/paraformer": "oasr-paraformer",
    "models/qwen2_audio": "oasr-llm",
    "converters/wenet": "oasr-conformer",
    "converters/icefall": "oasr-zipformer",
    "converters/nemotron": "oasr-nemotron",
    "converters/whisper": "oasr-whisper",
    "converters/ctranslate2": "oasr-whisper",
    "converters/funasr": "oasr-paraformer",
    "converters/qwen2_audio": "oasr-llm",
    "decode_strategies/ctc": "oasr-ctc",
    "decode_strategies/ctc_aed_rescoring": "oasr-ctc",
    "decode_strategies/ctc_wfst": "oasr-wfst",
    "decode_strategies/transducer": "oasr-transducer",
    "decode_strategies/aed": "oasr-whisper",
    "decode_strategies/paraformer": "oasr-paraformer",
    "decode_strategies/llm": "oasr-llm",
    "frontends/nemotron_logmel": "oasr-nemotron",
    "segmenters/vad": "oasr-vad",
    "pretrained/demo-digits": "oasr-demo-digits",
    "commands/serve": "oasr-server",
    "commands/wfst": "oasr-wfst",
    "commands/ray": "oasr-ray",
}

#: First-party distributions that this repository does not hold yet.
PLANNED = frozenset(
    {
        "oasr-llm",
        "oasr-nemotron",
        "oasr-paraformer",
        "oasr-ray",
        "oasr-server",
    }
)
