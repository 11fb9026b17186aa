"""Which icefall recipe a checkpoint comes from, by the names of its tensors (torch-free)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: What DistributedDataParallel puts in front of every name.
_PARALLEL = "module."


@dataclass(frozen=True)
class Family:
    """A recipe, the substrings of tensor names that tell it (each must occur), and why it is not served, if so."""

    name: str
    signs: tuple[str, ...]
    refusal: str = ""


_ZIPFORMER2 = ("encoder_embed.convnext.", "layers.0.bypass_mid.bypass_scale")

ZIPFORMER2 = Family("Zipformer2 (recipe zipformer)", _ZIPFORMER2)

_OTHER_NETWORK = "It is another network; a plugin for that family would have to serve it."

# Asked in this order: the variants of Zipformer2 before Zipformer2 itself.
_FAMILIES = (
    Family(
        "Zipformer2 with LoRA weights (zipformer_lora)",
        (*_ZIPFORMER2, "lora_A"),
        "Their scale is not in the file: merge them into the weights where the model was trained.",
    ),
    Family("Zipformer2 with adapters (zipformer_adapter)", (*_ZIPFORMER2, "adapter"), _OTHER_NETWORK),
    Family("Zipformer2 with text prompts (zipformer_prompt_asr)", (*_ZIPFORMER2, "text_encoder."), _OTHER_NETWORK),
    Family(
        "Zipformer2 with text prompts (zipformer_prompt_asr)", (*_ZIPFORMER2, "style_prompt_embedding"), _OTHER_NETWORK
    ),
    ZIPFORMER2,
    Family(
        "Zipformer version 1 (pruned_transducer_stateless7, 8, zipformer_ctc, zipformer_mmi)",
        ("encoder.encoder_embed.", "encoder.encoders.0.", "layers.0.norm_final.eps"),
        "Its layers, norms and downsampling differ from Zipformer2's.",
    ),
    Family(
        "Zipformer version 1 (pruned_transducer_stateless7, 8, zipformer_ctc, zipformer_mmi)",
        ("encoder.skip_modules.",),
        "Its layers, norms and downsampling differ from Zipformer2's.",
    ),
    Family("ConvEmformer transducer", ("encoder.encoder.emformer_layers.",), _OTHER_NETWORK),
    Family("LSTM transducer", ("encoder.encoder.layers.0.lstm.",), _OTHER_NETWORK),
    Family(
        "Conformer transducer (pruned_transducer_stateless to 6, transducer_stateless)",
        ("encoder.encoder.layers.0.self_attn.pos_bias_u",),
        _OTHER_NETWORK,
    ),
    Family("conformer_ctc", ("encoder_output_layer.1.",), _OTHER_NETWORK),
    Family("tdnn_lstm_ctc", ("tdnn.0.", "lstms.0."), _OTHER_NETWORK),
)


def bare_name(name: str) -> str:
    """A tensor's name without what parallel training puts in front."""
    return name.removeprefix(_PARALLEL)


def recognise(names: Collection[str]) -> Family | None:
    """The family of a checkpoint with tensors of these names; ``None`` where no recipe of icefall is known."""
    joined = "\n".join(bare_name(name) for name in names)
    return next((family for family in _FAMILIES if all(sign in joined for sign in family.signs)), None)
