# SPDX-License-Identifier: Apache-2.0
"""Loads, biases and auxiliary losses are counted once, whatever runs twice; a capacity drops the same choices everywhere."""
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from model_zoo.llama.config import ExpertsConfig, ParallelConfig
from model_zoo.llama.loads import Loads
from model_zoo.llama.parallelize import balance_of_shared_sequences, make_mesh, own_list
from ms_dtensor import DTensor, Shard, comm
from ms_dtensor.comm.tally import Tally
from tests.cases import case
from tests.experts.cases_experts import pieces
from tests.experts.cases_grid import trainer_of
from tests.support import array, each_once, mesh_1d
from tests.tiers import sampled

BIASED = ExpertsConfig(8, 2, score="sigmoid", bias_rate=0.05, balance=0.1, balance_over="sequence", shared=1, dense_layers=1)
DROPS = ExpertsConfig(8, 2, capacity=0.6, balance=0.1)
ULPS = 4e-7  # of a float32 near 2, three: scores of one device and of shards are rounded in other places


def told(experts, parallel, **how):
    """Auxiliary loss of the first batch, then of three steps: loads, biases, and choices that are left of the last batch."""
    trainer = trainer_of(experts, parallel, batch=32, **how)
    balance = np.mean([float(array(trainer.model(ids, *places)[1])) for ids, _, *places in trainer.parts(*trainer.batch(0))])
    loads = []
    for i in range(3):
        loads.append(trainer.step(i).loads)
        if "eval_batches" in how:
            trainer.held_out_loss()
    cells = [layer.feed_forward for layer in trainer.model.layers if layer.mixed]
    biases = [array(c.expert_bias) for c in cells] if experts.bias_rate else []
    return balance, np.array(loads), np.array(biases)


def the_same_everywhere(layouts, how):
    for experts in sampled((BIASED, DROPS), 2):
        want, = each_once(lambda experts=experts: told(experts, None))
        total = 32 * 6 * 2
        assert (want[1].sum(-1) == total).all() if experts.capacity is None else (want[1].sum(-1) < total).all()
        assert want[2].any() or experts.capacity, "biases have moved"
        for name, (parallel, more) in sampled({**layouts, **{n: (None, h) for n, h in how.items()}}.items(), 2):
            if "micro_batches" in more and experts.balance_over != "sequence":
                continue  # another mean by its definition, so other weights after a step
            got = told(experts, parallel, **more)
            assert np.array_equal(got[1], want[1]), (name, got[1], want[1])
            assert np.array_equal(got[2], want[2]), (name, got[2], want[2])
            if experts.balance_over == "sequence":
                assert abs(got[0] - want[0]) <= ULPS * want[0], (name, got[0], want[0])


@case(world_size=4, timeout=300)
def loads_and_biases_are_counted_once(world):
    over = {"ep2 x dp2, recompute": (ParallelConfig(4, ep=2, loss_parallel=False), {"recompute": True}),
            "ep4, 2 micro-batches": (ParallelConfig(4, ep=4, fsdp=True, loss_parallel=False), {"micro_batches": 2})}
    the_same_everywhere(over, {"evaluation between steps": {"eval_batches": 1}})


def a_capacity_drops_the_same_choices_on_every_mesh(world):
    want = None
    for parallel in (None, ParallelConfig(4, loss_parallel=False), ParallelConfig(4, ep=4, loss_parallel=False),
                     ParallelConfig(2, 2, ep=2, loss_parallel=False)):
        trainer = trainer_of(DROPS, parallel)
        seen = []
        cell = trainer.model.layers[0].feed_forward
        left = cell.left

        def watched(chosen, t, left=left, seen=seen):
            seen.append(left(chosen, t))
            return seen[-1]
        cell.left = watched
        for part in trainer.parts(*trainer.batch(0)):
            trainer.model(part[0])
        got = (seen[0].full_tensor() if isinstance(seen[0], DTensor) else seen[0]).asnumpy()
        want = got if want is None else want
        assert (want < 0).any() and np.array_equal(got, want), (parallel, got, want)


def what_the_report_says_of_a_step_is_what_was_counted(world):
    """Loads of a step, what was dropped, and bytes of dispatch: those that the record of communication has of tokens."""
    for parallel, known in sampled(((ParallelConfig(4, ep=2, loss_parallel=False), True),
                            (ParallelConfig(2, cp=2, ep=4, loss_parallel=False), True),
                            (ParallelConfig(1, 2, cp=2, ep=2, loss_parallel=False), False)), 3):
        trainer = trainer_of(DROPS, parallel)
        told = Loads(trainer.cfg)
        with Tally() as tally, comm.record() as events:
            loads = trainer.step(0).loads
        said = told.step(loads, 8 * 6, tally.take())
        assert said["loads"] == loads.tolist() and said["dropped"] == 2 * 8 * 6 * 2 - loads.sum() > 0, said
        sent = sum(e.bytes for e in events if "tokens" in f"{e.src} {e.dst}" and e.op == "all_to_all")
        assert sent > 0 and said["dispatch_bytes"] == (sent if known else None), (parallel, said, sent)


@case(world_size=4, timeout=300)
def ranks_that_share_sequences_have_their_balance(world):
    """cp, where a rank has parts of sequences, and experts over dp and cp: the auxiliary loss, loads and biases."""
    balanced_over_context(ParallelConfig(2, cp=2, ep=4, loss_parallel=False), {"recompute": True})


def balanced_over_context(parallel, *hows):
    for experts in sampled((BIASED, DROPS), 2):
        want, = each_once(lambda experts=experts: told(experts, None))
        for how in hows:
            if "micro_batches" in how and experts is DROPS:
                continue
            got = told(experts, parallel, **how)
            assert np.array_equal(got[1], want[1]) and np.array_equal(got[2], want[2]), (how, got, want)
            assert abs(got[0] - want[0]) <= ULPS * want[0], (how, got[0], want[0])


@case(world_size=8, timeout=900)
def on_eight_ranks_nothing_is_counted_twice(world):
    """dp8, ep8, cp2 x ep4: loads and biases to the bit, the auxiliary loss to a float32's rounding, however a step runs."""
    ways = {"recompute": {"recompute": True}, "2 micro-batches, evaluation": {"micro_batches": 2, "eval_batches": 1},
            "4 micro-batches, recompute": {"micro_batches": 4, "recompute": True}}
    layouts = {f"{name}, {way}": (parallel, how) for way, how in ways.items() for name, parallel in (
        ("dp8", ParallelConfig(8, loss_parallel=False)), ("ep8", ParallelConfig(8, ep=8, loss_parallel=False)))}
    the_same_everywhere(layouts, {})
    balanced_over_context(ParallelConfig(4, cp=2, ep=4, loss_parallel=False), {}, *ways.values())


@case(world_size=8)
def the_loss_of_sequences_is_one_number(world):
    """From the same scores, in float64: dp8, ep8, cp2 x ep4 and 1, 2, 4 micro-batches; with its gradient."""
    sequences, t, experts, k = 32, 6, 8, 2
    logits = np.random.default_rng(5).normal(size=(sequences * t, experts))
    router, plain = md.Router(k, score="sigmoid"), Tensor(logits)
    picks = router(plain)[1]
    want = float(md.expert_balance_loss(router.scores(plain), picks, t))
    slope = md.grad(lambda x: md.expert_balance_loss(router.scores(x), picks, t))(plain).asnumpy()
    over_cp = ParallelConfig(4, cp=2, ep=4, loss_parallel=False)
    shared = make_mesh("cpu", over_cp)
    meshes = [(mesh_1d(8, "dp"), None), (mesh_1d(8, "ep"), None), (shared, balance_of_shared_sequences(shared))]
    for mesh, of_shared in meshes:
        for parts in (1, 2, 4):
            value, grad = 0.0, np.zeros_like(slope)
            for tokens in np.split(np.arange(len(logits), dtype=np.int32).reshape(sequences, t), parts):
                if of_shared is None:
                    rows = pieces(tokens.reshape(-1), mesh, [Shard(0)])
                    loss = md.expert_balance_loss
                    length = t
                else:
                    rows, _, length = own_list(mesh, over_cp, None, tokens, tokens)
                    loss = of_shared
                mine = rows.to_local().asnumpy()
                x = DTensor.from_local(Tensor(logits[mine]), mesh, rows.placements, shape=(tokens.size, experts))
                chosen = router(x)[1]
                one, slopes = md.value_and_grad(lambda x, c=chosen, n=length, f=loss: f(router.scores(x), c, n))(x)
                value += float(array(one)) / parts
                grad[array(rows)] += array(slopes) / parts
            assert abs(value - want) <= 1e-12 * want, (mesh, parts, value, want)
            assert np.abs(grad - slope).max() <= 1e-12 * np.abs(slope).max(), (mesh, parts)
