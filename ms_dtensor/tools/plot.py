# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor plot RUN_DIR...`: loss, throughput, communication and memory of runs, side by side, as pictures.

matplotlib is imported here and nowhere else. Colours are those of Okabe and Ito, which people with any kind of colour vision
tell apart; runs differ by line style as well. Read next: `runs.py`, which reads.
"""
from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.refused import refused
from ..errors import ConfigError
from .plot_text import in_words, show
from .runs import Run, read

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (3, 1, 1, 1)))
STYLE = {
    "figure.dpi": 110, "savefig.dpi": 110, "figure.constrained_layout.use": True, "font.size": 10,
    "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#E5E5E5", "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.labelsize": 10,
    "axes.edgecolor": "#666666", "xtick.color": "#444444", "ytick.color": "#444444", "legend.frameon": False,
    "legend.fontsize": 9, "lines.linewidth": 1.6, "svg.hashsalt": "ms_dtensor", "svg.fonttype": "path",
}
OTHER = "#999999"
KINDS = len(COLOURS)  # that a picture of communication tells apart; the rest is "other"


def draw(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes the pictures of runs, PNG and SVG each; returns the files."""
    runs, pyplot, made = read(folders), _pyplot(), []
    out.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        for name, picture in PICTURES.items():
            figure = picture(pyplot, runs)
            if figure is None:
                continue
            for kind in ("png", "svg"):
                made.append(out / f"{name}.{kind}")
                figure.savefig(made[-1], metadata={"Date": None} if kind == "svg" else {"Software": None})
            pyplot.close(figure)
    return made


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("For 'plot', matplotlib cannot be imported.", str(error)[:300],
                          "Pictures are drawn by it; training does without.",
                          ["pip install matplotlib", "read metrics.jsonl: one JSON object a step"]) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def _line(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}


def _legend(figure: Any, axes: Any, least: int = 2) -> None:
    """Below the picture, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) >= least:
        widest = max(map(len, labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), 100 // (widest + 6))))


def _titled(axes: Any, title: str, runs: Sequence[Run]) -> None:
    name = runs[0].name
    axes.set_title(f"{title}, {name if len(name) < 50 else '...' + name[-46:]}" if len(runs) == 1 else title)


def loss(pyplot: Any, runs: Sequence[Run]) -> Any:
    """Loss of every step and the held-out loss; below, how far the others are from the first run, or the gradient norm."""
    figure, (top, low) = pyplot.subplots(2, 1, figsize=(7.5, 5.6), sharex=True, height_ratios=(3, 2))
    for i, run in enumerate(runs):
        top.plot(*run.series("loss"), label=run.name if len(runs) > 1 else "each step", **_line(i))
        held_out = run.series("held_out_loss")
        if held_out[0]:
            name = "held out" if len(runs) == 1 else f"{run.name}, held out"
            top.plot(*held_out, marker="os^D"[i % 4], linestyle="", color=COLOURS[i % len(COLOURS)], markeredgecolor="white",
                     markersize=max(8 - 1.5 * i, 4), label=name, zorder=3)
    top.set_ylabel("loss")
    _titled(top, "Loss", runs)
    if len(runs) > 1:
        first = dict(zip(*runs[0].series("loss"), strict=True))
        for i, run in enumerate(runs[1:], 1):
            both = [(step, value - first[step]) for step, value in zip(*run.series("loss"), strict=True) if step in first]
            low.plot([s for s, _ in both], [v for _, v in both], **_line(i))
        low.axhline(0, color=COLOURS[0], linewidth=1)
        low.set_ylabel("difference")
        low.set_title(f"Loss less that of {runs[0].name}")
        low.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)
    else:
        low.plot(*runs[0].series("grad_norm"), color=COLOURS[1])
        low.set_ylabel("norm")
        low.set_title("Gradient norm, before it is clipped")
        low.set_ylim(bottom=0)
    _steps(low)
    _legend(figure, top)
    return figure


def _steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def throughput(pyplot: Any, runs: Sequence[Run]) -> Any:
    """Tokens a second of all devices, over steps; the median of each run that has them stands in the legend."""
    if not any(run.series("tokens_per_s")[0] for run in runs):
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 3.8))
    for i, run in enumerate(runs):
        steps, values = run.series("tokens_per_s")
        if not values:
            continue
        middle = statistics.median(values[1:] or values)
        name = f"median {middle:,.0f}" if len(runs) == 1 else f"{run.name}: median {middle:,.0f}"
        axes.plot(steps, values, label=name, **_line(i))
        axes.axhline(middle, linewidth=0.8, linestyle=":", color=COLOURS[i % len(COLOURS)])
    axes.set_ylabel("tokens / s")
    axes.set_ylim(bottom=0)
    _titled(axes, "Throughput of all devices" if len(runs) > 1 else f"Throughput ({name})", runs)
    _steps(axes)
    _legend(figure, axes)
    return figure


def communication(pyplot: Any, runs: Sequence[Run]) -> Any:
    """Time and bytes of a step by collective and mesh axes, a bar a run."""
    found = [run.communication() for run in runs]
    weight: dict[str, float] = {}
    for one in found:
        for key, (_, _, ms) in one.items():
            weight[key] = weight.get(key, 0.0) + ms
    if not weight:
        return None
    shown = sorted(weight, key=lambda key: -weight[key])[:KINDS]
    figure, pair = pyplot.subplots(1, 2, figsize=(7.5, 1.9 + 0.4 * len(runs) + 0.2 * ((len(shown) + 1) // 2)), sharey=True)
    for axes, column, unit, scale in ((pair[0], 2, "ms a step", 1.0), (pair[1], 1, "MiB a step, sent by a rank", 2.0**-20)):
        left = [0.0] * len(runs)
        for i, key in enumerate((*shown, "other")):
            widths = [scale * sum(line[column] for k, line in one.items() if (k if k in shown else "other") == key)
                      for one in found]
            if key != "other" or any(widths):
                axes.barh(range(len(runs)), widths, left=left, color=(*COLOURS, OTHER)[i], height=0.62, edgecolor="white",
                          label=" over ".join(filter(None, in_words(key))))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, end in enumerate(left):
            axes.text(end, y, f" {end:.3g}", va="center", fontsize=9, color="#444444")
        axes.set_xlim(0, 1.25 * max(*left, 1e-9))  # room for the numbers
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(unit)
        axes.grid(axis="y", visible=False)
    pair[0].set_yticks(range(len(runs)), [_wrapped(run.name) for run in runs])
    pair[0].set_ylim(len(runs) - 0.4, -0.6)  # the first on top
    pair[0].set_title("Time in communication")
    pair[1].set_title("Data")
    _legend(figure, pair[0], least=1)
    return figure


def _wrapped(name: str, width: int = 22) -> str:
    return "\n".join(name[i:i + width] for i in range(0, min(len(name), 3 * width), width))


def memory(pyplot: Any, runs: Sequence[Run]) -> Any:
    """Memory of rank 0 over steps."""
    if not any(run.series("memory_gib")[0] for run in runs):
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    for i, run in enumerate(runs):
        axes.plot(*run.series("memory_gib"), label=run.name, **_line(i))
    axes.set_ylim(0, 1.15 * max(max(run.series("memory_gib")[1], default=0.0) for run in runs))
    axes.set_ylabel("GiB")
    _titled(axes, "Memory of rank 0", runs)
    _steps(axes)
    _legend(figure, axes)
    return figure


PICTURES = {"loss": loss, "throughput": throughput, "communication": communication, "memory": memory}


def main(arguments: Sequence[str]) -> int:
    """The command; exit code 2 if nothing can be drawn."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor plot", description="Draws loss, throughput, communication "
                                     "and memory of training runs, as PNG and SVG.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--text", action="store_true", help="loss and communication as text, on the terminal; no files")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR",
                        help="a folder with metrics.jsonl; the first one is what the others are compared with")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where pictures go; default: RUN_DIR/plots of the first run")
    args = parser.parse_args(arguments)
    out = args.out or args.runs[0] / "plots"
    try:
        if args.text:
            print("\n\n".join(map(show, read(args.runs))))
            return 0
        try:
            made = draw(args.runs, out)
        except OSError as error:
            raise ConfigError(f"For 'plot', '{out}' cannot be written.", str(error.strerror or error), "Pictures go there.",
                              "--out with a folder of yours") from None
    except ConfigError as error:
        return refused(error, args.json)
    print(json.dumps({"files": [str(path) for path in made]}) if args.json else "\n".join(map(str, made)))
    return 0
