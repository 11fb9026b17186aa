"""Recognises icefall model directories (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from oasr_core.checkpoints.converter import RANK_ASSET_LAYOUT, RANK_KEYED_VALUE, CheckpointConverter, Detection
from oasr_core.checkpoints.headers import file_kind
from oasr_core.errors import CheckpointError
from oasr_zipformer.icefall_families import ZIPFORMER2, recognise
from oasr_zipformer.icefall_files import exports, token_tables, weight_files

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import CheckpointBundle
    from oasr_core.checkpoints.peek import CheckpointPeek

# Weight files whose header is read at most; training leaves many behind, all of one network.
_MAX_HEADERS = 3


class IcefallConverter(CheckpointConverter):
    """Directories of icefall's recipe ``zipformer``: ``exp/pretrained.pt`` or ``exp/epoch-*.pt``, ``data/lang_*/``."""

    oasr_api = "1.0"
    looks_for: ClassVar[tuple[str, ...]] = (
        "pretrained.pt, epoch-*.pt or other *.pt, at the top or in exp/, with the tensor names of icefall's Zipformer2",
        "data/lang_*/tokens.txt beside weights that are an export, a Git LFS pointer or of another icefall recipe",
    )
    architectures: ClassVar[tuple[str, ...]] = ("zipformer",)
    default_checkpoint_name: ClassVar[str | None] = None

    def detect(self, peek: CheckpointPeek) -> Detection | None:
        """Claim Zipformer2 weights; other work of icefall is claimed weakly, so that it is refused by name."""
        if not peek.is_directory:
            return None  # tokens lie beside the weights: the directory is asked next
        weak: Detection | None = None
        for name in weight_files(peek)[:_MAX_HEADERS]:
            try:
                family = recognise(peek.tensors(name))
            except CheckpointError:
                kind = _kind(peek, name)
                if weak is None and kind in ("lfs-pointer", "torchscript") and _has_language_folder(peek):
                    weak = Detection(RANK_ASSET_LAYOUT, f"{name} ({kind}) with {token_tables(peek)[0]}")
                continue
            if family is ZIPFORMER2:
                return Detection(RANK_KEYED_VALUE, f"{name}: tensors of {family.name}")
            if family is not None and weak is None:
                weak = Detection(RANK_ASSET_LAYOUT, f"{name}: tensors of icefall's {family.name}")
        found = exports(peek)
        if weak is None and any("joiner" in name for name in found) and token_tables(peek):
            weak = Detection(RANK_ASSET_LAYOUT, f"{found[0]} with {token_tables(peek)[0]}")
        return weak

    def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
        """Read weights, dimensions and tokens; raises ``CheckpointError`` naming the file at fault."""
        from oasr_zipformer.convert_weights import convert

        return convert(peek, checkpoint_name)


def _kind(peek: CheckpointPeek, name: str) -> str:
    try:
        return file_kind(peek.directory / name)
    except CheckpointError:
        return "unknown"


def _has_language_folder(peek: CheckpointPeek) -> bool:
    return any("lang_" in name for name in token_tables(peek))
