"""The precision-per-memory ladder of a model: KL divergence from its exact cache for cache types and tails.

    python -m tools.ladder --model GGUF --corpus TXT --types q4_0,kvarn4 --tails 0,256,1024 [options]
    python -m tools.ladder --document

Writes ladder.csv, ladder.json, ladder.svg and ladder.html into --out. A run that was interrupted goes on where it stopped.
--document derives the stated figures of the document again and says which agree.

Exit code 0, or 2 when a model, corpus, type, tail or base file cannot be used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from conformance.harness import builds
from conformance.harness.builds import BUILD_HELP
from conformance.harness.contract.census import GGUFError, ModelCensus, census_of_gguf
from conformance.harness.engine import BUNDLED, EngineError, Model
from conformance.harness.measure.kld import WITHIN_RUN, KldError
from conformance.harness.measure.kld_base import KldBase, read_base, write_base
from conformance.harness.precision.codecs import CodecError
from conformance.harness.precision.document import load_document, rederive
from conformance.harness.precision.ladder import (
    LadderError,
    LadderPlan,
    PairChange,
    arms_of,
    as_dict,
    check_arms,
    claim,
    cut,
    measure,
    pairs,
    rows,
    sha256_of,
)
from conformance.harness.precision.scoring import Scorer, native_types
from conformance.harness.precision.tail import TailError
from conformance.harness.report.document import print_rederivations
from conformance.harness.report.ladder import terminal_table, write_forms
from fixtures.corpora import CorpusError, corpus
from fixtures.trained import FetchError, model_path
from tools.command import progress_bars, refusing

_REFUSED = (CodecError, CorpusError, EngineError, FetchError, GGUFError, KldError, LadderError, TailError)


def ladder(
    model: Annotated[str, typer.Option(help="A GGUF, or the name of a fixture or fetched model.")] = "smollm2-135m",
    corpus_name: Annotated[str, typer.Option("--corpus", help="A text file, or one of: pydoc, agent.")] = "pydoc",
    types: Annotated[str, typer.Option(help="Cache types, K/V apart as in q5_0/q4_0.")] = "q4_0,kvarn4",
    tails: Annotated[str, typer.Option(help="Tails in tokens.")] = "0,256,1024",
    context: Annotated[int, typer.Option(min=4, help="Tokens in a chunk; its second half is scored.")] = 1024,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of text.")] = 1,
    ubatch: Annotated[int, typer.Option(min=1, max=512, help="Tokens in a step; 1 to compare with native types.")] = 32,
    native: Annotated[bool, typer.Option(help="Also the build's own cache types, of those named.")] = True,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    build: Annotated[str, typer.Option(help=BUILD_HELP)] = BUNDLED,
    base: Annotated[
        Path | None, typer.Option(help="A KLD base file: scored against when it is there, else written.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("ladder"),
    document: Annotated[bool, typer.Option("--document", help="Derive the document's figures again instead.")] = False,
) -> None:
    """Measure a ladder, or derive the document's figures again."""
    with refusing(*_REFUSED, files="give a file that can be read, a folder that can be written"):
        if document:
            print_rederivations(rederive(load_document()))
            return
        path = model_path(model)
        census = census_of_gguf(path)
        if not census.attention:
            raise LadderError(
                f"{path}: no attention layers are known of architecture {census.arch!r}; use another model"
            )
        names = [name.strip() for name in types.split(",")]
        check_arms(arms_of(names, _numbers(tails), ()), census, path.name)
        text, library = corpus(corpus_name), builds.load(build)
        own = [name for name in names if native and name in native_types(library)]
        arms = arms_of(names, _numbers(tails), own, _numbers(tails) if library.has_tail else (0,))
        with Model(library, path) as loaded:
            _run(loaded, census, text, arms, context, chunks, ubatch, threads, base, out, corpus_name)


def _run(
    loaded: Model,
    census: ModelCensus,
    text: str,
    arms: Any,
    context: int,
    chunks: int,
    ubatch: int,
    threads: int,
    base: Path | None,
    out: Path,
    corpus_name: str,
) -> None:
    tokens = cut(loaded.tokenize(text, special=False), context, chunks, _bos(loaded), corpus_name)
    digest = sha256_of(loaded.path)
    identity = {
        "model": loaded.path.stem,
        "model_sha256": digest,
        "corpus": Path(corpus_name).name,
        "corpus_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "context": context,
        "ubatch": ubatch,
        "threads": threads,
        "build": loaded.library.identity().digest,
        "base": base.name if base else "exact f16 cache of this run",
    }
    plan = LadderPlan(tokens, arms, identity)
    scorer = Scorer(loaded, census, ubatch, threads)
    claim(out / "scores", identity)
    records = _base_of(base, plan, scorer, digest)
    with progress_bars() as progress:
        task = progress.add_task("scoring", total=len(arms) * chunks)
        for done, total in measure(plan, scorer, out / "scores", records):
            progress.update(task, completed=done, total=total, description=f"arm {done} of {total}")
    table = [as_dict(row) for row in rows(plan, census, out / "scores", ubatch)]
    notes = [*map(_pair, pairs(plan, out / "scores")), *_notes(ubatch)]
    write_forms(out, table, {**identity, "chunks": chunks, "positions": table[0]["positions"]}, notes)
    console = Console(highlight=False)
    console.print(terminal_table(table))
    for note in notes:
        console.print(note, style="dim")
    console.print(f"results in {out}")


def _base_of(
    path: Path | None, plan: LadderPlan, scorer: Scorer, digest: str
) -> Callable[[int], NDArray[np.uint16]] | None:
    """How to get a chunk's records of the base file, which is written first when it is not there."""
    if path is None:
        return None
    if path.exists():
        kept: KldBase = read_base(path)
        kept.require(plan.tokens, scorer.model.n_vocab, digest)
        if not kept.verified:
            typer.echo(f"{path}: unverified, because it names no model; only its tokens were compared", err=True)
    else:
        kept = write_base(path, plan.tokens, (scorer.exact(tokens) for tokens in plan.tokens), digest)
    return kept.records


def _pair(pair: PairChange) -> str:
    change = pair.change
    return (
        f"K above V: {pair.name} at tail {pair.tail} has a median of {pair.median:.6f}, the reverse {pair.reverse} "
        f"{pair.median_of_reverse:.6f}; difference {change.change:+.6f} [{change.low:+.6f}, {change.high:+.6f}]"
    )


def _notes(ubatch: int) -> list[str]:
    steps = (
        "Every query reads exactly as many exact rows as the tail says, its own among them."
        if ubatch == 1
        else f"Emulated in steps of {ubatch}: a query reads up to {ubatch - 1} exact rows fewer than the tail says, and the "
        "rows of its own step exactly. That flatters short tails; do not set these rows beside native ones, use --ubatch 1."
    )
    return [
        steps,
        "MiB come from the memory model, for a context padded to 256 rows; MiB of KVarN at tail 0 hold its 128 exact rows.",
        f"± is the {WITHIN_RUN}. The change of the median is a paired bootstrap over positions, 95 %.",
        "exp(-mean) is a proxy of likeness, no accuracy.",
    ]


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise LadderError(
            f"--tails {text!r}: give whole numbers with commas between them, such as 0,256,1024"
        ) from None


def _bos(model: Model) -> int | None:
    """The token that replaces the first of each chunk, where the model's texts begin with one."""
    if model.metadata("tokenizer.ggml.add_bos_token") != "true":
        return None
    return int(model.metadata("tokenizer.ggml.bos_token_id") or 1)


if __name__ == "__main__":
    typer.run(ladder)
