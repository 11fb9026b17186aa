"""Settings that say which checkpoint is loaded and how (torch-free)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CheckpointOptions(BaseModel):
    """Where the weights come from and what of the checkpoint is overridden."""

    ckpt_dir: str = Field("", description="Directory, file, pretrained name, or Hugging Face Hub id.")
    checkpoint_name: str | None = Field(None, description="File inside ckpt_dir; None: the converter's default.")
    architecture: str | None = Field(None, description="Skip detection: convert as this architecture.")
    sentencepiece_model: str | None = Field(None, description="SentencePiece model; None: from the checkpoint.")
    unit_table: str | None = Field(None, description="Symbol table; None: from the checkpoint.")
