"""``oasr convert``: write any checkpoint that a converter reads in the native format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

OASR_API = {"commands": "1.0"}

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class DType(StrEnum):
    """Types that weights can be stored in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command(help="Convert a checkpoint to the native format.")
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Directory, file, pretrained name or Hugging Face id.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    architecture: Annotated[str | None, typer.Option(help="Architecture or converter; skips recognition.")] = None,
    checkpoint_name: Annotated[str | None, typer.Option(help="Weights file inside of SRC.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Store the weights in this type (default: as they are).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that is not empty.")] = False,
) -> None:
    """Resolve SRC, check that its model loads completely, and write exactly the tensors that the model takes."""
    from oasr_core.checkpoints.convert import convert_checkpoint

    result = convert_checkpoint(
        src,
        dst,
        architecture=architecture,
        checkpoint_name=checkpoint_name,
        dtype=dtype.value if dtype else None,
        force=force,
    )
    typer.echo(f"{src}: {result.architecture}, by converter {result.converter}")
    typer.echo(result.report.summary())
    typer.echo(f"{result.directory}: {result.size / 1e6:.1f} MB written")
