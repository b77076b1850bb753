# SPDX-License-Identifier: Apache-2.0
"""One page of one or more runs: plots, the field's tables, what differs between runs. The page needs nothing but itself.

    python -m ms_dtensor bench report runs/cluster/monday [runs/cluster/tuesday ...] [--out page.html]

The first run is what the others are compared with. What failed is said. Not a measurement: every figure is in a JSON file of
a run's folder.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ...debug import svg
from ...errors import ConfigError
from . import columns
from .arithmetic import KNOWN
from .pieces import FACTS, PIECE, read

STYLE = """
:root{font:15px/1.5 system-ui,"Segoe UI","Noto Sans","Noto Sans CJK SC",sans-serif;color:#1b1f24;background:#fff}
body{margin:0 auto;max-width:1240px;padding:0 14px 60px}h1{font-size:1.6rem;margin:1.2rem 0 .3rem}
h2{font-size:1.25rem;border-top:1px solid #d5d9de;padding-top:1rem;margin-top:2rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
h4{font-size:.9rem;margin:.9rem 0 .2rem}
.warn{background:#fff4d6;border-left:4px solid #E69F00;padding:.5rem .8rem}nav a{margin-right:1em}
.charts{display:flex;flex-wrap:wrap;gap:14px 26px;align-items:flex-start}.charts svg{max-width:100%;height:auto}
svg text{font:11px system-ui,"Noto Sans",sans-serif;fill:#333;stroke:none}
svg text.title{font-weight:600;font-size:12.5px;fill:#111}
svg .grid{stroke:#e3e6ea;fill:none}.legend{margin:.3rem 0}.legend span{white-space:nowrap;margin-right:1.2em}
.legend svg{vertical-align:-1px}.scroll{overflow-x:auto;margin:.4rem 0}table{border-collapse:collapse;font-size:13px}
th,td{padding:2px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid #e8ebee;font-variant-numeric:tabular-nums}
th{background:#f3f5f7;position:sticky;top:0}th:first-child,td:first-child{text-align:left;white-space:normal;min-width:4em}summary{cursor:pointer;color:#0b5cad}
details{margin:.5rem 0}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f3f5f7;padding:.5rem;font-size:12px}
code{overflow-wrap:anywhere}
"""


@dataclass
class Loaded:
    """A run's folder, read."""

    name: str
    facts: dict[str, Any]
    pieces: list[dict[str, Any]]
    failed: dict[str, str]

    def rows(self, benchmark: str) -> list[dict[str, Any]]:
        return [{"piece": p["piece"], "ranks": p["ranks"], **row} for p in self.pieces if p["benchmark"] == benchmark
                for row in p["rows"]]

    @property
    def world(self) -> dict[str, Any]:
        """Of the largest launch."""
        found = [p["world"] for p in self.pieces if "world" in p]
        return max(found, key=lambda w: w["ranks"], default={"device": "?", "kind": "?", "backend": "?", "ranks": 0})


def load(folder: Path, name: str) -> Loaded:
    """ConfigError names what is no run, and a file that is damaged."""
    if not (folder / "run.json").is_file():
        raise ConfigError(f"For '{folder}', there is no run: it has no run.json.", str(folder),
                          "`python -m ms_dtensor bench` writes it into --out.", "name that folder")
    facts = read(folder / "run.json", FACTS)
    pieces = [read(p, PIECE) for p in sorted((folder / "pieces").glob("*.json"))]
    failed = {p.stem: p.read_text(encoding="utf-8", errors="replace") for p in sorted((folder / "pieces").glob("*.failed"))}
    return Loaded(name, facts, pieces, failed)


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(columns.as_text(c))}</{tag}>" for c in cells) + "</tr>"
    return f'<div class="scroll"><table>{line(titles, "th")}{"".join(line(r, "td") for r in rows)}</table></div>'


def details(title: str, *content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{''.join(content)}</details>"


def all_rows(runs: Sequence[Loaded], benchmark: str, titles: Sequence[str], keys: Sequence[str]) -> str:
    """What each run has measured, a table each."""
    return "".join(details(f"{run.name}: all rows", table(titles, [[r[k] for k in keys] for r in run.rows(benchmark)]))
                   for run in runs)


def unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


Figures = dict[str, float | None]


def legend(runs: Sequence[Loaded]) -> str:
    return svg.legend([r.name for r in runs])


def charts(*plots: str) -> str:
    return f'<div class="charts">{"".join(plots)}</div>'


def bar_section(runs: Sequence[Loaded], found: Sequence[Figures], title: str, unit: str) -> str:
    """Bars of one figure by name, a colour a run."""
    names = unique([n for values in found for n in values])
    if not names:
        return ""
    return svg.bars(title, names, [(r.name, [v.get(n) for n in names]) for r, v in zip(runs, found, strict=True)], unit)


def compared(runs: Sequence[Loaded], found: Sequence[Figures], first: str) -> str:
    """A figure by name, a column a run, and each run over the first."""
    names = unique([n for values in found for n in values])
    rows = []
    for n in names:
        values = [v.get(n) for v in found]
        base = values[0]
        rows.append((n, *values, *(None if v is None or not base else f"{v / base:.3f}" for v in values[1:])))
    return table((first, *(r.name for r in runs), *(f"{r.name} / {runs[0].name}" for r in runs[1:])), rows) if names else ""


def headlines(runs: Sequence[Loaded]) -> str:
    """The figures that one looks at first."""
    found: list[Figures] = []
    for run in runs:
        values: Figures = {}
        for row in run.rows("collectives"):
            if (row.get("group"), row["interface"]) == ("world", "ms_dtensor") and row["op"] in ("all_reduce", "all_gather"):
                key = f"{row['op']} of {row['type']}, best busbw GB/s"
                values[key] = max(values.get(key) or 0, columns.best(row)["busbw"] or 0)
        for row in run.rows("compute"):
            if row["tflops"]:
                key = f"products and attention in {row['type']}, best TFLOP/s"
                values[key] = max(values.get(key) or 0, row["tflops"])
        for row in columns.fastest(run.rows("llama")):
            values[f"{row['model']} of {row['seq']}, tokens/s/p"] = row["tokens_s_p"]
        values |= {f"checkpoint {r['what']}, GB/s": r["gbs"] for r in run.rows("checkpoint")
                   if r["what"] in ("save", "load")}
        found.append(values)
    return compared(runs, found, "best of each")


def collectives(runs: Sequence[Loaded]) -> str:
    rows = [(run, row) for run in runs for row in run.rows("collectives") if "op" in row]
    out = []
    several = any(len({row["algorithm"] for run_, row in rows if run_ is run}) > 1 for run in runs)
    for group, dtype in unique([(row["group"], row["type"]) for _, row in rows]):
        here = [(run, row) for run, row in rows if (row["group"], row["type"]) == (group, dtype)]
        plots: list[str] = []
        names: list[str] = []
        for op in unique([row["op"] for _, row in here]):
            lines: dict[str, list[tuple[float, float]]] = {}
            for run, row in here:
                if row["op"] == op and columns.best(row)["busbw"] is not None:
                    name = " ".join([*([run.name] if len(runs) > 1 else []), row["interface"],
                                     *([row["algorithm"]] if several else [])])
                    lines.setdefault(name, []).append((row["size"], columns.best(row)["busbw"]))
            names = unique([*names, *lines])
            ordered = [(n, lines.get(n, [])) for n in names]
            plots.append(svg.lines(f"{op}: busbw, GB/s", ordered, "size"))
        ranks = unique([row["ranks"] for _, row in here])
        wrong = sum((columns.best(row)["wrong"] or 0) + (row.get("in", {}).get("wrong") or 0) for _, row in here)
        out.append(f"<h3>{escape(group)}: {'/'.join(map(str, ranks))} ranks, {dtype}</h3>" + svg.legend(names, line=True)
                   + charts(*plots) + f"<p>{wrong} wrong numbers.</p>")
        for run in runs:
            tables: dict[str, list] = {}
            for _, row in (pair for pair in here if pair[0] is run):
                tables.setdefault(f"{row['op']} by {row['interface']} ({row['algorithm']})", []).append(row)
            out.append(details(f"{run.name}: in the columns of nccl-tests and of hccl_test", *(
                f"<h4>{escape(name)}</h4>{table(*columns.nccl(mine))}{table(*columns.hccl(mine))}"
                for name, mine in tables.items())))
    lacks = unique([f"{r['interface']}: {', '.join(r['lacks'])}" for run in runs for r in run.rows("collectives")
                    if "lacks" in r])
    missing = f"<p>No such call on this device, by {escape('; '.join(lacks))}.</p>" if lacks else ""
    known = KNOWN["collectives"]
    one = ", ".join(f"{k['op']} on {k['ranks']}: {k['gbs']}" for k in known["rows"])
    return "".join(out) + missing + f"<p>Elsewhere: {escape(known['source'])}: {one}.</p>"


def compute(runs: Sequence[Loaded]) -> str:
    out = []
    for dtype in unique([r["type"] for run in runs for r in run.rows("compute")]):
        for key, unit in (("tflops", "TFLOP/s"), ("gbs", "GB/s")):
            found = [{f"{r['op']} {r['shape']}": r[key] for r in run.rows("compute") if r["type"] == dtype and r[key]}
                     for run in runs]
            out.append(bar_section(runs, found, dtype, unit))
    titles = ("op", "shape", "type", "time(us)", "fastest", "slowest", "TFLOP/s", "of peak", "peak TFLOP/s", "GB/s")
    keys = ("op", "shape", "type", "time", "fastest", "slowest", "tflops", "share", "peak", "gbs")
    peaks = "; ".join(f"{p['device']}: " + ", ".join(f"{k} {v}" for k, v in p.items() if k not in ("device", "source"))
                      + f" ({p['source']})" for p in KNOWN["peaks"])
    return legend(runs) + charts(*out) + all_rows(runs, "compute", titles, keys) + \
        f"<p>Peaks in TFLOP/s: {escape(peaks)}. Time is the median device's, beside the fastest and the slowest.</p>"


def dispatch(runs: Sequence[Loaded]) -> str:
    found = [{r["op"]: r["added"] for r in run.rows("dispatch")} for run in runs]
    titles = ("op", "mode", "plain", "ours", "added", "floor added")
    bars = charts(bar_section(runs, found, "added by a DTensor", "us"))
    return legend(runs) + bars + all_rows(runs, "dispatch", titles, titles)


def llama(runs: Sequence[Loaded]) -> str:
    out = [legend(runs)]
    plain = [[r for r in run.rows("llama") if not r["scaling"]] for run in runs]
    for model, seq in unique([(r["model"], r["seq"]) for rows in plain for r in rows]):
        here = [[r for r in rows if (r["model"], r["seq"]) == (model, seq)] for rows in plain]
        found = [{columns.way(r): r["tokens_s_p"] for r in columns.measured(rows)} for rows in here]
        out.append(f"<h3>{escape(model)}, sequences of {seq}</h3>")
        for other in columns.published(model, seq, None):
            out.append(f"<p>Published: {other['tokens_s_p']} tokens/s/p on {escape(other['hardware'])}, which is "
                       f"{other['tflops_6n']} TFLOP/s/p by 6N.</p>")
        out.append(charts(bar_section(runs, found, model, "tokens/s/p")))
        out += [details(f"{run.name}: all layouts", table(*columns.llama(rows)))
                for run, rows in zip(runs, here, strict=True)]
    for name, key, make in (("MindFormers'", "mindformers", columns.mindformers),
                            ("MindSpeed-LLM's", "mindspeed", columns.mindspeed)):
        titles, rows = make([], "")
        for run, mine in zip(runs, plain, strict=True):
            hardware = f"{run.name}: {run.world['device']} x {run.world['ranks']}"
            rows = [*rows, *make(mine, hardware)[1][len(make([], "")[1]):]]  # the published ones once
        out.append(f"<h3>In {name} columns</h3>{table(titles, rows)}<p>Published rows: {escape(KNOWN[key]['source'])}.</p>")
    return "".join(out)


def scaling(runs: Sequence[Loaded]) -> str:
    rows: list[tuple] = []
    series: dict[str, list[svg.Series]] = {}
    for run in runs:
        for (model, kind), some in columns.scaling(run.rows("llama")).items():
            series.setdefault(model, []).append((f"{run.name} {kind}", [(r["ranks"], e) for r, e in some]))
            rows += [(f"{run.name} {model}", kind, r["ranks"], r["batch"], r["tokens_s_p"], r["step_s"], e) for r, e in some]
    plots = [svg.lines(f"{model}: efficiency", found, "ranks", sizes=False, top=1.0) for model, found in series.items()]
    names = unique([n for found in series.values() for n, _ in found])
    return svg.legend(names, line=True) + charts(*plots) + \
        table(("run", "kind", "ranks", "batch", "tokens/s/p", "s/step", "efficiency"), rows)


def checkpoint(runs: Sequence[Loaded]) -> str:
    found = [{r["what"]: r["gbs"] for r in run.rows("checkpoint")} for run in runs]
    keys = ("what", "ranks", "bytes", "seconds", "gbs", "gbs_p")
    bars = charts(bar_section(runs, found, "all ranks together", "GB/s"))
    return legend(runs) + bars + all_rows(runs, "checkpoint", (*keys[:4], "GB/s", "GB/s/p"), keys)


def startup(runs: Sequence[Loaded]) -> str:
    found = []
    for run in runs:
        most = max((r["ranks"] for r in run.rows("startup")), default=0)
        first = unique([r["piece"] for r in run.rows("startup") if r["ranks"] == most])[:1]
        found.append({r["stage"]: r["seconds"] for r in run.rows("startup") if r["piece"] in first})
    rows = [(run.name, r["piece"], r["ranks"], r["stage"], r["seconds"]) for run in runs for r in run.rows("startup")]
    return legend(runs) + charts(bar_section(runs, found, "a launch of the largest world", "s")) + \
        details("all launches", table(("run", "launch", "ranks", "stage", "seconds"), rows))


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Loaded]], str]]] = {
    "collectives": ("Collectives", collectives), "compute": ("Compute", compute), "dispatch": ("Dispatch", dispatch),
    "llama": ("Llama step", llama), "scaling": ("Scaling", scaling), "checkpoint": ("Checkpoints", checkpoint),
    "startup": ("Start", startup)}


def page(folders: Sequence[Path]) -> str:
    """The page's HTML."""
    labels = [load(folder, "").facts["label"] for folder in folders]
    runs = [load(folder, label if labels.count(label) == 1 else f"{label} {i + 1}")
            for i, (folder, label) in enumerate(zip(folders, labels, strict=True))]
    titles = ("run", "date", "device", "ranks", "nodes", "backend", "suite", "MindSpore", "commit")
    facts = [(r.name, r.facts["date"], r.world["device"], r.world["ranks"], r.facts["nodes"], r.world["backend"],
              r.facts["suite"], r.facts["versions"].get("mindspore"), r.facts["commit"]) for r in runs]
    out = ["<!doctype html><html lang=en><head><meta charset=utf-8>"
           '<meta name=viewport content="width=device-width,initial-scale=1"><title>Cluster benchmarks</title>'
           f"<style>{STYLE}</style></head><body><h1>Cluster benchmarks of ms_dtensor</h1>"]
    if any(r.world["kind"] == "cpu" for r in runs):
        out.append('<p class=warn>Taken on CPUs: these figures show that the scripts run, and nothing about a cluster.</p>')
    out += [table(titles, facts), headlines(runs)]
    there = [(key, title, make) for key, (title, make) in SECTIONS.items()
             if any(columns.scaling(r.rows("llama")) if key == "scaling" else r.rows(key) for r in runs)]
    out.append("<nav>" + "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in there) + "</nav>")
    for key, title, make in there:
        out.append(f'<h2 id="{key}">{title}</h2>{make(runs)}')
    failed = [(r.name, name, why) for r in runs for name, why in r.failed.items()]
    if failed:
        out += ["<h2>Failed</h2>", *(details(f"{run}: {name}", f"<pre>{escape(why)}</pre>") for run, name, why in failed)]
    out.append("<h2>How</h2><p>busbw is algbw times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and "
               "all_to_all, 1 for broadcast; size is what one rank holds of the whole. TFLOP/s of a step count 6 operations "
               "a parameter and token and causal attention, without what recomputation repeats. The samples/s column is of "
               "all devices.</p>"
               + "".join(f"<p><code>{escape(r.facts['command'])}</code></p>" for r in runs) + "</body></html>\n")
    return "".join(out)


def main(argv: Sequence[str]) -> int:
    """`bench report`; exit code 2 if a folder is no run."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor bench report",
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    options = parser.parse_args(argv)
    try:
        options.out.write_text(page(options.runs), encoding="utf-8")
    except (OSError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0
