# SPDX-License-Identifier: Apache-2.0
"""The tree of cells with what each communicated, as JSON and as text. Not here: how cells get their names."""
from __future__ import annotations

from collections.abc import Iterable

from ..comm import CommEvent
from ..errors import ConfigError
from .cell_names import CellNames
from .text import columns, human, short_site


def tree_json(cells: CellNames, events: Iterable[CommEvent], noise_level: int = 3) -> dict:
    """The cells as a tree, each with what it communicated by itself, in the calls of all below it, and its parameters."""
    if isinstance(noise_level, bool) or noise_level not in range(4):
        raise ConfigError(f"For 'CommDebugMode', 'noise_level' must be 0 to 3, but got {noise_level!r}.", "", "",
                          "0 tells least, 3 most")
    root = _node("", "")
    nodes: dict[tuple[str, ...], dict] = {(): root}

    def node(path: tuple[str, ...]) -> dict:
        if path not in nodes:
            nodes[path] = _node(path[-1], cells.kind(path[-1]))
            node(path[:-1])["children"].append(nodes[path])
        return nodes[path]

    for name, own in cells.parameters().items():  # in the order of the calls
        node(cells.path(name))["module_parameters"] = {key: _lies(p) for key, p in own.items()} if noise_level >= 2 else {}
    own_events: dict[tuple, list[CommEvent]] = {}
    for e in events:
        path = cells.path(e.module)
        node(path)
        for length in range(len(path) + 1):
            total = nodes[path[:length]][e.phase]
            total["count"] += 1
            total["bytes"] += e.bytes
        site = short_site(e.site) if noise_level == 3 else ""
        own_events.setdefault((path, e.phase, e.op, e.axes, e.implicit, e.src, e.dst, site), []).append(e)
    for (path, phase, op, axes, implicit, src, dst, site), same in own_events.items() if noise_level else ():
        nodes[path]["collectives"].append({
            "phase": phase, "op": op, "axes": list(axes), "count": len(same), "bytes": sum(e.bytes for e in same),
            "implicit": implicit, "src": src, "dst": dst, **({"site": site} if site else {})})
    for n in nodes.values() if noise_level < 2 else ():
        n["children"] = [c for c in n["children"] if c["forward"]["count"] + c["backward"]["count"]]
    return root


def _node(name: str, kind: str) -> dict:
    return {"fqn": name, "module_type": kind, "module_parameters": {}, "forward": {"count": 0, "bytes": 0},
            "backward": {"count": 0, "bytes": 0}, "collectives": [], "children": []}


def _lies(param) -> str:
    layout = getattr(param, "_layout", None)
    return f"{list(param.shape)}, no DTensor" if layout is None else layout.describe()


def tree_text(cells: CellNames, events: Iterable[CommEvent], noise_level: int = 3) -> str:
    """The tree of cells as text; see `CommDebugMode.generate_comm_debug_tracing_table`."""
    rows = [("cell", "forward", "backward", "")]

    def add(node: dict, depth: int, above: str) -> None:
        pad = "  " * depth
        short = node["fqn"].removeprefix(above + ".")
        rows.append((pad + short, *(f"{t['count']} ({human(t['bytes'])})" if t["count"] else ""
                                    for t in (node["forward"], node["backward"])), ""))
        collectives(node, pad + "  ")
        for key, lies in node["module_parameters"].items():
            rows.append((f"{pad}  . {key}", "", "", lies))
        for child in node["children"]:
            add(child, depth + 1, node["fqn"])

    def collectives(node: dict, pad: str) -> None:
        for c in node["collectives"]:
            done = f"{c['count']} ({human(c['bytes'])})"
            said = (f"{c['src']} -> {c['dst']}" if c["src"] else "", "implicit" if c["implicit"] else "", c.get("site", ""))
            both = (done, "") if c["phase"] == "forward" else ("", done)
            rows.append((f"{pad}* {c['op']}({', '.join(c['axes'])})", *both, "  ".join(filter(None, said))))

    root = tree_json(cells, events, noise_level)
    outside = {p: {k: root[p][k] - sum(c[p][k] for c in root["children"]) for k in ("count", "bytes")}
               for p in ("forward", "backward")}
    if any(t["count"] for t in outside.values()):
        add({**root, "fqn": "(in no cell)", "children": [], **outside}, 0, "")
    for child in root["children"]:
        add(child, 0, "")
    return columns(rows) if len(rows) > 1 else "no communication"
