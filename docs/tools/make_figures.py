# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/concepts.md from what the library itself says: layouts, plans, recorded communication.

    python docs/tools/make_figures.py [--png]        writes docs/figures/*.svg; --png also *.png, to look at

Needs matplotlib (pip install '.[plot]'). No number is made by hand: boxes are `Layout.local_offset`, arrows and bytes
are `redistribute.plan`, a step's collectives are what `CommDebugMode` recorded in a fake world.
"""
from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
import mindspore as ms  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402
from mindspore import nn  # noqa: E402

import ms_dtensor as md  # noqa: E402
from ms_dtensor import DeviceMesh, Layout, Partial, Replicate, Shard  # noqa: E402
from ms_dtensor.debug import CommDebugMode  # noqa: E402
from ms_dtensor.redistribute.plan import plan  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
BLUE, ORANGE, GREEN, RED, GREY, PALE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#555555", "#EDEDED"  # colour-blind safe
RANKS = (BLUE, ORANGE, GREEN, "#CC79A7")
plt.rcParams.update({"svg.hashsalt": "ms_dtensor", "font.size": 9, "font.family": "DejaVu Sans", "svg.fonttype": "path"})


def canvas(width: float, height: float, columns: int = 1, rows: int = 1):
    fig, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, facecolor="white", layout="constrained")
    for ax in axes.flat:
        ax.set_axis_off()
        ax.set_aspect("equal")
    return fig, list(axes.flat)


def shards(ax, title: str, layout: Layout) -> None:
    """The global tensor once per rank, where the rank lies in the mesh; filled is what it holds."""
    rows, columns = layout.shape
    down, across = layout.mesh.shape
    for i in range(down):
        for j in range(across):
            rank = int(layout.mesh.mesh[i, j])
            x, y = j * (columns + 1.6), -i * (rows + 2.2)
            ax.add_patch(Rectangle((x, y - rows), columns, rows, facecolor=PALE, edgecolor="none"))
            (top, left), (high, wide) = layout.local_offset((i, j)), layout.local_shape((i, j))
            ax.add_patch(Rectangle((x + left, y - top - high), wide, high, facecolor=RANKS[rank], edgecolor="none",
                                   hatch="//" if any(p.is_partial() for p in layout.placements) else None, alpha=0.9))
            for k in range(columns + 1):
                ax.plot([x + k] * 2, [y, y - rows], color="white", lw=0.8)
            for k in range(rows + 1):
                ax.plot([x, x + columns], [y - k] * 2, color="white", lw=0.8)
            ax.text(x + columns / 2, y - rows - 0.3, f"rank {rank}", ha="center", va="top", fontsize=8, color=GREY)
    ax.text(-0.7, 0.9, "dp ↓   tp →", fontsize=7, color=GREY)
    ax.set_title(f"{title}\n{layout!r}", fontsize=9, pad=10)
    ax.set_xlim(-1, 2 * columns + 2.4)
    ax.set_ylim(-2 * rows - 3.8, 1.8)
    ax.set_anchor("N")


def layouts():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    cases = [("dp: Shard(0)   tp: Replicate()", [Shard(0), Replicate()], (4, 6)),
             ("dp: Shard(0)   tp: Shard(1)", [Shard(0), Shard(1)], (4, 6)),
             ("dp: Shard(0)   tp: Shard(0)", [Shard(0), Shard(0)], (4, 6)),
             ("dp: Replicate()   tp: Shard(0), 5 rows", [Replicate(), Shard(0)], (5, 6)),
             ("dp: Shard(0)   tp: Shard(0), 3 rows", [Shard(0), Shard(0)], (3, 6)),
             ("dp: Shard(0)   tp: Partial()", [Shard(0), Partial()], (4, 6))]
    fig, axes = canvas(9.2, 6.4, 3, 2)
    for ax, (title, placements, shape) in zip(axes, cases):
        shards(ax, title, Layout(mesh, placements, shape))
    return fig


def box(ax, x: float, y: float, text: str, colour: str = GREY, width: float = 2.3, height: float = 0.95) -> None:
    ax.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.02,rounding_size=0.12",
                                facecolor="white", edgecolor=colour, lw=1.6))
    ax.text(x, y, text, ha="center", va="center", fontsize=9)


def arrow(ax, start, end, colour: str = GREY, bend: float = 0.0, gap: float = 6) -> None:
    ax.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=12,
                                 color=colour, lw=1.5, shrinkA=gap, shrinkB=gap))


def said(src: Layout, dst: Layout) -> str:
    moves = plan(src, dst)
    size = sum(m.bytes() for m in moves) / 2**20
    return " + ".join(m.kind for m in moves) + (f"\n{size:g} MiB" if size else "\nnothing sent")


def moves():
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
    at = {"Replicate()": (0, 3), "Shard(0)": (-4.6, 0), "Shard(1)": (4.6, 0), "Partial()": (0, -3)}
    made = {name: Layout(mesh, [eval(name, {"Replicate": Replicate, "Shard": Shard, "Partial": Partial})], (4096, 1024))
            for name in at}
    fig, (ax,) = canvas(8.2, 5.4)
    pairs = [("Shard(0)", "Replicate()", 0.16, (-1.3, 1.0)), ("Replicate()", "Shard(0)", 0.16, (-3.9, 2.2)),
             ("Shard(1)", "Replicate()", -0.16, (1.3, 1.0)), ("Replicate()", "Shard(1)", -0.16, (3.9, 2.2)),
             ("Shard(0)", "Shard(1)", 0.0, (0, 0.0)), ("Partial()", "Shard(0)", 0.0, (-3.4, -2.0)),
             ("Partial()", "Shard(1)", 0.0, (3.4, -2.0)), ("Partial()", "Replicate()", -0.55, (2.0, -1.0))]
    for src, dst, bend, where in pairs:
        text = said(made[src], made[dst])
        colour = GREY if "nothing" in text else RED if "all_reduce" in text else GREEN if "reduce" in text else BLUE
        if {src, dst} == {"Shard(0)", "Shard(1)"}:
            ax.add_patch(FancyArrowPatch((-2.95, 0), (2.95, 0), arrowstyle="<|-|>", mutation_scale=12, color=colour,
                                         lw=1.5, shrinkA=0, shrinkB=0))
        elif (src, dst) == ("Partial()", "Replicate()"):
            arrow(ax, at[src], at[dst], colour, 0.0, gap=20)
            where = (0, -1.35)
        else:
            arrow(ax, at[src], at[dst], colour, bend, gap=36)
        ax.text(*where, text, ha="center", va="center", fontsize=8.5, color=colour,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    for name, (x, y) in at.items():
        box(ax, x, y, f"{name}\n{made[name]!r}", width=3.3)
    ax.set_xlim(-6.6, 6.6)
    ax.set_ylim(-3.9, 4.3)
    ax.set_title("f32[4096, 1024] on four ranks: the plan of each move, and what a rank sends", fontsize=10)
    return fig


def gradients():
    fig, axes = canvas(9.2, 3.0, 2)
    stories = [
        (axes[0], "varying: the ranks did different work with w", "x: f32[8@dp, 4]", ["rows 0-3", "rows 4-7"],
         "each rank's gradient of w is a summand:\nf32[4, 2]{sum: dp}, then one all-reduce", RED),
        (axes[1], "invariant: the ranks did the same work with w", "x: f32[8, 4]", ["rows 0-7", "rows 0-7"],
         "each rank's gradient of w is whole:\nf32[4, 2], nothing is sent", GREEN)]
    for ax, title, layout, rows, text, colour in stories:
        for i, held in enumerate(rows):
            y = 1.1 - 2.0 * i
            ax.text(-3.9, y, f"rank {i}", ha="center", va="center", color=GREY)
            box(ax, -1.9, y, f"x: {held}", BLUE if i == 0 or held == rows[0] else ORANGE, 2.2)
            box(ax, 1.1, y, "w: whole", GREY, 1.9)
            box(ax, 4.0, y, "dw of\n" + held, BLUE if held == rows[0] else ORANGE, 1.9)
            ax.text(-0.35, y, "@", ha="center", va="center")
            arrow(ax, (2.05, y), (3.05, y), colour, gap=1)
        ax.text(0.4, -2.5, text, ha="center", va="center", color=colour)
        ax.set_title(f"{title}\n{layout} @ w: f32[4, 2]", fontsize=9.5)
        ax.set_xlim(-4.7, 5.3)
        ax.set_ylim(-3.0, 1.8)
    return fig


class Mlp(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(64, 256), nn.Dense(256, 64)

    def construct(self, x):
        return self.down(ms.ops.relu(self.up(x)))


def recorded(sequence: bool) -> list:
    """The collectives of one step of two tensor-parallel layers and data parallelism, as rank 0 of 4 sees them."""
    with md.comm.fake_world(4):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows = {"output_layouts": Shard(0) if sequence else Replicate(), "use_local_output": False}
        mlp = md.parallelize_module(Mlp(), mesh["tp"], {
            "up": md.ColwiseParallel(input_layouts=Shard(0) if sequence else Replicate(), use_local_output=False),
            "down": md.RowwiseParallel(**rows)})
        mlp = md.replicate(mlp, mesh=mesh["dp"])
        x = md.ones(32, 64, device_mesh=mesh, placements={"dp": Shard(0)} | ({"tp": Shard(0)} if sequence else {}))
        step = md.value_and_grad(lambda x: (mlp(x) * x).sum(), 0, mlp.trainable_params())
        with CommDebugMode(module=mlp) as mode:
            step(x)
        return mode.events


def communication():
    fig, axes = canvas(9.2, 5.0, 1, 2)
    for ax, sequence in zip(axes, (False, True)):
        for j, phase in enumerate(("forward", "backward")):
            y = -2.6 * j
            ax.text(-1.3, y, phase, ha="right", va="center", color=GREY)
            shown = [e for e in recorded(sequence) if e.phase == phase]
            for i, e in enumerate(shown):
                colour = {"all_reduce": RED, "reduce_scatter": GREEN}.get(e.op, BLUE)
                text = f"{e.op} over {' '.join(e.axes)}\n{e.bytes / 1024:g} KiB   {e.module or 'all gradients'}"
                box(ax, 1.0 + 4.1 * i, y, text, colour, 3.7, 1.7)
                if i:
                    arrow(ax, (1.0 + 4.1 * (i - 1) + 1.9, y), (1.0 + 4.1 * i - 1.9, y), gap=0)
            if not shown:
                ax.text(-0.8, y, "nothing", va="center")
        ax.set_title("sequence parallelism: activations between layers are cut over tp" if sequence else
                     "tensor parallelism: activations between layers are whole over tp", fontsize=9.5, loc="left")
        ax.set_xlim(-4, 16.5)
        ax.set_ylim(-3.8, 1.2)
    return fig


FIGURES = {"layouts": layouts, "moves": moves, "gradients": gradients, "communication": communication}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", action="store_true", help="also write PNG, to look at")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        fig = draw()
        fig.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
        if options.png:
            fig.savefig(FOLDER / f"{name}.png", dpi=110)
        plt.close(fig)
        print(f"docs/figures/{name}.svg")


if __name__ == "__main__":
    main()
