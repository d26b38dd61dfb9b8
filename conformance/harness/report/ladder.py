"""A ladder's table as CSV, JSON, a terminal table and one HTML page with its plot; reads rows, never an engine."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.table import Table

Row = Mapping[str, Any]

COLUMNS: Mapping[str, tuple[str, str]] = {
    "name": ("cache type", "{}"),
    "tail": ("tail", "{}"),
    "bits": ("bits", "{:.3g}"),
    "mib": ("MiB", "{:.2f}"),
    "share": ("% of bf16", "{:.1%}"),
    "median": ("median KLD", "{:.6f}"),
    "mean": ("mean KLD", "{:.6f}"),
    "mean_within_run": ("± within run", "{:.6f}"),
    "p90": ("p90", "{:.5f}"),
    "p99": ("p99", "{:.4f}"),
    "p99_9": ("p99.9", "{:.3f}"),
    "maximum": ("max", "{:.3f}"),
    "same_top": ("same top", "{:.2%}"),
    "rms_dp": ("RMS Δp", "{:.3%}"),
    "likeness": ("exp(-mean)", "{:.4f}"),
    "change": ("median against tail 0", "{}"),
    "seconds": ("wall s", "{:.1f}"),
    "cpu_seconds": ("CPU s", "{:.1f}"),
}
"""Column by the name of its value: heading and form."""

_BRIEF = ("name", "tail", "mib", "share", "median", "mean", "p99", "same_top", "change")


def cells(row: Row, columns: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """The row's values as text."""
    return [
        _change(row) if name == "change" else _tail(row) if name == "tail" else COLUMNS[name][1].format(row[name])
        for name in columns
    ]


def _tail(row: Row) -> str:
    if not row["native"]:
        return str(row["tail"])
    return f"native {row['tail']}" if row["tail"] else "native"


def _change(row: Row) -> str:
    """The paired change of the median against the same type's first tail, with its bootstrap interval."""
    if "change_change" not in row:
        return ""
    return f"{row['change_change']:+.6f} [{row['change_low']:+.6f}, {row['change_high']:+.6f}]"


def terminal_table(rows: Sequence[Row]) -> Table:
    """The columns that fit a terminal."""
    table = Table(*(COLUMNS[name][0] for name in _BRIEF), box=None)
    for row in rows:
        table.add_row(*cells(row, _BRIEF))
    return table


def write_forms(folder: Path, rows: Sequence[Row], run: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Write ladder.csv, ladder.json, ladder.svg and ladder.html into a folder."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "ladder.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "ladder.json").write_text(
        json.dumps({"run": run, "notes": notes, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    svg = plot(rows, f"{run['model']}, {run['context']} tokens of {run['corpus']}, steps of {run['ubatch']}")
    (folder / "ladder.svg").write_text(svg, encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("ladder.html.j2").render(
        headings=[heading for heading, _ in COLUMNS.values()],
        emulated=[cells(row) for row in rows if not row["native"]],
        native=[cells(row) for row in rows if row["native"]],
        run=run,
        notes=notes,
        plot=Markup(svg[svg.index("<svg") :]),
    )
    (folder / "ladder.html").write_text(page, encoding="utf-8")


def plot(rows: Sequence[Row], title: str) -> str:
    """SVG: median KLD over MiB, the tails of one type joined, native types as crosses; 0 is drawn at the bottom."""
    with mpl.rc_context({"svg.hashsalt": "ladder", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.add_subplot()
        positive = [row["median"] for row in rows if row["median"] > 0]
        least = min(positive, default=1e-6) / 2
        names = list(dict.fromkeys(row["name"] for row in rows if not row["native"]))
        for place, name in enumerate(names):
            line = sorted(
                (row for row in rows if row["name"] == name and not row["native"]), key=lambda row: int(row["tail"])
            )
            xs, ys = [row["mib"] for row in line], [max(row["median"], least) for row in line]
            colour = f"C{place % 10}"
            dashed = "--" if name.startswith("kvarn") else "-"
            axes.plot(
                xs, ys, dashed, marker="s" if name.startswith("kvarn") else "o", ms=4, lw=1.2, color=colour, label=name
            )
            for x, y, row in zip(xs, ys, line, strict=True):
                axes.annotate(
                    str(row["tail"]), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7, color=colour
                )
        for row in (row for row in rows if row["native"]):
            axes.plot(row["mib"], max(row["median"], least), "kx", ms=6)
            axes.annotate(
                row["name"],
                (row["mib"], max(row["median"], least)),
                textcoords="offset points",
                xytext=(5, -9),
                fontsize=7,
            )
        axes.set_yscale("log")
        axes.set_xlabel("attention cache, MiB (memory model); points are labelled with the tail in tokens")
        axes.set_ylabel("median KLD, nats")
        axes.set_title(title, fontsize=9)
        axes.grid(True, which="both", lw=0.3, alpha=0.5)
        axes.legend(fontsize=8)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
