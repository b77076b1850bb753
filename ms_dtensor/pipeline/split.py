# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages: a stage is the model with cells missing.

Paths stay as they are, so names of parameters, checkpoints, plans and initial values are those of one device. What is cut is
the chain of cells that the model applies in turn: its own cells, with the longest list of cells among them taken apart. A
cell that belongs to another stage is replaced by `Absent`, which hands its first argument on.
"""
from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

from mindspore import Parameter, mint, nn

from ..core.mesh import DeviceMesh
from ..errors import ConfigError
from .chain import Absent, Chain
from .stage import PipelineStage

Cost = Callable[[str, nn.Cell], float]


def pipeline(module: nn.Cell, mesh: DeviceMesh, *, split: str | Sequence = "cost", n_stages: int | None = None,
             style: str = "loop", cost: Cost | None = None) -> list[PipelineStage]:
    """The stages of this rank, of a model that applies its cells in turn.

    The model itself is used up: the stages share its cells. Make it under `no_init_parameters()`, and no rank ever holds
    another's stage; or let go of it. What its `construct` does beside its cells happens on every stage, so beside a cell of
    another stage it has to hand its tensor on as it is, which is checked on host. Lay the stages out afterwards, each as a
    model without a pipeline.

    Args:
        module: a cell whose parameters all lie in its cells.
        mesh: one axis, over which the stages are dealt.
        split: "cost" cuts where the dearest stage costs least, and of such cuts where the largest stage has least; or a
            list of paths at which a stage begins, but for the first (`["layers.4", "layers.9"]`); or a list of lists of
            paths, one a stage, of which some may be empty.
        n_stages: for "cost"; default one a rank, or two with style "v".
        style: "loop" deals stage s to rank s % p; "v" gives rank r the stages r and 2p - 1 - r.
        cost: `(path, cell) -> number`, its time; default its elements in parameters of two dims and more, but for an
            embedding, which looks up and multiplies with nothing.

    Returns:
        This rank's stages, first to last.

    Raises:
        ConfigError: paths that are none of the chain, or out of order; parameters outside of it; a number of stages that
            the ranks do not divide.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 4))
        >>> [sorted(dict(s.module.parameters_and_names())) for s in md.pipeline.pipeline(net, mesh, split=["2"])]
        [['0.bias', '0.weight'], ['2.bias', '2.weight']]
    """
    if not isinstance(module, nn.Cell):
        raise ConfigError(f"For 'pipeline', 'module' is a {type(module).__name__}.", f"mesh({mesh.describe()})",
                          "Stages are cut out of a Cell.", "a Cell that calls the others in turn, as nn.SequentialCell does")
    if mesh.ndim != 1:
        raise ConfigError(f"For 'pipeline', 'mesh' has {mesh.ndim} axes.", f"mesh({mesh.describe()})",
                          "Stages are dealt over one axis.", 'pass mesh["pp"]')
    if style not in ("loop", "v"):
        raise ConfigError(f"For 'pipeline', 'style' = {style!r} is none.", f"mesh({mesh.describe()})",
                          'A style deals stages to ranks: "loop" or "v".', 'style="loop"')
    chain = _chain(module, _named(split))
    parts = _parts(module, chain, split, n_stages or mesh.size() * (1 + (style == "v")), cost or _time)
    size, count = mesh.size(), len(parts)
    if count % size or style == "v" and count != 2 * size:
        raise ConfigError(f"For 'pipeline', {count} stages do not fit.", f"mesh({mesh.describe()}), style={style!r}",
                          "Each rank has as many stages; two with style 'v'.", f"n_stages={size * (1 + (style == 'v'))}")
    owner = tuple(min(s, 2 * size - 1 - s) if style == "v" else s % size for s in range(count))
    _part(module, chain, parts)
    ties = _ties(chain, parts, owner)
    here = mesh.get_group().rank_index
    return [PipelineStage(_only(module, chain, parts, s), s, count, mesh, ties=[t for t in ties if s in t.stages])
            for s in range(count) if owner[s] == here]


# -- the chain -----------------------------------------------------------------------------------------------------------


def _named(split) -> list[str]:
    return [] if isinstance(split, str) else [p for entry in split for p in ([entry] if isinstance(entry, str) else entry)]


def _chain(module: nn.Cell, named: list[str]) -> dict[str, nn.Cell]:
    """The cells that are applied in turn, by path: each `CellList`, which is never called itself, is open, and what is on
    the way to what is named, or to the longest list, of those that have a quarter of the model."""
    every = dict(module.cells_and_names())
    lists = [p for p, c in every.items() if isinstance(c, nn.CellList | nn.SequentialCell) and c is not module]
    quarter = _elements(module) / 4 if lists else 0
    large = [p for p in lists if _elements(every[p]) >= quarter]  # not one layer's experts, however many
    inside = max(large or lists, key=lambda p: (len(every[p]._cells), -len(p)), default="")
    opened = {"", *_above(f"{inside}.")} if inside and not named else {""}
    for path in named:
        if path not in every:
            raise ConfigError(f"For 'pipeline', the model has no cell '{path}'.", type(module).__name__,
                              "A stage begins at a cell, which is given by its path.", "see model.cells_and_names()")
        opened |= _above(path)
    for path in opened:
        if (own := [p for p in every[path]._params.values() if p is not None]):
            raise ConfigError(f"For 'pipeline', {type(every[path]).__name__} has parameters beside its cells.",
                              ", ".join(p.name for p in own[:5]), "A parameter lies in one stage, with its cell.",
                              "put them into a cell of their own")
    out: dict[str, nn.Cell] = {}

    def walk(path: str, cell: nn.Cell) -> None:
        for key, child in cell._cells.items():
            at = f"{path}.{key}" if path else key
            if child is not None and (at in opened or isinstance(child, nn.CellList)):
                walk(at, child)
            elif child is not None:
                out[at] = child
    walk("", module)
    return out


def _above(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def _elements(cell: nn.Cell) -> float:
    return float(sum(math.prod(p.shape) for p in cell.get_parameters() if len(p.shape) > 1))


def _time(path: str, cell: nn.Cell) -> float:
    return _elements(cell) - sum(_elements(c) for _, c in cell.cells_and_names()
                                 if isinstance(c, nn.Embedding | mint.nn.Embedding))


def _parts(module: nn.Cell, chain: dict[str, nn.Cell], split, count: int, cost: Cost) -> list[list[str]]:
    """The paths of each stage."""
    paths = list(chain)

    def inside(entry: str) -> list[str]:
        return [entry] if entry in chain else [p for p in paths if p.startswith(f"{entry}.")]
    if split == "cost":
        return balanced([(p, cost(p, chain[p]), _elements(chain[p])) for p in paths], count)
    if isinstance(split, str):
        raise ConfigError(f"For 'pipeline', 'split' = {split!r} is none.", type(module).__name__,
                          'It is "cost", paths at which stages begin, or lists of paths.', 'split="cost"')
    if all(isinstance(entry, str) for entry in split):
        starts = [0, *(paths.index(p) for entry in split for p in inside(entry)[:1]), len(paths)]
        parts = [paths[a:b] for a, b in zip(starts, starts[1:])]
    else:
        parts = [[p for path in entry for p in inside(path)] for entry in split]
    if [p for part in parts for p in part] != paths:
        raise ConfigError("For 'pipeline', the stages are not the model's cells in their order.",
                          f"{split}", f"The cells are, in order: {', '.join(paths)}.",
                          "give each path once, in this order; a stage may be empty")
    return parts


def balanced(cells: list[tuple[str, float, float]], count: int) -> list[list[str]]:
    """So many runs of neighbours, of which the dearest costs least; of all such, that whose largest has least.

    Args:
        cells: (path, cost, elements) of each.
        count: of runs, some of which may be empty.
    """
    n, cost, held = len(cells), [0.0], [0.0]
    for _, c, size in cells:
        cost.append(cost[-1] + c)
        held.append(held[-1] + size)

    def fits(bound: float) -> bool:
        runs, start = 1, 0
        for end in range(1, n + 1):
            if cost[end] - cost[start] > bound:
                runs, start = runs + 1, end - 1
            if cost[end] - cost[start] > bound:
                return False
        return runs <= count
    bounds = sorted({cost[end] - cost[start] for end in range(n + 1) for start in range(end + 1)})
    bound = bounds[bisect_left(bounds, True, key=fits)]
    best = [(0.0, 0.0)] + [(math.inf, 0.0)] * n  # the largest, then the sum of squares, so that no stage is idle for nothing
    cuts: list[list[int]] = []
    for _ in range(count):
        now, at = [(math.inf, 0.0)] * (n + 1), [0] * (n + 1)
        for end in range(n + 1):
            for start in range(end + 1):
                own = cost[end] - cost[start]
                found = max(best[start][0], held[end] - held[start]), best[start][1] + own * own
                if own <= bound and found < now[end]:
                    now[end], at[end] = found, start
        best = now
        cuts.append(at)
    parts: list[list[str]] = []
    end = n
    for at in reversed(cuts):
        parts.append([p for p, *_ in cells[at[end]:end]])
        end = at[end]
    return parts[::-1]


# -- the stages ----------------------------------------------------------------------------------------------------------


def _part(module: nn.Cell, chain: dict[str, nn.Cell], parts: list[list[str]]) -> None:
    """A cell at several paths, an activation say, of which other stages have some: each has one of its own, with the same
    parameters, which are tied then."""
    first: dict[int, int] = {}  # by id of the cell, the stage that keeps it
    for stage, paths in enumerate(parts):
        own: dict[int, nn.Cell] = {}
        for path in paths:
            cell = chain[path]
            if first.setdefault(id(cell), stage) == stage:
                continue
            if id(cell) not in own:
                own[id(cell)] = copy.deepcopy(cell, {id(p): p for p in cell.get_parameters()})
            above, _, key = path.rpartition(".")
            around = dict(module.cells_and_names())[above]
            chain[path] = around._cells[key] = own[id(cell)]
            if isinstance(around, nn.SequentialCell):
                around.cell_list = list(around._cells.values())


def _only(module: nn.Cell, chain: dict[str, nn.Cell], parts: list[list[str]], stage: int) -> nn.Cell:
    """The model around the cells of a stage, which it shares; a copy that finds the others gone."""
    cells = {path: cell if path in parts[stage] else Absent(path) for path, cell in chain.items()}
    out = copy.deepcopy(module, {id(chain[path]): cell for path, cell in cells.items()})
    Chain(out, cells.items(), {path: s for s, paths in enumerate(parts) for path in paths}, stage == 0)
    return out


class Tie:
    """One parameter in cells of several stages.

    Args:
        paths: by stage, where it lies there.
        ranks: the ranks on the pipeline's axis that have these stages, in order of the first of them.
    """

    def __init__(self, paths: dict[int, str], ranks: list[int]):
        self.paths, self.ranks = paths, ranks

    @property
    def stages(self) -> list[int]:
        return list(self.paths)

    def place(self) -> tuple[int, str]:
        """The first stage that has it, and its path there: which one it is, alike on all ranks."""
        return min(self.paths.items())


def _ties(chain: dict[str, nn.Cell], parts: list[list[str]], owner: tuple[int, ...]) -> list[Tie]:
    """Parameters of cells of several stages that lie on several ranks."""
    found: dict[int, tuple[Parameter, dict[int, str]]] = {}
    for stage, paths in enumerate(parts):
        for path in paths:
            for name, p in chain[path].parameters_and_names():
                found.setdefault(id(p), (p, {}))[1].setdefault(stage, f"{path}.{name}")
    ties = [Tie(places, list(dict.fromkeys(owner[s] for s in places))) for _, places in found.values()]
    return [tie for tie in ties if len(tie.ranks) > 1]
