# SPDX-License-Identifier: Apache-2.0
"""A user's program as type checkers see it; never run. `python -m mypy` asks it beside the package, with --strict's options.

A wrong line says which error it is: mypy fails where it finds another one, and where it finds none (`warn_unused_ignores`).
"""
import ms_dtensor as md

x: md.DTensor = md.ones(2)
y: md.DTensor = x.redistribute(placements=[md.Shard(0)])
layout: md.Layout = y.layout
names: tuple[str, ...] = layout.mesh.mesh_dim_names
md.init.zeros_(x)
md.random.manual_seed(3)
used = md.optim.AdamW, md.debug.explain, md.verify.check_rule, md.errors.LayoutError, md.parallel.replicate

md.shard(0)  # type: ignore[attr-defined]
print(md.debug.explian)  # type: ignore[attr-defined]
print(x.layout.mesh.names)  # type: ignore[attr-defined]
md.Shard('0')  # type: ignore[arg-type]
md.full((2,))  # type: ignore[call-arg]
z: md.Layout = md.Shard(0)  # type: ignore[assignment]
