# SPDX-License-Identifier: Apache-2.0
"""AdamW on DTensor parameters against plain ones of the local size, and how often a replicated gradient is reduced.

    python scripts/bench/optimizer.py [--rounds 30] [--no-save]

One process plays rank 0 of two (nothing is sent, everything is counted). The parameters are those of a Llama of
21 M parameters, tensor parallel with sequence parallelism, whose norm weights are replicated and whose gradients are
partial sums: each is to be reduced once a step, and the step itself is to communicate nothing.
"""
from __future__ import annotations

import argparse
import statistics

from common import finish, one_thread, sample, summary

one_thread()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()

    import dataclasses

    import mindspore as ms
    import numpy as np
    from llama_step import WAYS, config, data
    from mindspore import Parameter, Tensor

    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import comm, init_device_mesh
    from ms_dtensor.optim import AdamW

    rows, table = {}, [("", "DTensor us", "plain us", "ratio", "communications")]
    with comm.fake_world(2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        ms.runtime.launch_blocking()
        for size in ("small", "toy"):
            cfg = config(size, WAYS["tp"])
            cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, sequence_parallel=True))
            trainer = Trainer(cfg, None, mesh)
            with comm.record() as backward:
                _, grads = trainer.gradients(*data(cfg))
            with comm.record() as stepping:
                trainer.optimizer(grads)
            norms = [p for p in trainer.params if p.ndim == 1]
            reductions = [e for e in backward if e.phase == "backward" and e.op == "all_reduce"
                          and e.shape[-1] == np.prod(e.shape)]
            locals_ = [Parameter(Tensor(p.to_local().asnumpy().copy()), name=p.name) for p in trainer.params]
            plain = AdamW(locals_, trainer.optimizer.lr, trainer.optimizer.betas, trainer.optimizer.eps, 0.1)
            flat = [Tensor(g.to_local().asnumpy().copy()) for g in grads]
            theirs, ours = [], []
            for _ in range(args.rounds):
                ours.append(sample(lambda t=trainer, g=grads: t.optimizer(g), 3))
                theirs.append(sample(lambda o=plain, g=flat: o(g), 3))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs))
            rows[size] = {"parameters": len(grads), "dtensor": summary(ours), "plain": summary(theirs),
                          "ratio": round(ratio, 3), "communications": len(stepping), "replicated": len(norms),
                          "reductions": len(reductions)}
            table.append((f"{size}, {len(grads)} parameters", rows[size]["dtensor"]["median"],
                          rows[size]["plain"]["median"], f"{ratio:.3f}", len(stepping)))
            table.append((f"{size}: reductions of {len(norms)} replicated gradients", len(reductions), "", "", ""))
    finish("optimizer", {"unit": "us", "rounds": args.rounds, "rows": rows}, table, not args.no_save)


if __name__ == "__main__":
    main()
