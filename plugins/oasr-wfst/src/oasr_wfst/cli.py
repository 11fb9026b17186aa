"""``oasr wfst``: build, examine and draw decoding graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oasr_core.errors import ConfigError

if TYPE_CHECKING:
    from oasr_wfst.build import Stage
    from oasr_wfst.graph import Graph

OASR_API = {"commands": "1.0"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Build, examine and draw decoding graphs.",
)

_WORDS = typer.Option(help="Table of words, words.txt: fixes the word ids.")
_LABEL_OFFSET = typer.Option(help="OpenFst input label of the model's column 0 (default: 1, as 0 is epsilon).")


@app.command()
def build(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="IMAGE", help="Graph image to write.")],
    tokens: Annotated[Path | None, typer.Option(help="Table of the model's tokens, tokens.txt or units.txt.")] = None,
    lexicon: Annotated[Path | None, typer.Option(help="Lines of a word and its tokens.")] = None,
    arpa: Annotated[Path | None, typer.Option(help="Back-off language model.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Sentences, one a line; or a transducer of words, *.fst.txt or *.fst.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Write the image of a built graph: HLG.pt, *.fst or *.fst.txt.")
    ] = None,
    words: Annotated[Path | None, _WORDS] = None,
    repeat: Annotated[bool, typer.Option("--repeat", help="Any sequence of the grammar's sentences.")] = False,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Leave out n-grams of words that the lexicon lacks. <unk> always is.")
    ] = False,
    remove_epsilons: Annotated[
        bool, typer.Option("--remove-epsilons", help="No epsilon arcs: for small grammars, larger for back-off models.")
    ] = False,
    label_offset: Annotated[int | None, _LABEL_OFFSET] = None,
) -> None:
    """Build a graph, or write the image of one.

    Of --tokens, --lexicon and either --arpa or --grammar, or of a graph that another tool built, --from.
    """
    from rich.console import Console

    from oasr_wfst.image import write_image

    if not output.parent.is_dir():  # known before the work, not after it
        raise ConfigError(f"--output {output}: there is no directory {output.parent}; create it.")
    console = Console(highlight=False, soft_wrap=True)
    building = {"--lexicon": lexicon, "--arpa": arpa, "--grammar": grammar, "--repeat": repeat,
                "--skip-unknown": skip_unknown, "--remove-epsilons": remove_epsilons}  # fmt: skip
    if source is not None:
        _refuse([name for name, value in building.items() if value], "a graph that is built already (--from)")
        from oasr_wfst.load import load_graph

        graph = load_graph(source, words=words, tokens=tokens, label_offset=label_offset)
    else:
        _refuse(["--label-offset"] if label_offset is not None else [], "building; it belongs to --from")
        if tokens is None or lexicon is None or (arpa is None) == (grammar is None):
            raise ConfigError(
                "a graph is built of --tokens, --lexicon and either --arpa or --grammar; or made of a graph, --from."
            )
        if repeat and arpa is not None:
            _refuse(["--repeat"], "--arpa")
        if skip_unknown and grammar is not None:
            _refuse(["--skip-unknown"], "--grammar")
        from oasr_wfst.build import build_graph

        _print_stage_title(console)
        with console.status("building", spinner="line"):
            graph = build_graph(
                tokens, lexicon, arpa=arpa, grammar=grammar, words=words, repeat=repeat, skip_unknown=skip_unknown,
                remove_epsilons=remove_epsilons, report=lambda stage: _print_stage(console, stage),
            )  # fmt: skip
    size = write_image(graph, output)
    console.print(
        f"{output}: {graph.num_states} states, {graph.num_arcs} arcs, {graph.num_columns} columns, {_bytes(size)}",
        markup=False,
    )


@app.command()
def info(
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="Image, HLG.pt, *.fst or *.fst.txt.")],
    words: Annotated[Path | None, _WORDS] = None,
    label_offset: Annotated[int | None, _LABEL_OFFSET] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a graph and show its sizes."""
    from oasr_wfst.load import graph_kind, load_graph

    facts = {"file": str(graph), "kind": graph_kind(graph), "file bytes": graph.stat().st_size}
    facts.update(_facts(load_graph(graph, words=words, label_offset=label_offset)))
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    for key, value in facts.items():
        typer.echo(f"{key:<18} {value}")


@app.command()
def draw(
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="Image, HLG.pt, *.fst or *.fst.txt.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="*.dot, *.svg, *.png or *.pdf.")],
    words: Annotated[Path | None, _WORDS] = None,
    tokens: Annotated[Path | None, typer.Option(help="Table of the tokens.")] = None,
    label_offset: Annotated[int | None, _LABEL_OFFSET] = None,
    max_arcs: Annotated[int, typer.Option(min=1, help="Refuse graphs with more arcs.")] = 1000,
) -> None:
    """Draw a small graph.

    All but .dot needs the program 'dot' of Graphviz.
    """
    from oasr_wfst.draw import draw_graph
    from oasr_wfst.load import load_graph

    draw_graph(load_graph(graph, words=words, tokens=tokens, label_offset=label_offset), output, max_arcs=max_arcs)
    typer.echo(str(output))


def _refuse(given: list[str], what: str) -> None:
    if given:
        raise ConfigError(f"{', '.join(given)} cannot be used with {what}.")


def _facts(graph: Graph) -> dict[str, Any]:
    import numpy as np

    from oasr_wfst.graph import FINAL

    return {
        "array bytes": graph.num_bytes,
        "states": graph.num_states,
        "arcs": graph.num_arcs,
        "epsilon arcs": int(graph.epsilon_count.sum()),
        "final arcs": int(np.count_nonzero(graph.label == FINAL)),
        "most arcs a state": int(np.diff(graph.arc_begin).max()),
        "start state": 0,
        "super-final state": graph.num_states - 1,
        "columns": graph.num_columns,
        "words on arcs": len(graph.words),
        "word symbols": len(graph.symbols),
        "token symbols": len(graph.tokens),
        "note": graph.note,
    }


def _print_stage_title(console: Any) -> None:
    console.print(f"{'STAGE':<16} {'STATES':>12} {'ARCS':>12} {'SECONDS':>9}")


def _print_stage(console: Any, stage: Stage) -> None:
    line = f"{stage.name:<16} {stage.states:>12} {stage.arcs:>12} {stage.seconds:>9.2f}"
    console.print(f"{line}  {stage.remark}" if stage.remark else line, markup=False)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
