# SPDX-License-Identifier: Apache-2.0
"""Real ranks: every refusal reads the same everywhere, communicates nothing first, and leaves things usable.

`TABLE` is the list of refusals of the public surface; each entry is one line: name, error, the refused call, and what must
work on the same objects afterwards (by default a sum over a DTensor). Calls get a fresh `Bench`.
"""
import contextlib
import copy
import io

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import (
    ColwiseParallel,
    DTensor,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    local_map,
    loss_parallel,
    register_rule,
    replicate,
)
from ms_dtensor.debug import explain, visualize_sharding
from ms_dtensor.errors import ConfigError, ImplicitCommError, LayoutError, MeshError, MixedOperandError, OpRuleError
from ms_dtensor.tensor import init as md_init
from tests.operands import Built, P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import check_against_one_device, counted, equal, refusal, refused_alike, same_on_all_ranks


class Nothing(md.DFunction):
    forward = staticmethod(lambda ctx, x: x * 2)


def two_layers() -> nn.Cell:
    """Of 4 features, and a norm."""
    def construct(c, x, scale=None):
        y = c.b(c.act(c.a(x)))
        return y if scale is None else (y, y * 2)
    return Built(construct, a=nn.Dense(4, 4), b=nn.Dense(4, 4), norm=nn.LayerNorm((4,)), act=nn.ReLU())


class Bench:
    """Fresh objects for one entry."""

    def __init__(self):
        self.mesh, self.two = mesh_1d(), mesh_2d()
        self.plain = data(1, 8, 4)
        self.x = placed(self.plain, self.mesh, S(0))
        self.cols = placed(self.plain, self.mesh, S(1))
        self.part = DTensor.from_local(self.plain, self.mesh, [P])
        self.net = two_layers()

    def styled(self, style, cell="a"):
        """The net with one style on a cell; printing is not what is tested here."""
        with contextlib.redirect_stdout(io.StringIO()):
            return md.parallelize_module(self.net, self.mesh, {cell: style} if cell else style, src_data_rank=None)

    def usable(self):
        equal(self.x + self.x, self.plain * 2)
        equal(self.x.sum(), self.plain.sum())


def _cell_usable(b):
    equal(b.styled(ColwiseParallel(use_local_output=False)).a(distribute_tensor(b.plain, b.mesh, src_data_rank=None)).sum(1)
          .full_tensor() * 0, np.zeros(8, np.float32))


def _in_loss(call):
    with loss_parallel():
        return call()


TABLE = [
    # -- meshes
    ("mesh of the wrong size", MeshError, lambda b: init_device_mesh("cpu", (3,))),
    ("unknown device", MeshError, lambda b: init_device_mesh("tpu", (4,))),
    ("rank list of the wrong length", MeshError, lambda b: init_device_mesh("cpu", (2,), rank_list=(0, 1, 2))),
    ("rank list beyond the world", MeshError, lambda b: init_device_mesh("cpu", (2,), rank_list=(0, 9))),
    ("a rank twice", MeshError, lambda b: md.DeviceMesh("cpu", [0, 0])),
    ("names that do not fit", MeshError, lambda b: md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b"))),
    ("device of a mesh", MeshError, lambda b: md.DeviceMesh("tpu", [0, 1])),
    ("no such axis", MeshError, lambda b: b.two["pp"]),
    ("an axis twice", MeshError, lambda b: b.two["tp", "tp"]),
    ("axis out of range", MeshError, lambda b: b.two.size(5)),
    ("which axis", MeshError, lambda b: b.two.get_local_rank()),
    ("a flattened name that is an axis", MeshError, lambda b: b.two["dp", "tp"].flatten("tp")),
    ("no default mesh", MeshError, lambda b: distribute_tensor(b.plain)),
    # -- placements
    ("Shard of no integer", LayoutError, lambda b: S("rows")),
    ("unknown reduction", LayoutError, lambda b: md.Partial("median")),
    ("too few placements", LayoutError, lambda b: distribute_tensor(b.plain, b.two, [S(0)])),
    ("too many placements", LayoutError, lambda b: b.x.redistribute(placements=[R, R])),
    ("dim out of range", LayoutError, lambda b: distribute_tensor(b.plain, b.mesh, [S(2)])),
    ("negative dim out of range", LayoutError, lambda b: distribute_tensor(b.plain, b.mesh, [S(-3)])),
    ("no placement", LayoutError, lambda b: distribute_tensor(b.plain, b.mesh, [0])),
    ("a scalar cannot be cut", LayoutError, lambda b: distribute_tensor(Tensor(1.0), b.mesh, [S(0)])),
    ("alias form of the wrong length", LayoutError, lambda b: distribute_tensor(b.plain, b.two, ("dp",))),
    ("an axis twice in the alias form", LayoutError, lambda b: distribute_tensor(b.plain, b.two, ("dp", "dp"))),
    ("unknown axis in the keyed form", MeshError, lambda b: distribute_tensor(b.plain, b.two, {"pp": S(0)})),
    ("an axis twice in the order", LayoutError, lambda b: md.Layout(b.two, [S(0), S(0)], (4, 4), order=("dp", "dp"))),
    # -- DTensor
    ("from_local of a DTensor", LayoutError, lambda b: DTensor.from_local(b.x, b.mesh, [R])),
    ("from_local of no tensor", LayoutError, lambda b: DTensor.from_local([1.0], b.mesh, [R])),
    ("not this rank's shard", LayoutError, lambda b: DTensor.from_local(b.plain, b.mesh, [S(0)], shape=(8, 4))),
    ("a stride that is not", LayoutError, lambda b: DTensor.from_local(b.plain, b.mesh, [R], shape=(8, 4), stride=(1, 8))),
    ("redistribute to Partial", md.errors.RedistributeError, lambda b: b.x.redistribute(placements=[P])),
    ("to another reduction", md.errors.RedistributeError, lambda b: b.part.redistribute(placements=[md.Partial("max")])),
    ("redistribute to no mesh", LayoutError, lambda b: b.x.redistribute("tp", [R])),
    ("to_local with placements that do not fit", LayoutError, lambda b: b.x.to_local(grad_placements=[R, R])),
    ("item of many", OpRuleError, lambda b: b.x.item()),
    ("truth of many", OpRuleError, lambda b: bool(b.x)),
    ("number of many", OpRuleError, lambda b: float(b.x)),
    ("array of a shard", OpRuleError, lambda b: b.x.asnumpy()),
    ("array of a summand", OpRuleError, lambda b: np.asarray(b.part)),
    ("list of a shard", OpRuleError, lambda b: b.x.tolist()),
    ("bytes of a shard", OpRuleError, lambda b: b.x.get_bytes()),
    ("length of a scalar", TypeError, lambda b: len(b.x.sum())),
    ("iteration of a scalar", TypeError, lambda b: iter(b.x.sum())),
    ("a rectangle of another rank", LayoutError, lambda b: b.x.__get_tensor_shard__((99, 0))),
    ("rectangles of a summand", LayoutError, lambda b: b.part.__create_chunk_list__()),
    # -- distribute_tensor, distribute_module, factories, initialisers
    ("Partial of a whole", LayoutError, lambda b: distribute_tensor(b.plain, b.mesh, [P])),
    ("distributed otherwise", LayoutError, lambda b: distribute_tensor(b.x, b.mesh, [R])),
    ("distributed on another mesh", LayoutError, lambda b: distribute_tensor(b.x, b.two, [R, R])),
    ("no tensor", LayoutError, lambda b: distribute_tensor(b.plain.asnumpy(), b.mesh, [R])),
    ("no such source", LayoutError, lambda b: distribute_tensor(b.plain, b.mesh, [R], src_data_rank=4)),
    ("a source that is no rank", LayoutError, lambda b: distribute_tensor(b.plain, b.mesh, [R], src_data_rank="0")),
    ("input_fn of one argument", LayoutError, lambda b: md.distribute_module(b.net, b.mesh, None, lambda a: a), _cell_usable),
    ("output_fn of four", LayoutError, lambda b: md.distribute_module(b.net, b.mesh, None, None, lambda a, c, d, e: a),
     _cell_usable),
    ("a Partial factory", LayoutError, lambda b: md.ones(4, device_mesh=b.mesh, placements=[P])),
    ("a negative size", LayoutError, lambda b: md.zeros(-1, device_mesh=b.mesh)),
    ("a size that is no integer", LayoutError, lambda b: md.rand(2.5, device_mesh=b.mesh)),
    ("too many arguments after a size", LayoutError, lambda b: md.ones((4,), b.mesh, [R], [R])),
    ("the mesh twice", LayoutError, lambda b: md.ones((4,), b.mesh, device_mesh=b.mesh)),
    ("like a plain tensor", LayoutError, lambda b: md.zeros_like(b.plain)),
    ("an empty range of integers", ConfigError, lambda b: md.randint(3, 3, (4,), device_mesh=b.mesh)),
    ("no seed", ConfigError, lambda b: md.manual_seed(-1)),
    ("no random state", ConfigError, lambda b: md.set_rng_state({"seed": 1})),
    ("initialising a plain tensor", LayoutError, lambda b: md_init.normal_(b.plain)),
    ("initialising a summand", LayoutError, lambda b: md_init.ones_(b.part)),
    # -- ops and modes
    ("a plain operand", MixedOperandError, lambda b: b.x + b.plain),
    ("a plain operand first", MixedOperandError, lambda b: b.plain + b.x),
    ("a plain parameter", MixedOperandError, lambda b: Parameter(b.plain, name="w") * b.x),
    ("an op without a rule", OpRuleError, lambda b: ops.renorm(b.x, 2, 0, 1.0)),
    ("a shape that depends on shards", OpRuleError, lambda b: ops.nonzero(b.x)),
    ("two meshes", OpRuleError, lambda b: b.x + distribute_tensor(b.plain, b.two, src_data_rank=None)),
    ("a shape that does not fit", OpRuleError, lambda b: b.x.reshape((5, 5))),
    ("a mask whose result nobody knows", OpRuleError, lambda b: b.x[b.x > 0]),
    ("an unknown policy", ConfigError, lambda b: md.redistribution_policy("loud")),
    ("no_skip of no op", ConfigError, lambda b: md.SkipDTensorDispatch({"matmull"})),
    ("gathering inside loss_parallel", ImplicitCommError, lambda b: _in_loss(lambda: mint.sort(b.cols, dim=1))),
    # -- local_map, own ops
    ("local_map: too few placements", LayoutError, lambda b: local_map(lambda a, c: a, [S(0)], ([S(0)],))(b.x, 1)),
    ("local_map: a plain tensor laid out", MixedOperandError,
     lambda b: local_map(lambda a, c: a, [S(0)], ([S(0)], [R]))(b.x, b.plain)),
    ("local_map: a DTensor not laid out", LayoutError, lambda b: local_map(lambda a, c: a, [S(0)], (None, None))(b.x, 1)),
    ("local_map: an input that lies otherwise", LayoutError, lambda b: local_map(lambda a: a, [S(0)], ([S(0)],))(b.cols)),
    ("local_map: too many results", LayoutError, lambda b: local_map(lambda a: (a, a), ([S(0)],), ([S(0)],))(b.x)),
    ("local_map: a result that is no tensor", LayoutError, lambda b: local_map(lambda a: 3, [S(0)], ([S(0)],))(b.x)),
    ("local_map: a DTensor as result", LayoutError, lambda b: local_map(lambda a: b.x, [S(0)], ([S(0)],))(b.x)),
    ("local_map: two meshes", LayoutError,
     lambda b: local_map(lambda a, c: a, [S(0)])(b.x, distribute_tensor(b.plain, b.two, src_data_rank=None))),
    ("local_map: two entries for one result", LayoutError, lambda b: local_map(lambda a: a, ([S(0)], [S(0)]))(b.x)),
    ("local_map: a shard as a summand", LayoutError,
     lambda b: local_map(lambda a: a, [P], ([P],), redistribute_inputs=True)(b.x)),
    ("local_map: gradients of too many", LayoutError,
     lambda b: local_map(lambda a: a, [S(0)], ([S(0)],), in_grad_placements=([R], [R]))(b.x)),
    ("text that is no rule", ConfigError, lambda b: register_rule("refused_op", "rows -> rows")),
    ("no cases", ConfigError, lambda b: register_rule("refused_op", "")),
    ("a rule that is there", ConfigError, lambda b: register_rule("matmul", "R, R -> R")),
    ("an op that is no name", ConfigError, lambda b: register_rule(ops.abs, "R -> R")),
    ("a DFunction without a rule", ValueError, lambda b: Nothing.apply(b.x)),
    # -- styles
    ("Colwise of a ReLU", ConfigError, lambda b: b.styled(ColwiseParallel(), "act"), _cell_usable),
    ("Rowwise of a norm", ConfigError, lambda b: b.styled(md.RowwiseParallel(), "norm"), _cell_usable),
    ("a style on two axes", LayoutError, lambda b: md.parallelize_module(b.net, b.two, {"a": ColwiseParallel()}), _cell_usable),
    ("a layout that names no axis", LayoutError, lambda b: ColwiseParallel(input_layouts=(R, R)).apply(b.net.a, b.mesh),
     _cell_usable),
    ("SequenceParallel on two axes", LayoutError, lambda b: md.SequenceParallel().apply(b.net.norm, b.two), _cell_usable),
    ("a pattern that matches nothing", ConfigError, lambda b: b.styled(ColwiseParallel(), "c"), _cell_usable),
    ("a plan that is none", ConfigError, lambda b: md.parallelize_module(b.net, b.mesh, ["a"]), _cell_usable),
    ("an entry that is no style", ConfigError, lambda b: b.styled("columns"), _cell_usable),
    ("a plan with no such source", LayoutError,
     lambda b: md.parallelize_module(b.net, b.mesh, {"a": ColwiseParallel()}, src_data_rank=7), _cell_usable),
    ("inputs that do not pair", ConfigError, lambda b: md.PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=R)),
    ("keywords that do not pair", ConfigError,
     lambda b: md.PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R})),
    ("outputs that do not pair", ConfigError, lambda b: md.PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=R)),
    ("both that do not pair", ConfigError, lambda b: md.PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=(R, R), output_layouts=R, desired_output_layouts=R)),
    ("another number of inputs", ConfigError,
     lambda b: b.styled(md.PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R, R)), "act").act(b.plain)),
    ("another number of outputs", ConfigError,
     lambda b: b.styled(md.PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R)), "act").act(b.plain)),
    ("SequenceParallel of no tensor", LayoutError, lambda b: b.styled(md.SequenceParallel(), "norm").norm([1.0]),
     lambda b: equal(b.net.norm(DTensor.from_local(b.plain[None], b.mesh, [S(1)])).sum() * 0, np.float32(0))),
    ("an input without the style's axis", LayoutError,
     lambda b: b.styled(ColwiseParallel()).a(distribute_tensor(b.plain, mesh_1d(4, "other"), src_data_rank=None))),
    ("a local output of uneven width", LayoutError, lambda b: b.styled(
        md.PrepareModuleOutput(output_layouts=R, desired_output_layouts=S(0)), "act").act(b.plain[:6])),
    ("parts that are not the weight", LayoutError, lambda b: md.FusedColwiseParallel((3, 3)).apply(b.net.a, b.mesh), _cell_usable),
    ("units that do not divide", LayoutError, lambda b: md.FusedColwiseParallel((2, 2)).apply(b.net.a, b.mesh), _cell_usable),
    ("a plan for an unknown model", ConfigError, lambda b: md.suggest_plan(b.net, b.mesh), _cell_usable),
    ("loss of plain logits", LayoutError, lambda b: loss_parallel(b.plain, Tensor(np.arange(8)))),
    ("an unknown reduction of the loss", LayoutError, lambda b: loss_parallel(b.x, Tensor(np.arange(8)), reduction="max")),
    ("labels of another shape", LayoutError, lambda b: loss_parallel(b.x, Tensor(np.arange(3)))),
    # -- debug
    ("dims that are not there", LayoutError, lambda b: visualize_sharding(b.x, dims=(0, 7), show=False)),
    ("a picture of nothing", LayoutError, lambda b: visualize_sharding(3)),
    ("an explanation of nothing", md.errors.DTensorError, lambda b: explain(3)),
]


def untold(name: str, e: md.errors.DTensorError) -> list[str]:
    """What a message lacks of four parts: most have an attempt and one of the others, on communication all."""
    more = e.operands or e.rule or e.fix or any(words in e.attempt for words in ("must", "but got", " is "))
    enough = not isinstance(e, ImplicitCommError) or (e.operands and e.rule and e.fix)
    return [] if e.attempt.startswith("For '") and more and enough else [f"{name}: without its four parts: {e}"]


def every_refusal_is_the_same_everywhere_and_free(world):
    texts, problems = [], []
    for name, error, call, *then in TABLE:
        bench = Bench()
        with counted() as count:
            try:
                call(bench)
            except Exception as e:  # noqa: BLE001  the table is checked as a whole
                if isinstance(e, md.errors.DTensorError):
                    problems += untold(name, e)
                if not isinstance(e, error):
                    problems.append(f"{name}: {type(e).__name__} instead of {error.__name__}: {e}")
                texts.append(f"{name}: {type(e).__name__}: {e}")
            else:
                problems.append(f"{name}: not refused")
        if count:
            problems.append(f"{name}: communicated {dict(count)}")
        try:
            (then[0] if then else Bench.usable)(bench)
        except Exception as e:  # noqa: BLE001
            problems.append(f"{name}: afterwards {type(e).__name__}: {e}")
    assert not problems, "\n".join(problems)
    assert len(texts) == len(TABLE) > 100
    everyone = md.comm.group(tuple(range(world.size))).all_gather_object(texts)
    unlike = ["\n".join(told) for told in zip(*everyone) if len(set(told)) > 1]
    assert not unlike, "\n\n".join(unlike)


def ranks_that_disagree_are_all_told(world, line):
    """The check across ranks is the one refusal that communicates: it is what was asked for."""
    for local, placements in ((data(1, 3 if world.rank == 0 else 2, 4), [S(0)]), (data(1, 2, 4 + (world.rank == 2)), [S(0)]),
                              (data(1, 2, 4).astype("float16" if world.rank == 1 else "float32"), [R])):
        assert "do not make one tensor" in same_on_all_ranks(world, refusal(lambda: DTensor.from_local(local, line, placements, run_check=True), LayoutError))
    equal(DTensor.from_local(data(1, 2, 4), line, [S(0)], run_check=True), np.concatenate([data(1, 2, 4).asnumpy()] * 4))


def styles_after_replicate_are_refused_with_the_order(world):
    net = replicate(nn.Dense(6, 4), mesh=mesh_2d()["dp"])
    before = net.weight
    told = refused_alike(world, lambda: md.parallelize_module(net, mesh_2d()["tp"], ColwiseParallel()), LayoutError)
    assert net.weight is before and "parallelize_module(...) first, then replicate" in told
    assert "either order" not in replicate.__doc__ and "after tensor-parallel styles" in replicate.__doc__


def raw_errors_are_gone(world, line):
    a = data(1, 4, 3)
    x = placed(a, line, S(0))
    equal(x.transpose(None), a.transpose(None))
    equal(x.transpose(), a.transpose())
    for fn in (lambda: x.tile(placed(Tensor([1, 2]), line, R)), lambda: x.reshape(placed(Tensor([3, 4]), line, R))):
        assert "numbers are needed" in refusal(fn)
    assert x.nelement().__class__ is int and x.nelement() == 12
    assert "copy_" in refusal(lambda: x.set_(x * 2))
    clipped = ops.clip_by_global_norm(x, 0.5)
    equal(clipped, ops.clip_by_global_norm(a, 0.5))
    assert isinstance(ops.clip_by_global_norm([x], 0.5), tuple)
    square = placed(data(2, 4, 4), line, S(0))
    for t in (square, square.redistribute(placements=[R])):
        g = ms.grad(lambda u: u.trace(dtype=ms.float64))(t)
        assert g.to_local().dtype == ms.float32 == g.dtype, g
        equal(g, np.eye(4))


def a_view_of_a_local_output_is_explained(world, line):
    x = data(1, 5, 6)

    def net(heads, local):
        plan = {"up": md.ColwiseParallel(use_local_output=local), "down": md.RowwiseParallel(use_local_output=False)}
        return md.parallelize_module(Built(  # speaks of all heads, by number or by what is left
            lambda c, x: c.down(mint.reshape(c.up(x), (5, heads, 2)).reshape(5, -1)), up=nn.Dense(6, 8),
            down=nn.Dense(8, 6)), line, plan)
    text = refusal(lambda: net(4, True)(x), LayoutError)
    assert "use_local_output=False" in text and "Built" in text, text
    assert net(4, False)(x).shape == net(-1, True)(x).shape == copy.deepcopy(net(1, True))(x).shape == (5, 6)


def local_outputs_that_meet_global_sizes_are_explained(world, line):
    x = data(1, 5, 6)
    table = distribute_tensor(data(2, 8), line, [R])
    eight = data(3, 8, 3)

    def net(what, local=True):
        return md.parallelize_module(Built(lambda c, x: what(c.up(x)), up=nn.Dense(6, 8)), line,
                                     {"up": md.ColwiseParallel(use_local_output=local)})
    for what in (lambda y: mint.matmul(y, eight), lambda y: ops.split(y, [4, 4], 1), lambda y: ops.broadcast_to(y, (5, 8)),
                 lambda y: y + eight[:, 0], lambda y: nn.LayerNorm((8,))(y)):
        text = refusal(lambda what=what: net(what)(x), LayoutError)
        assert "use_local_output=False" in text and "Built" in text, text
    for what in (lambda y: y * table, lambda y: (y * 2.0) * table):  # also of what was computed from it
        text = refusal(lambda what=what: net(what)(x), MixedOperandError)
        assert text.index("use_local_output=False") < text.index("distribute_tensor") and text.count("use_local") == 1, text
        assert net(what, False)(x).shape == (5, 8)

    def own_mistake(y):
        raise ValueError("of the user's")
    assert refusal(lambda: net(own_mistake)(x), ValueError) == "of the user's"


def sync_batch_norm_is_refused_with_what_to_use(world):
    mesh = mesh_1d(name="dp")
    x = data(1, 8, 3, 2, 2)
    distribute_tensor(Tensor(x), mesh, [S(0)])  # from the first DTensor on
    with counted({}):
        text = refusal(lambda: nn.SyncBatchNorm(3), ConfigError)
    assert "nn.BatchNorm2d" in text and "global batch" in text
    one, all_ = nn.BatchNorm2d(3).set_train(), distribute_module(nn.BatchNorm2d(3), mesh).set_train()
    check_against_one_device(lambda t: (one(t) if not isinstance(t, DTensor) else all_(t)) ** 3, [x], [[S(0)]], mesh)
    equal(all_.moving_variance, one.moving_variance)
