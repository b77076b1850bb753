# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings: each vector of the last dim is turned by itself, so all other dims may be sharded."""
from __future__ import annotations

from ...errors import OpRuleError
from .spec import Call, OpSpec, P, S

NAMES = """
rotary:RotaryPositionEmbedding:input cos sin mode
apply_rotary:ApplyRotaryPosEmb:query key cos sin position_ids cos_format
"""


def rotary(call: Call) -> OpSpec:
    """`rotary_position_embedding(x, cos, sin)`: all dims but the last pointwise; cos and sin broadcast."""
    x = call.args["input"]
    mode = int(call.get("mode", 0))
    if not 0 <= mode <= 3 or x.shape[-1] % (4 if mode == 2 else 2):
        raise OpRuleError(f"For 'rotary_position_embedding', mode {mode} does not turn vectors of {x.shape[-1]}.", "",
                          "Mode 0 turns halves, 1 neighbours, 2 halves of halves, 3 sorts neighbours into halves.",
                          "use mode 0 with an even head dim")
    cases = []
    for d in range(x.ndim - 1):
        split = (o for o in call.operands if o is x or o.shape[d] == x.shape[d] != 1)
        cases.append(call.case({o.index: S(d) for o in split}, S(d)))
    cases.append(call.case({x.index: P}, P))
    return OpSpec((x.shape,), tuple(cases), dtypes=(x.dtype,))


def refused(call: Call) -> OpSpec:
    """The kernel for inference, which reads its angles at positions."""
    raise OpRuleError("For 'ApplyRotaryPosEmb', there is no rule for DTensors.", "",
                      "It is a serving engine's kernel; what its formats of angles mean is not documented.",
                      ("ops.rotary_position_embedding(x, cos, sin, 0) of queries and of keys, with their angles looked up",
                       "run it on shards with local_map"))


RULES = {"rotary": rotary, "apply_rotary": refused}
