# SPDX-License-Identifier: Apache-2.0
"""Reductions, norms, cumulative ops, sorting, in every public form."""
from __future__ import annotations

from mindspore import mint, ops

from ...errors import OpRuleError
from .form import Form
from .samples import F, arrays, forms

X = (arrays((4, 3)), arrays((5, 2, 3)), arrays((6,)), arrays((1, 4)))
XI = (*X, arrays((4, 3), dtype="int32"), arrays((3, 2), dtype="float16"))
POS = tuple(arrays(s, low=0.5, high=1.5) for s in ((4, 3), (5, 2), (3,)))
XB = (arrays((4, 3), dtype="bool"), arrays((5, 2), dtype="bool"), arrays((6,), dtype="bool"))
D2 = (arrays((4, 3)), arrays((5, 2, 3)), arrays((1, 4)))
D2I = (*D2, arrays((4, 3), dtype="int32"))


def dims(prefix, fn, args=D2I, dim="dim", keep="keepdim") -> list[Form]:
    """Over everything, over one dim, over a negative one kept, over several."""
    return [Form(f"{prefix}()", fn, XI if args is D2I else args),
            Form(f"{prefix}({dim})", lambda x: fn(x, **{dim: 0}), args),
            Form(f"{prefix}({dim}, {keep})", lambda x: fn(x, **{dim: -1, keep: True}), args),
            Form(f"{prefix}({dim}s)", lambda x: fn(x, **{dim: (0, -1)}), args)]


_SUMS = [
    *dims("mint.sum", mint.sum), *dims("ops.sum", ops.sum), *dims("x.sum", lambda x, **k: x.sum(**k)),
    *dims("x.sum", lambda x, **k: x.sum(**k), dim="axis", keep="keepdims")[1:],
    *dims("mint.mean", mint.mean, D2), *dims("ops.mean", ops.mean, D2, "axis", "keep_dims"),
    *dims("x.mean", lambda x, **k: x.mean(**k), D2), *dims("x.mean", lambda x, **k: x.mean(**k), D2, "axis", "keep_dims")[1:],
    *forms(D2I, {"mint.sum(dtype)": lambda x: mint.sum(x, 0, dtype=x.dtype), "ops.ReduceSum": lambda x: ops.ReduceSum()(x, 0),
                 "ops.ReduceSum(keep_dims)": lambda x: ops.ReduceSum(keep_dims=True)(x, (0, 1)), "x.sum(0)": lambda x: x.sum(0)}),
    *forms(D2, {"ops.ReduceMean": lambda x: ops.ReduceMean()(x, -1), "x.mean(-1)": lambda x: x.mean(-1)}),
    *forms(POS, {"mint.prod()": mint.prod, "mint.prod(dim)": lambda x: mint.prod(x, 0), "ops.prod(axis)": lambda x: ops.prod(x, 0),
                 "mint.prod(dim, keepdim)": lambda x: mint.prod(x, -1, True), "x.prod()": lambda x: x.prod(),
                 "x.prod(axis)": lambda x: x.prod(0), "ops.ReduceProd": lambda x: ops.ReduceProd()(x, 0)}),
    *forms(D2I, {"mint.count_nonzero": mint.count_nonzero, "mint.count_nonzero(dim)": lambda x: mint.count_nonzero(x, 0),
                 "x.count_nonzero()": lambda x: x.count_nonzero(), "x.count_nonzero(dim)": lambda x: x.count_nonzero(dim=-1)}),
    *forms(D2, {"mint.nansum": mint.nansum, "mint.nansum(dim)": lambda x: mint.nansum(x, 0), "ops.nansum": ops.nansum,
                "ops.nansum(axis)": lambda x: ops.nansum(x, 0), "ops.count_nonzero": ops.count_nonzero,
                "ops.count_nonzero(axis)": lambda x: ops.count_nonzero(x, 0), "x.nansum": lambda x: x.nansum(0),
                "ops.nanmean": lambda x: ops.nanmean(x, 0)}),
]

_EXTREMES = [
    *[f for name in ("max", "min") for m, prefix in ((mint, "mint"), (ops, "ops")) for f in forms(X, {
        f"{prefix}.{name}()": getattr(m, name), f"{prefix}.{name}(dim)": lambda x, m=m, name=name: getattr(m, name)(x, 0),
        f"{prefix}.{name}(-1, True)": lambda x, m=m, name=name: getattr(m, name)(x, -1, True)})],
    *[f for name in ("max", "min") for f in forms(X, {
        f"x.{name}()": lambda x, name=name: getattr(x, name)(), f"x.{name}(dim)": lambda x, name=name: getattr(x, name)(0),
        f"x.{name}(axis)": lambda x, name=name: getattr(x, name)(axis=-1),
        f"ops.Reduce{name.title()}": lambda x, name=name: getattr(ops, f"Reduce{name.title()}")()(x, 0),
        f"ops.Arg{name.title()}WithValue": lambda x, name=name: getattr(ops, f"Arg{name.title()}WithValue")(0)(x),
        f"x.arg{name}_with_value": lambda x, name=name: getattr(x, f"arg{name}_with_value")(-1, True)})],
    *[f for name in ("amax", "amin") for f in (*dims(f"mint.{name}", getattr(mint, name), D2)[1:],
                                              *dims(f"ops.{name}", getattr(ops, name), D2, "axis", "keepdims")[1:],
                                              Form(f"x.{name}", lambda x, name=name: getattr(x, name)(0), D2))],
    Form("ops.aminmax", lambda x: ops.aminmax(x, axis=0), D2[:2]), Form("x.aminmax", lambda x: x.aminmax(axis=-1), D2[:2]),
    *[f for name in ("argmax", "argmin") for f in forms(X, {
        f"mint.{name}()": getattr(mint, name), f"mint.{name}(dim)": lambda x, name=name: getattr(mint, name)(x, 0),
        f"mint.{name}(dim, keepdim)": lambda x, name=name: getattr(mint, name)(x, -1, True),
        f"ops.{name}": lambda x, name=name: getattr(ops, name)(x, 0), f"x.{name}()": lambda x, name=name: getattr(x, name)(),
        f"x.{name}(dim)": lambda x, name=name: getattr(x, name)(-1)})],
    Form("ops.Argmax", lambda x: ops.Argmax()(x), X), Form("ops.Argmin", lambda x: ops.Argmin()(x), X),
    *[f for name in ("all", "any") for f in forms(XB, {
        f"mint.{name}()": getattr(mint, name), f"mint.{name}(dim)": lambda x, name=name: getattr(mint, name)(x, 0),
        f"mint.{name}(dim, keepdim)": lambda x, name=name: getattr(mint, name)(x, -1, True),
        f"ops.{name}(axis)": lambda x, name=name: getattr(ops, name)(x, 0), f"x.{name}()": lambda x, name=name: getattr(x, name)(),
        f"x.{name}(axis)": lambda x, name=name: getattr(x, name)(0),
        f"ops.Reduce{name.title()}": lambda x, name=name: getattr(ops, f"Reduce{name.title()}")()(x)})],
    Form("x.ptp", lambda x: x.ptp(0), X[:2]),
]

_SPREAD = [
    *[f for name in ("var", "std") for f in (*dims(f"mint.{name}", getattr(mint, name), D2),
                                            *dims(f"x.{name}", lambda x, name=name, **k: getattr(x, name)(**k), D2,
                                                  "axis", "keepdims"),
                                            Form(f"mint.{name}(correction)", lambda x, name=name: getattr(mint, name)(
                                                x, 0, correction=0), D2),
                                            Form(f"ops.{name}", lambda x, name=name: getattr(ops, name)(x, 0), (arrays((4, 3)), arrays((5, 2)))),
                                            Form(f"x.{name}(ddof)", lambda x, name=name: getattr(x, name)(-1, 1), (arrays((4, 3)),)))],
    *[f for name in ("var_mean", "std_mean") for f in forms(D2, {
        f"mint.{name}": lambda x, name=name: getattr(mint, name)(x, 0),
        f"mint.{name}(keepdim)": lambda x, name=name: getattr(mint, name)(x, -1, keepdim=True)})],
    Form("ops.std_mean", lambda x: ops.std_mean(x, 0), (arrays((4, 3)),)),
    Form("ops.var_mean", lambda x: ops.var_mean(x, 0), (arrays((4, 3)),)),
    *[f for p in (2, 1, 3, float("inf")) for f in forms(X[:3], {
        f"mint.norm({p})": lambda x, p=p: mint.norm(x, p), f"mint.norm({p}, dim)": lambda x, p=p: mint.norm(x, p, 0),
        f"mint.linalg.vector_norm({p})": lambda x, p=p: mint.linalg.vector_norm(x, p, -1, True)})],
    *forms(X[:2], {"ops.norm": ops.norm, "ops.norm(dim)": lambda x: ops.norm(x, 2, 0), "ops.norm(1)": lambda x: ops.norm(x, 1, 0),
                   "x.norm()": lambda x: x.norm(), "x.norm(dim)": lambda x: x.norm(dim=-1), "ops.vector_norm": ops.vector_norm,
                   "F.normalize": F.normalize, "F.normalize(dim)": lambda x: F.normalize(x, dim=0),
                   "ops.LpNorm": lambda x: ops.LpNorm(0)(x), "ops.L2Normalize": lambda x: ops.L2Normalize(0)(x)}),
    Form("mint.linalg.norm", mint.linalg.norm, X[:1]), Form("mint.linalg.matrix_norm", mint.linalg.matrix_norm, X[:1]),
    Form("ops.dist", ops.dist, (arrays((4, 3), (4, 3)),)), Form("ops.cosine_similarity", ops.cosine_similarity, arrays((4, 3), (4, 3))),
    *forms(D2, {"mint.logsumexp": lambda x: mint.logsumexp(x, 0), "mint.logsumexp(keepdim)": lambda x: mint.logsumexp(x, -1, True),
                "ops.logsumexp": lambda x: ops.logsumexp(x, 0), "x.logsumexp": lambda x: x.logsumexp(-1)}),
    *forms(D2, {"mint.median": mint.median, "mint.median(dim)": lambda x: mint.median(x, 0), "ops.median": ops.median,
                "ops.median(axis)": lambda x: ops.median(x, 0), "x.median(dim)": lambda x: x.median(-1)}),
]

_RUNNING = [
    *[f for name in ("cumsum", "cumprod") for f in forms(X if name == "cumsum" else POS, {
        f"mint.{name}": lambda x, name=name: getattr(mint, name)(x, 0), f"ops.{name}": lambda x, name=name: getattr(ops, name)(x, -1),
        f"x.{name}": lambda x, name=name: getattr(x, name)(0)})],
    *forms(X, {"ops.logcumsumexp": lambda x: ops.logcumsumexp(x, 0), "ops.logcumsumexp(-1)": lambda x: ops.logcumsumexp(x, -1),
               "x.logcumsumexp": lambda x: x.logcumsumexp(0)}),
    Form("ops.CumSum", lambda x: ops.CumSum()(x, 0), X), Form("ops.CumSum(reverse)", lambda x: ops.CumSum(True, True)(x, 0), X[:2]),
    *[f for name in ("cummax", "cummin") for f in forms(X, {
        f"mint.{name}": lambda x, name=name: getattr(mint, name)(x, 0), f"ops.{name}": lambda x, name=name: getattr(ops, name)(x, -1),
        f"x.{name}": lambda x, name=name: getattr(x, name)(0)})],
]

_SORTED = [
    *forms(X, {
        "mint.sort": mint.sort, "mint.sort(dim)": lambda x: mint.sort(x, dim=0, descending=True), "ops.sort": ops.sort,
        "ops.sort(axis)": lambda x: ops.sort(x, 0, True), "x.sort()": lambda x: x.sort(), "x.sort(dim)": lambda x: x.sort(0, True),
        "ops.Sort": lambda x: ops.Sort()(x), "mint.argsort": mint.argsort, "mint.argsort(dim)": lambda x: mint.argsort(x, 0),
        "ops.argsort": ops.argsort, "x.argsort()": lambda x: x.argsort(), "x.argsort(dim)": lambda x: x.argsort(0, True),
        "mint.topk": lambda x: mint.topk(x, 2), "ops.topk": lambda x: ops.topk(x, 2), "x.topk": lambda x: x.topk(2),
        "ops.TopK": lambda x: ops.TopK()(x, 2), "ops.msort": ops.msort, "x.msort()": lambda x: x.msort()}),
    *forms((arrays((4, 3)), arrays((5, 2))), {
        "mint.topk(dim)": lambda x: mint.topk(x, 2, 0), "ops.topk(dim)": lambda x: ops.topk(x, 2, 0),
        "x.topk(smallest)": lambda x: x.topk(1, 0, False), "ops.topk(smallest)": lambda x: ops.topk(x, 1, -1, False)}),
]

_REFUSED = [Form(name, fn, arrays((4, 3)), raises=OpRuleError) for name, fn in {
    "mint.unique": mint.unique, "ops.unique": ops.unique, "mint.nonzero": mint.nonzero,
    "mint.masked_select": lambda x: mint.masked_select(x, x > 0)}.items()]

FORMS = [*_SUMS, *_EXTREMES, *_SPREAD, *_RUNNING, *_SORTED, *_REFUSED]
