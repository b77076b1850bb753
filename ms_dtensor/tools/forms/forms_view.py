# SPDX-License-Identifier: Apache-2.0
"""Views, rearrangements, joins and repeats in every public spelling."""
from __future__ import annotations

import mindspore as ms
from mindspore import mint, nn, ops

from ...errors import OpRuleError
from .form import Form

F = mint.nn.functional


def of(*shape, dtype="float32"):
    """Arguments: one array of this shape."""
    def make(rng):
        x = rng.normal(size=shape)
        return ((x > 0) if dtype == "bool" else (10 * x).astype(dtype) if "int" in dtype else x.astype(dtype),)
    return make


def several(*shapes, dtype="float32"):
    """Arguments: one array per shape."""
    return lambda rng: tuple(of(*s, dtype=dtype)(rng)[0] for s in shapes)


MATRIX = (of(4, 6), of(5, 3), of(1, 4), of(0, 3), of(4, 6, dtype="int32"))
TRIANGLES = (of(4, 6), of(5, 3), of(1, 4), of(4, 4, dtype="int32"))  # MindSpore refuses tril without elements on CPU
CUBE = (of(2, 3, 4), of(4, 6, 2), of(3, 1, 2), of(2, 3, 4, dtype="float16"))
ANY = (of(4, 6), of(2, 3, 4), of(5), of(0, 2), of(4, 2, dtype="bool"))
ONES = (of(1, 4), of(1, 5, 1), of(1, 1))


def _reshape(fn):
    return [Form(f"{fn[0]}", lambda x: fn[1](x, (2, 12)), (of(4, 6), of(2, 3, 4), of(6, 4))),
            Form(f"{fn[0]} merge", lambda x: fn[1](x, (-1, x.shape[-1])), (of(4, 6, 2), of(3, 2, 5), of(4, 1, 3))),
            Form(f"{fn[0]} split", lambda x: fn[1](x, (2, -1, 3)), (of(4, 6), of(6, 2), of(2, 9)))]


FORMS = [
    *_reshape(("mint.reshape", mint.reshape)), *_reshape(("ops.reshape", ops.reshape)),
    *_reshape(("x.reshape(shape)", lambda x, s: x.reshape(s))), *_reshape(("x.view(shape)", lambda x, s: x.view(s))),
    *_reshape(("x.reshape(*shape)", lambda x, s: x.reshape(*s))), *_reshape(("x.view(*shape)", lambda x, s: x.view(*s))),
    *_reshape(("ops.Reshape", lambda x, s: ops.Reshape()(x, s))),
    Form("mint.reshape(input=, shape=)", lambda x: mint.reshape(input=x, shape=(-1,)), ANY),
    Form("x.reshape(-1)", lambda x: x.reshape(-1), ANY), Form("x.view(-1)", lambda x: x.view(-1), ANY),
    Form("x.reshape same", lambda x: x.reshape(x.shape), ANY),
    Form("x.view_as", lambda x, y: x.view_as(y), (several((4, 6), (2, 12)), several((2, 3, 4), (6, 4)))),
    Form("x.reshape_as", lambda x, y: x.reshape_as(y), (several((4, 6), (2, 12)), several((2, 3, 4), (6, 4)))),
    Form("x.ravel()", lambda x: x.ravel(), ANY),
    Form("mint.flatten", mint.flatten, ANY), Form("mint.flatten(1)", lambda x: mint.flatten(x, 1), CUBE),
    Form("mint.flatten(0, 1)", lambda x: mint.flatten(x, start_dim=0, end_dim=1), CUBE),
    Form("ops.flatten", ops.flatten, MATRIX[:2] + CUBE), Form("ops.flatten(start_dim)", lambda x: ops.flatten(x, start_dim=1), CUBE),
    Form("x.flatten()", lambda x: x.flatten(), ANY), Form("x.flatten(0, 1)", lambda x: x.flatten(0, 1), CUBE),
    Form("x.flatten(-2)", lambda x: x.flatten(start_dim=-2), CUBE), Form('x.flatten("C")', lambda x: x.flatten("C"), ANY),
    Form('x.flatten("F")', lambda x: x.flatten("F"), of(4, 6), raises=OpRuleError),
    Form("nn.Flatten", lambda x: nn.Flatten()(x), CUBE), Form("mint.nn.Flatten", lambda x: mint.nn.Flatten()(x), CUBE),
    Form("nn.Unflatten", lambda x: nn.Unflatten(1, (2, -1))(x), (of(3, 4), of(4, 6))),
    # -- permutations
    Form("mint.permute", lambda x: mint.permute(x, (2, 0, 1)), CUBE), Form("ops.permute", lambda x: ops.permute(x, (2, 0, 1)), CUBE),
    Form("x.permute(*dims)", lambda x: x.permute(2, 0, 1), CUBE), Form("x.permute(dims)", lambda x: x.permute((1, -1, 0)), CUBE),
    Form("mint.transpose", lambda x: mint.transpose(x, 0, -1), CUBE), Form("x.transpose(0, 1)", lambda x: x.transpose(0, 1), MATRIX),
    Form("x.transpose(perm)", lambda x: x.transpose((1, 0, 2)), CUBE), Form("ops.transpose", lambda x: ops.transpose(x, (1, 0)), MATRIX),
    Form("ops.Transpose", lambda x: ops.Transpose()(x, (1, 0)), MATRIX),
    Form("x.T", lambda x: x.T, MATRIX + CUBE[:1]), Form("x.mT", lambda x: x.mT, CUBE), Form("x.t()", lambda x: x.t(), MATRIX), Form("x.H", lambda x: x.H, MATRIX),
    Form("mint.t", mint.t, MATRIX), Form("ops.t", ops.t, MATRIX),
    Form("mint.swapaxes", lambda x: mint.swapaxes(x, 0, 2), CUBE), Form("ops.swapaxes", lambda x: ops.swapaxes(x, 0, 2), CUBE),
    Form("ops.swapdims", lambda x: ops.swapdims(x, 0, -1), CUBE), Form("x.swapaxes", lambda x: x.swapaxes(0, 2), CUBE),
    Form("x.swapdims", lambda x: x.swapdims(0, 2), CUBE),
    Form("ops.movedim", lambda x: ops.movedim(x, 0, 2), CUBE), Form("ops.moveaxis", lambda x: ops.moveaxis(x, 0, 2), CUBE),
    Form("x.movedim", lambda x: x.movedim(0, 2), CUBE), Form("x.moveaxis", lambda x: x.moveaxis(-1, 0), CUBE),
    # -- dims of size 1, broadcasting
    Form("mint.squeeze", lambda x: mint.squeeze(x, 0), ONES), Form("mint.squeeze(dims)", lambda x: mint.squeeze(x, (0, -1)), (of(1, 5, 1), of(1, 1))),
    Form("ops.squeeze", ops.squeeze, ONES + MATRIX[:1]), Form("ops.squeeze(axis)", lambda x: ops.squeeze(x, 0), ONES),
    Form("x.squeeze()", lambda x: x.squeeze(), ONES + CUBE[:1]), Form("x.squeeze(dim)", lambda x: x.squeeze(0), ONES),
    Form("ops.Squeeze", lambda x: ops.Squeeze(0)(x), ONES),
    Form("mint.unsqueeze", lambda x: mint.unsqueeze(x, 0), ANY), Form("ops.unsqueeze", lambda x: ops.unsqueeze(x, -1), ANY),
    Form("x.unsqueeze(-1)", lambda x: x.unsqueeze(-1), ANY), Form("x.unsqueeze(1)", lambda x: x.unsqueeze(1), ANY),
    Form("ops.expand_dims", lambda x: ops.expand_dims(x, 0), ANY), Form("x.expand_dims", lambda x: x.expand_dims(1), ANY),
    Form("ops.ExpandDims", lambda x: ops.ExpandDims()(x, 0), ANY),
    Form("ops.atleast_2d", ops.atleast_2d, (of(4), of(1))), Form("ops.atleast_1d", ops.atleast_1d, (of(),)),
    Form("mint.broadcast_to", lambda x: mint.broadcast_to(x, (4, *x.shape)), MATRIX[:3]),
    Form("ops.broadcast_to", lambda x: ops.broadcast_to(x, (4, *x.shape)), MATRIX[:3]),
    Form("x.broadcast_to", lambda x: x.broadcast_to((4, 4)), (of(1, 4), of(4), of(4, 1))),
    Form("x.expand(*shape)", lambda x: x.expand(4, -1), (of(1, 4), of(1, 5))), Form("x.expand(shape)", lambda x: x.expand((3, 4, 5)), (of(1, 5), of(4, 1))),
    Form("x.expand_as", lambda x, y: x.expand_as(y), (several((1, 4), (3, 4)), several((5, 1), (2, 5, 4)))),
    Form("ops.BroadcastTo", lambda x: ops.BroadcastTo((4, 4))(x), (of(1, 4), of(4, 1))),
    # -- repeats
    Form("mint.tile", lambda x: mint.tile(x, (2, 1)), MATRIX[:3]), Form("ops.tile", lambda x: ops.tile(x, (1, 2)), MATRIX[:3]),
    Form("x.tile(dims)", lambda x: x.tile((2, 1, 1)), MATRIX[:3]), Form("x.tile(*dims)", lambda x: x.tile(2, 1), MATRIX[:3]),
    Form("ops.Tile", lambda x: ops.Tile()(x, (2, 1)), MATRIX[:3]),
    Form("x.repeat(*dims)", lambda x: x.repeat(2, 1), MATRIX[:3]), Form("x.repeat(dims)", lambda x: x.repeat((2, 1, 1)), MATRIX[:3]),
    Form("mint.repeat_interleave", lambda x: mint.repeat_interleave(x, 2, 0), MATRIX[:3]),
    Form("mint.repeat_interleave()", lambda x: mint.repeat_interleave(x, 2), MATRIX[:3]),
    Form("ops.repeat_interleave", lambda x: ops.repeat_interleave(x, 3, axis=1), MATRIX[:3]),
    Form("ops.repeat_elements", lambda x: ops.repeat_elements(x, 2, 0), MATRIX[:3]),
    Form("x.repeat_interleave(dim)", lambda x: x.repeat_interleave(2, 0), MATRIX[:3]),
    Form("x.repeat_interleave(dim=)", lambda x: x.repeat_interleave(repeats=2, dim=1), MATRIX[:3]),
    Form("x.repeat_interleave()", lambda x: x.repeat_interleave(2), MATRIX[:3]),
    # -- splitting
    Form("mint.split", lambda x: mint.split(x, 2), MATRIX[:2]), Form("mint.split(sizes)", lambda x: mint.split(x, [1, 3], dim=-1), (of(3, 4), of(4, 4))),
    Form("ops.split", lambda x: ops.split(x, 2), (of(4, 6), of(6, 3))), Form("ops.split(sizes)", lambda x: ops.split(x, [1, 3], -1), (of(3, 4), of(4, 4))),
    Form("x.split", lambda x: x.split(2), MATRIX[:2]), Form("x.split(dim)", lambda x: x.split(2, -1), MATRIX[:2]),
    Form("x.split(sizes)", lambda x: x.split([1, 3], 0), (of(4, 3), of(4, 4))), Form("ops.Split", lambda x: ops.Split(0, 2)(x), (of(4, 6),)),
    Form("mint.chunk", lambda x: mint.chunk(x, 2), MATRIX[:2]), Form("mint.chunk(dim)", lambda x: mint.chunk(x, 3, dim=-1), MATRIX[:2]),
    Form("ops.chunk", lambda x: ops.chunk(x, 2), MATRIX[:2]), Form("x.chunk", lambda x: x.chunk(2, -1), MATRIX[:2]),
    Form("ops.tensor_split", lambda x: ops.tensor_split(x, 2), MATRIX[:1]), Form("ops.tensor_split(uneven)", lambda x: ops.tensor_split(x, 3, 0), MATRIX[:2]),
    Form("ops.tensor_split(at)", lambda x: ops.tensor_split(x, (1, 3), 1), (of(3, 4), of(2, 5))), Form("x.tensor_split", lambda x: x.tensor_split(2), MATRIX[:1]),
    Form("ops.hsplit", lambda x: ops.hsplit(x, 2), MATRIX[:1]), Form("ops.vsplit", lambda x: ops.vsplit(x, 2), MATRIX[:1]),
    Form("ops.dsplit", lambda x: ops.dsplit(x, 2), (of(2, 3, 4),)), Form("x.hsplit", lambda x: x.hsplit(2), MATRIX[:1]), Form("x.vsplit", lambda x: x.vsplit(2), MATRIX[:1]),
    Form("mint.unbind", mint.unbind, MATRIX[:3]), Form("mint.unbind(dim)", lambda x: mint.unbind(x, -1), MATRIX[:3]),
    Form("ops.unbind", lambda x: ops.unbind(x, 1), MATRIX[:3]), Form("ops.unstack", lambda x: ops.unstack(x, axis=-1), MATRIX[:3]),
    Form("ops.Unstack", lambda x: ops.Unstack(1)(x), MATRIX[:3]), Form("x.unbind", lambda x: x.unbind(1), MATRIX[:3]),
    # -- joining
    Form("mint.cat", lambda x, y: mint.cat([x, y]), (several((4, 2), (3, 2)), several((0, 2), (4, 2)))),
    Form("mint.cat(dim)", lambda x, y: mint.cat((x, y), dim=-1), (several((4, 2), (4, 3)), several((3, 1), (3, 2)))),
    Form("mint.cat(tensors=)", lambda x, y: mint.cat(tensors=(x, y), dim=0), several((4, 2), (3, 2))),
    Form("mint.concat", lambda x, y: mint.concat([x, y], 0), several((4, 2), (3, 2))),
    Form("ops.cat", lambda x, y: ops.cat((x, y), axis=-1), several((4, 2), (4, 3))), Form("ops.concat", lambda x, y: ops.concat((x, y)), several((4, 2), (3, 2))),
    Form("ops.Concat", lambda x, y: ops.Concat(1)((x, y)), several((4, 2), (4, 3))),
    Form("mint.hstack", lambda x, y: mint.hstack((x, y)), several((4, 2), (4, 3))),
    Form("ops.hstack", lambda x, y: ops.hstack((x, y)), several((4, 2), (4, 3))), Form("ops.vstack", lambda x, y: ops.vstack((x, y)), several((4, 2), (3, 2))),
    Form("ops.dstack", lambda x, y: ops.dstack((x, y)), several((4, 2), (4, 2))), Form("ops.row_stack", lambda x, y: ops.row_stack((x, y)), several((4, 2), (3, 2))),
    Form("ops.column_stack", lambda x, y: ops.column_stack((x, y)), (several((4, 2), (4, 3)), several((4,), (4,)))),
    Form("mint.stack", lambda x, y: mint.stack([x, y]), (several((4, 2), (4, 2)), several((3,), (3,)))),
    Form("mint.stack(dim)", lambda x, y: mint.stack((x, y), dim=1), several((4, 2), (4, 2))),
    Form("ops.stack", lambda x, y: ops.stack((x, y), 1), (several((4, 2), (4, 2)), several((3, 1), (3, 1)))),
    Form("ops.stack(list)", lambda x, y: ops.stack([x, y]), several((4, 2), (4, 2))),
    Form("ops.Stack", lambda x, y: ops.Stack(-1)((x, y)), several((4, 2), (4, 2))),
    Form("ops.addn", lambda x, y: ops.addn((x, y)), several((4, 2), (4, 2))), Form("ops.AddN", lambda x, y: ops.AddN()([x, y]), several((4, 2), (4, 2))),
    Form("mint.meshgrid(ij)", lambda x, y: mint.meshgrid(x, y, indexing="ij"), several((4,), (3,))),
    Form("mint.meshgrid(xy)", lambda x, y: mint.meshgrid(x, y, indexing="xy"), several((4,), (3,))),
    Form("ops.meshgrid", lambda x, y: ops.meshgrid(x, y), several((4,), (3,))), Form("ops.Meshgrid", lambda x, y: ops.Meshgrid()((x, y)), several((4,), (3,))),
    # -- pieces
    Form("mint.narrow", lambda x: mint.narrow(x, 1, 1, 2), MATRIX[:2] + CUBE[:1]), Form("ops.narrow", lambda x: ops.narrow(x, 0, 0, 1), MATRIX[:3]),
    Form("x.narrow", lambda x: x.narrow(-1, 1, 2), MATRIX[:2]), Form("mint.select", lambda x: mint.select(x, 0, 1), MATRIX[:2] + CUBE[:1]),
    Form("x.select", lambda x: x.select(1, -1), MATRIX[:2]), Form("ops.slice", lambda x: ops.slice(x, (0, 1), (2, 2)), MATRIX[:2]),
    Form("ops.strided_slice", lambda x: ops.strided_slice(x, (0, 1), (4, 3), (2, 1)), MATRIX[:2]),
    Form("ops.Slice", lambda x: ops.Slice()(x, (1, 0), (2, 2)), MATRIX[:2]), Form("ops.StridedSlice", lambda x: ops.StridedSlice()(x, (0, 0), (4, 3), (1, 2)), MATRIX[:2]),
    Form("mint.flip", lambda x: mint.flip(x, (0,)), MATRIX), Form("ops.flip", lambda x: ops.flip(x, (0, -1)), MATRIX[:3]), Form("x.flip", lambda x: x.flip((1,)), MATRIX[:3]),
    Form("ops.fliplr", ops.fliplr, MATRIX[:2]), Form("ops.flipud", ops.flipud, MATRIX[:2]), Form("x.fliplr", lambda x: x.fliplr(), MATRIX[:2]), Form("x.flipud", lambda x: x.flipud(), MATRIX[:2]),
    Form("mint.roll", lambda x: mint.roll(x, 1, 0), MATRIX[:3]), Form("mint.roll()", lambda x: mint.roll(x, 3), MATRIX[:3]),
    Form("ops.roll", lambda x: ops.roll(x, -1, 1), MATRIX[:3]), Form("x.roll", lambda x: x.roll((1, 2), (0, 1)), MATRIX[:3]), Form("x.roll(shifts=)", lambda x: x.roll(shifts=1, dims=0), MATRIX[:3]),
    Form("ops.rot90", lambda x: ops.rot90(x, 1, (0, 1)), MATRIX[:2]), Form("x.rot90", lambda x: x.rot90(2, (0, 1)), MATRIX[:2]),
    # -- padding
    Form("ops.pad", lambda x: ops.pad(x, (1, 1)), MATRIX[:3]), Form("ops.pad(value)", lambda x: ops.pad(x, (1, 0, 2, 0), value=3.0), MATRIX[:3]),
    Form("ops.pad(reflect)", lambda x: ops.pad(x, (1, 1), mode="reflect"), CUBE[:2]), Form("ops.pad(replicate)", lambda x: ops.pad(x, (1, 1), mode="replicate"), CUBE[:2]),
    Form("ops.pad(circular)", lambda x: ops.pad(x, (1, 1), mode="circular"), CUBE[:2]),
    Form("F.pad", lambda x: F.pad(x, (1, 1)), MATRIX[:3]), Form("F.pad(value)", lambda x: F.pad(x, (1, 0, 2, 0), value=3.0), MATRIX[:3]),
    Form("F.pad(crop)", lambda x: F.pad(x, (-1, 1)), MATRIX[:2]),
    Form("F.pad(reflect)", lambda x: F.pad(x, (1, 1), mode="reflect"), CUBE[:2]), Form("F.pad(replicate)", lambda x: F.pad(x, (1, 1), mode="replicate"), CUBE[:2]),
    Form("nn.ConstantPad1d", lambda x: nn.ConstantPad1d(1, 0.5)(x), CUBE[:2]), Form("nn.ConstantPad2d", lambda x: nn.ConstantPad2d(1, 0.0)(x), CUBE[:2]),
    Form("nn.ZeroPad2d", lambda x: nn.ZeroPad2d(1)(x), CUBE[:2]), Form("nn.ReplicationPad1d", lambda x: nn.ReplicationPad1d(1)(x), CUBE[:2]),
    Form("nn.Pad", lambda x: nn.Pad(((1, 1), (0, 0)))(x), MATRIX[:2]), Form("ops.Pad", lambda x: ops.Pad(((0, 0), (2, 1)))(x), MATRIX[:2]),
    Form("mint.nn.ConstantPad1d", lambda x: mint.nn.ConstantPad1d(1, 0.0)(x), CUBE[:2]), Form("mint.nn.ZeroPad1d", lambda x: mint.nn.ZeroPad1d(1)(x), CUBE[:2]),
    Form("mint.nn.ZeroPad2d", lambda x: mint.nn.ZeroPad2d(1)(x), CUBE[:2]), Form("mint.nn.ReflectionPad1d", lambda x: mint.nn.ReflectionPad1d(1)(x), CUBE[:2]),
    Form("mint.nn.ReplicationPad1d", lambda x: mint.nn.ReplicationPad1d(1)(x), CUBE[:2]),
    # -- diagonals, triangles
    Form("mint.diag", mint.diag, (of(4), of(4, 4), of(3, 5))), Form("mint.diag(k)", lambda x: mint.diag(x, 1), (of(4), of(4, 4), of(5, 3))),
    Form("x.diag()", lambda x: x.diag(), (of(4), of(3))), Form("x.diag() of a matrix", lambda x: x.diag(), of(4, 4), raises=OpRuleError),
    Form("ops.diag", ops.diag, (of(4), of(3))), Form("ops.Diag", lambda x: ops.Diag()(x), (of(4),)), Form("ops.diagflat", ops.diagflat, (of(4), of(2, 2))),
    Form("x.diagonal()", lambda x: x.diagonal(), MATRIX[:2] + CUBE[:1]), Form("x.diagonal(k)", lambda x: x.diagonal(1), MATRIX[:2]),
    Form("x.diagonal(dims)", lambda x: x.diagonal(0, 1, 2), CUBE[:2]), Form("ops.diagonal", lambda x: ops.diagonal(x, -1), MATRIX[:2]),
    Form("mint.trace", mint.trace, MATRIX[:2]), Form("ops.trace", ops.trace, MATRIX[:2]), Form("x.trace()", lambda x: x.trace(), MATRIX[:2]),
    Form("mint.tril", mint.tril, TRIANGLES + CUBE[:2]), Form("mint.tril(k)", lambda x: mint.tril(x, 1), TRIANGLES), Form("mint.triu", mint.triu, MATRIX + CUBE[:2]),
    Form("mint.triu(k)", lambda x: mint.triu(x, -1), MATRIX), Form("ops.tril", ops.tril, TRIANGLES), Form("ops.tril(k)", lambda x: ops.tril(x, -1), TRIANGLES),
    Form("ops.triu", lambda x: ops.triu(x, 1), MATRIX), Form("x.tril(k)", lambda x: x.tril(1), TRIANGLES), Form("x.triu(k)", lambda x: x.triu(2), MATRIX),
    Form("ops.Tril", lambda x: ops.Tril(1)(x), TRIANGLES), Form("ops.Triu", lambda x: ops.Triu()(x), MATRIX),
    # -- copies
    Form("mint.clone", mint.clone, ANY), Form("x.clone()", lambda x: x.clone(), ANY), Form("x.copy()", lambda x: x.copy(), (*MATRIX[:3], MATRIX[4], of(3, 2, dtype="int64"), of(3, 2, dtype="bool"))),
    Form("ops.deepcopy", ops.deepcopy, MATRIX[:3]), Form("ops.stop_gradient", ops.stop_gradient, MATRIX[:3]), Form("x.contiguous()", lambda x: x.contiguous() * 1, MATRIX[:3]),
]
FORMS += [Form("F.pad(circular)", lambda x: F.pad(x, (1, 1), mode="circular"), of(2, 3, 4), raises=OpRuleError, note="the padding arrives as a tensor"),
          Form("nn.ReflectionPad1d", lambda x: nn.ReflectionPad1d(1)(x), of(2, 3, 4), raises=OpRuleError, note="the padding arrives as a tensor"),
          Form("x.repeat_interleave(counts)", lambda x: x.repeat_interleave(ms.Tensor([1, 2, 1, 2]), 0), of(4, 3), raises=OpRuleError)]
