"""Recognises WeNet model directories (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from oasr_core.checkpoints.converter import RANK_KEYED_VALUE, CheckpointConverter, Detection
from oasr_core.errors import CheckpointError

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import CheckpointBundle
    from oasr_core.checkpoints.peek import CheckpointPeek

CONFIG_NAME = "train.yaml"


class WenetConverter(CheckpointConverter):
    """Directories that WeNet's training leaves behind: ``train.yaml``, ``final.pt``, ``units.txt``, ``global_cmvn``."""

    oasr_api = "1.0"
    looks_for: ClassVar[tuple[str, ...]] = (f"{CONFIG_NAME} with the keys 'encoder' and 'encoder_conf' (WeNet)",)
    architectures: ClassVar[tuple[str, ...]] = ("conformer",)
    default_checkpoint_name: ClassVar[str | None] = "final.pt"

    def detect(self, peek: CheckpointPeek) -> Detection | None:
        """Claim a directory whose ``train.yaml`` names an encoder; families that are not served are refused later.

        Raises ``CheckpointError`` for a ``train.yaml`` that cannot be read.
        """
        if not peek.exists(CONFIG_NAME):
            return None
        config = peek.yaml(CONFIG_NAME)
        if not isinstance(config, Mapping) or not isinstance(config.get("encoder_conf"), Mapping):
            return None
        encoder = config.get("encoder")
        if not isinstance(encoder, str):
            return None
        return Detection(RANK_KEYED_VALUE, f"{CONFIG_NAME}: encoder {encoder!r} with encoder_conf")

    def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
        """Read configuration, weights, CMVN and unit table; raises ``CheckpointError`` naming the file at fault."""
        from oasr_conformer.convert_weights import convert

        config: Any = peek.yaml(CONFIG_NAME)
        if not isinstance(config, Mapping):
            raise CheckpointError(f"{peek.path}/{CONFIG_NAME} holds no mapping, got {type(config).__name__}.")
        return convert(peek, config, checkpoint_name or str(self.default_checkpoint_name))
