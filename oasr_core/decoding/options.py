"""Settings that choose and feed a decode strategy, and those that its families share (torch-free)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from oasr_core.decoding.base import StrategyOptions
from oasr_core.decoding.endpoint import DEFAULT_RULES, EndpointRule

#: Most hypotheses of one request at a time.
MAX_WIDTH = 64


class EndpointOptions(BaseModel):
    """Where a stream's segments end."""

    endpointing: bool = Field(False, description="Report the ends of segments in streams.")
    endpoint_rules: list[EndpointRule] = Field(
        default_factory=lambda: list(DEFAULT_RULES), min_length=1, description="A segment ends when one rule holds."
    )
    endpoint_silence: Literal["decoder", "segmenter"] = Field(
        "decoder",
        description="Whose silence the rules count: the decoder's (no token), or that of the configured segmenter.",
    )
    endpoint_reset: Literal["none", "decoder"] = Field(
        "none",
        description="decoder: search anew behind an endpoint; forgets beam and context, words may change.",
    )


class DecodeOptions(BaseModel):
    """Which strategy decodes, with which options; and the budget of autoregressive families."""

    decode_method: str = Field("ctc", description="A name on the decode_strategies axis; unset: the checkpoint's.")
    decode_options: dict[str, Any] = Field(default_factory=dict, description="Options of that strategy.")
    decoder_type: str | None = Field(None, description="Alias of decode_method: ctc_cuda or ctc_wfst.")
    ctc_decoder_config: dict[str, Any] | None = Field(None, description="Alias: decode_options of ctc.")
    wfst_decoder_config: dict[str, Any] | None = Field(None, description="Alias: decode_options of ctc_wfst.")
    fst_path: str | None = Field(None, description="Alias: decode_options['fst_path'] of ctc_wfst.")
    decode_steps_per_tick: int = Field(32, ge=1, description="Decoder steps per engine step.")
    max_tick_ms: float = Field(25.0, ge=0, description="Wall-clock cap of decoding per step; 0 disables.")
    max_decode_slots: int | None = Field(
        None, ge=1, description="Autoregressive requests in flight; None: max_batch_size."
    )
    decode_admit_window_ms: float = Field(0.0, ge=0, description="Coalesce arrivals into one decode group.")
    decode_kv_budget_gib: float | None = Field(None, ge=0, description="Decoder KV ceiling; None derives, 0 disables.")


class AutoregressiveOptions(StrategyOptions):
    """What every label-synchronous family can be told."""

    beam_size: int = Field(1, ge=1, le=MAX_WIDTH, description="Hypotheses that are searched together; 1 is greedy.")
    length_penalty: float = Field(
        1.0, allow_inf_nan=False, description="Beam scores are divided by the number of tokens to this power."
    )
    patience: float = Field(
        1.0, gt=0, le=16, description="The search ends with beam_size times this many ended hypotheses."
    )
    max_new_tokens: int = Field(448, ge=1, description="Cap of generated tokens, unless the request says otherwise.")
    kv_storage: Literal["auto", "dense", "paged"] = Field(
        "auto", description="History of single hypotheses; auto: paged on CUDA, else dense. Beams are dense."
    )
    merge_groups: bool = Field(True, description="Join requests that arrive later to those that are being decoded.")
