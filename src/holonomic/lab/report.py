"""One self-contained page an experiment: pictures, ours beside the paper's, verdicts."""

import base64
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holonomic.lab.experiment import Experiment
from holonomic.lab.files import write_text
from holonomic.lab.plots import FIGURES, draw
from holonomic.lab.real import plots  # noqa: F401 (registers its figures)
from holonomic.lab.runner import load_arms
from holonomic.lab.screen import result_rows, shown, sizes

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222 }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: .88rem }
td, th { padding: .3rem .7rem; border-bottom: 1px solid #ddd }
td:not(:first-child), th:not(:first-child) { text-align: right } img { max-width: 100%; height: auto }
.note { color: #555; font-size: .9rem }
"""


def write_report(
    e: Experiment, summary: dict[str, Any], out: Path, warn: Callable[[str], None] = print
) -> Path:
    """Draw the figures and write ``out/report.html``; returns its path."""
    pictures = draw(e, load_arms(e, out), out, warn)
    body = [
        f"<h1>{html.escape(e.id)}: {html.escape(e.title)}</h1>",
        f"<p>{html.escape(e.setting)}.</p>",
    ]
    if summary["partial"]:
        body.append(
            "<p><b>Partial:</b> the run was interrupted; unfinished methods are missing.</p>"
        )
    body.append(f"<p>{sizes(e)}</p>")
    body.append(f"<h2>{_heading(e)}</h2>" + _html(result_rows(e, summary)))
    body.append("<p class='note'>Mean [95 % interval of Student] at the last epoch.</p>")
    if summary["verdicts"]:
        body.append("<h2>Claims</h2>" + _html(_claims(summary)))
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        caption = (FIGURES[picture.stem].__doc__ or "").strip()
        body.append(
            f"<h2>{html.escape(picture.stem)}</h2><p class='note'>{html.escape(caption)}</p>"
            f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        )
    versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
    body.append(
        f'<p class="note">{versions}; seed {e.seed}; {summary["seconds"]:.0f} s of training.</p>'
    )
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(e.id)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )
    write_text(out / "report.html", page)
    return out / "report.html"


def _html(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{html.escape(c)}</th>" for c in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body
    )
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _claims(summary: dict[str, Any]) -> list[list[str]]:
    rows = [["claim", "difference, one draw", "over draws, paired", "won", "verdict"]]
    for v in summary["verdicts"]:
        won = "" if v["wins"] is None else f"{100 * v['wins']:.0f} % of draws"
        rows.append([v["claim"], shown(v["one_draw"]), shown(v["over_draws"]), won, v["verdict"]])
    return rows


def markdown(e: Experiment, summary: dict[str, Any], remarks: str = "") -> str:
    """The short page of an experiment for ``results/``: setting, ours and the paper's, verdicts."""
    parts = [f"# {e.id}: {e.title}", f"{e.setting}.", sizes(e), e.notes]
    parts.append(f"## {_heading(e)}\n\n" + _pipes(result_rows(e, summary)))
    parts.append("Mean [Student's 95 % interval] at the last epoch.")
    if summary["verdicts"]:
        parts.append(
            "## Verdicts\n\nA positive difference speaks for the claim. Replicas are paired: same "
            "data, initialization and data order in both methods.\n\n" + _pipes(_claims(summary))
        )
    if remarks:
        parts.append("## Remarks\n\n" + remarks)
    figures = [f"![{name}]({name}.png)" for name in dict.fromkeys((*e.figures, "finals"))]
    parts.append("## Figures\n\n" + "\n\n".join(figures))
    versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
    parts.append(f"{versions}; seed {e.seed}; {summary['seconds']:.0f} s of training.")
    return "\n\n".join(p for p in parts if p) + "\n"


def _heading(e: Experiment) -> str:
    return "Ours and the paper's" if e.paper else "Results"


def _pipes(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def overview(folder: Path, known: dict[str, Experiment]) -> str:
    """One page of all experiments in a folder of results: every claim and its verdict."""
    rows = [["experiment", "claim", "one draw", "over draws", "won", "verdict"]]
    tried = [["experiment", "what", "methods", "epochs", "runs + draws", "training"]]
    for name, e in known.items():
        path = folder / name / "summary.json"
        if not (path.exists() and path.with_name("README.md").exists()):  # one that was only begun
            continue
        summary = json.loads(path.read_text())
        config, link = summary["config"], f"[{name}]({name}/README.md)"
        counts = f"{config['runs']} + {config['draws']}"
        minutes = f"{summary['seconds'] / 60:.0f} min"
        tried.append(
            [link, e.title, str(len(summary["arms"])), f"{config['epochs']:,}", counts, minutes]
        )
        rows += [[link, *row] for row in _claims(summary)[1:]]
    return (
        "\n\n".join(
            (
                "# Results",
                "What the experiments of the papers gave here, run by `holonomic run NAME` and written by "
                "`holonomic report NAME`. Each claim is a difference between two methods, positive if it "
                "speaks for the claim, with Student's 95 % interval: on one draw of the data over "
                "several runs, as in the papers, and over draws of the data, paired. A claim counts as "
                "reproduced if both intervals lie above 0.",
                _pipes(tried),
                "## Claims and verdicts",
                _pipes(rows),
            )
        )
        + "\n"
    )
