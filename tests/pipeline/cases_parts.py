# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts against the same in one, beside data and tensor parallelism: bit for bit, and as often sent."""
from __future__ import annotations

from collections import Counter

import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.pipeline import PipelineStage
from tests.cases import case
from tests.pipeline.cases_run import WAYS, Net, T, X, loss_fn
from tests.sharding.support import collected, filled, none_of


@case(2)
def parts_beside_an_axis(world):
    faults: list[str] = []
    for way in WAYS:
        def steps(way=way):
            other = "tp" if way.startswith("tp") else "dp"
            mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", other))
            net = filled(Net(2))
            WAYS[way](net, mesh)
            stage = PipelineStage(net, 0, 1, mesh["pp"])
            rows = [md.Replicate() if other == "tp" else md.Shard(0)]
            xs, ts = ([md.distribute_tensor(Tensor(half), mesh[other], rows, src_data_rank=None) for half in np.split(a, 2)]
                      for a in (X, T))
            params = stage.params()

            def run(in_parts: bool):
                with comm.record() as events:
                    made = [stage.record((x,), {}, lambda y, t=t: loss_fn(y, t), in_parts) for x, t in zip(xs, ts)]
                    out = []
                    for last, one in enumerate(made):
                        stage.synchronise(bool(last))
                        if in_parts:
                            dx, = one.backward_inputs(None, params)
                            products = len(one._store.products)
                            out += [dx, *one.backward_weights(params)]
                            assert products == 6, products
                        else:
                            (dx,), grads = one.backward(None, params)
                            out += [dx, *grads]
                return [g.full_tensor().asnumpy() for g in out], Counter(
                    (e.op, e.phase, tuple(e.axes)) for e in events)
            run(False)
            want, often = run(False)
            got, counted = run(True)
            assert counted == often, f"{counted - often} more, {often - counted} less"
            for i, (a, b) in enumerate(zip(got, want)):
                assert np.array_equal(a, b), f"{i}: off by {np.abs(a - b).max()} of {np.abs(b).max()}"
        collected(faults, way, steps)
    none_of(faults)
