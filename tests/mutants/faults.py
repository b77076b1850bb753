# SPDX-License-Identifier: Apache-2.0
"""The faults: what an Ascend would get wrong in silence, or refuse, or take too long over, and the test that must see it.

Those of `fully_shard` and of buckets change behaviour through public seams (a group's collectives, a tensor's storage, the
policy's dtypes), not the text of these parts: they hold whichever file does the work.
"""
from tests.mutants.plant import Fault

HCCL, DEVICE, CLIP, ADAMW = "ms_dtensor/comm/hccl.py", "ms_dtensor/comm/device.py", "ms_dtensor/optim/clip.py", \
    "ms_dtensor/optim/adamw.py"
ATTENTION, MOE = "ms_dtensor/ops/local/attention.py", "ms_dtensor/ops/local/moe.py"
EXPERTS, MODEL = "model_zoo/llama/experts.py", "model_zoo/llama/model.py"
BRANCH, EMULATOR, KERNELS = "tests/comm/test_device_branch.py", "tests/comm/test_emulator.py", "tests/ops/test_ascend_kernels.py"
RANKS, TWINS, ADAM = "tests/comm/cases_rehearsal.py", "tests/zoo/test_llama_twins.py", "tests/optim/test_adamw.py"
SUMS = "tests/sharding/cases_sums.py"
KEPT_ROWS = "tests/sharding/cases_kept_rows.py"
ROOMS, IN_ROOMS = "ms_dtensor/parallel/sharding/rooms.py", "tests/sharding/cases_rooms.py"
RING, RING_TEST = "ms_dtensor/parallel/ring.py", "tests/context/cases_attention.py -k gather_and_ring"
OVER_RANKS, EXPERT_GRID, EXPERTS_TEST = "ms_dtensor/parallel/experts.py", "tests/experts", "tests/experts"
# by its whole name, as it waits for a merge
CONTRACT = "tests/comm/test_ranks.py::test_contract_on_shm_mccl_and_the_doubles_of_hccl_and_nccl"


def wrapped(kind: str, name: str, body: str) -> str:
    """Lines that put a function around a method of a class of the module: `real` is what it was."""
    return f"def _fault(real):\n    def fault(self, *args, **kwargs):\n        {body}\n    return fault\n" \
        f"{kind}.{name} = _fault({kind}.{name})"


FAULTS = [
    # -- nine that were caught before ------------------------------------------------------------------------------------
    Fault("a handle is dropped", HCCL, f"{BRANCH} -k asynchronous", "group=comm, async_op=async_op)\n\n    def _reduce_scatter_flat",
          "group=comm, async_op=async_op) and None\n\n    def _reduce_scatter_flat"),
    Fault("the norm counts one layout", CLIP, f"{RANKS} -k tensor_parallel_training", "total = joined(mint.cat(values))",
          "total = joined(mint.cat(values[:1]))"),
    Fault("the order of a group is forgotten", DEVICE, CONTRACT, "(name, [group.index(r) for r in ranks])",
          "(name, list(range(len(ranks))))"),
    Fault("a bucket is never waited for", "ms_dtensor/comm/group.py", f"{RANKS} -k data_parallel_training", "",
          wrapped("Group", "all_reduce_", "work = real(self, *args, **kwargs); work._finish = None; return work")),
    Fault("clipping reads a number", CLIP, f"{RANKS} -k extra_wait", "    if max_norm != math.inf:\n        _scale_there",
          "    if float(norm) < max_norm:\n        return norm\n    if max_norm != math.inf:\n        _scale_there"),
    Fault("uneven sizes are swapped", HCCL, f"{RANKS} -k few_kernels", '"output_split_sizes": list(recvs), "input_split_sizes": list(sends)',
          '"output_split_sizes": list(sends), "input_split_sizes": list(recvs)'),
    Fault("all messages go in one batch", HCCL, f"{BRANCH} -k messages", "zip_longest(_batches(sends), _batches(recvs), fillvalue=())",
          "[(sends, recvs)]"),
    Fault("AdamW counts steps from one", ADAMW, f"{ADAM} -k one_kernel", "Tensor([self.step - 1], ms.float32)",
          "Tensor([self.step], ms.float32)"),
    Fault("AdamW's decay and eps are swapped", ADAMW, f"{ADAM} -k one_kernel",
          'float(self._option(i, "weight_decay")), float(eps)', 'float(eps), float(self._option(i, "weight_decay"))'),
    # -- twelve that were not --------------------------------------------------------------------------------------------
    Fault("a mean is over the world", DEVICE, f"{BRANCH} -k mean_is_over", "own = self.ops.scaled(wire, 1 / n) if",
          "own = self.ops.scaled(wire, 1 / self.size) if"),
    Fault("strided tensors are reduced in place", DEVICE, f"{BRANCH} -k not_in_order", " or not self.ops.lies_as_it_is(x):", ":"),
    Fault("every all-reduce synchronises", DEVICE, f"{BRANCH} -k host_wait", "",
          "import mindspore as _ms\n" + wrapped("DeviceBackend", "all_reduce",
                                                "_ms.runtime.synchronize(); return real(self, *args, **kwargs)")),
    Fault("communicators are not made with the mesh", "ms_dtensor/comm/world.py", f"{EMULATOR} -k stated_buffer",
          "name = made.backend.communicator(made.ranks)", "name = None"),
    Fault("a bucket is written while it is reduced", "ms_dtensor/comm/group.py", f"{RANKS} -k data_parallel_training", "",
          wrapped("Group", "all_reduce_", "work = real(self, *args, **kwargs); args[0].mul_(1.0); return work")),
    Fault("clipping resizes a storage", CLIP, f"{RANKS} -k extra_wait", "    extreme = math.isinf(p)\n    width",
          "    s = grads[0].untyped_storage()\n    s.resize_(s.size())\n    extreme = math.isinf(p)\n    width"),
    Fault("truth values go as they are", DEVICE, f"{BRANCH} -k truth", "= {mstype.bool_: mstype.uint8}", "= {}"),
    Fault("a buffer's size is in bytes", HCCL, f"{EMULATOR} -k stated_buffer", '{"hccl_buffer_size": buffer_megabytes()}',
          '{"hccl_buffer_size": buffer_megabytes() << 20}'),
    Fault("a keyword that init_process_group has not", HCCL, f"{EMULATOR} -k backend_starts", 'dist.init_process_group(backend="hccl")',
          'dist.init_process_group(backend_name="hccl")'),
    Fault("dropped weights are kept", ATTENTION, f"{KERNELS} -k bits", 'np.packbits(kept, -1, "little")', 'np.packbits(~kept, -1, "little")'),
    Fault("the causal mask is in the padding's slot", ATTENTION, f"{KERNELS} -k BSND-2",
          "kernel(query, key, value, real_shift, bits, None, attn_mask, None, *ends)",
          "kernel(query, key, value, real_shift, bits, attn_mask, None, None, *ends)"),
    Fault("sizes of groups are running sums", EXPERTS, f"{TWINS} -k experts", "sum((0, 1)).astype(ms.int64)",
          "sum((0, 1)).cumsum(0).astype(ms.int64)"),
    # -- three that nobody had judged, by behaviour ---------------------------------------------------------------------------
    Fault("fully_shard never frees", ROOMS, f"{BRANCH} -k given_back", "", wrapped("Room", "leave", "return None")),
    Fault("the backward takes any room", "ms_dtensor/parallel/sharding/unit.py", f"{IN_ROOMS} -k in_flight",
          "zip(self.blocks, rooms or itertools.repeat(None))", "zip(self.blocks, itertools.repeat(None))"),
    Fault("who had the room is not set aside", ROOMS, f"{IN_ROOMS} -k within_a_forward",
          "                self.aside[self.holder] = copy(self.part(self.holder.count))", "                pass"),
    Fault("who was set aside is not put back", ROOMS, f"{IN_ROOMS} -k within_a_forward", "                self.fill(values)\n\n",
          "                pass\n\n"),
    Fault("a room of another dtype is taken", ROOMS, f"{BRANCH} -k smallest", " and room.dtype == dtype\n", "\n"),
    Fault("who is gone from a room comes back", ROOMS, f"{BRANCH} -k is_gone",
          "        self.aside.pop(memory, None)\n        if self.holder is memory:", "        if self.holder is memory:"),
    Fault("who was set aside has its room still", "ms_dtensor/parallel/sharding/unit.py", f"{BRANCH} -k comes_back_with",
          "self.whole and all(room.holder is block.memory", "self.whole or all(room.holder is block.memory"),
    Fault("an average of local cells is a sum", "ms_dtensor/parallel/sharding/sums.py",
          "tests/sharding/cases_local.py -k emulated", "flat if scale == 1 else flat * scale,", "flat,"),
    Fault("a style's output forgets at a border how it lies", "ms_dtensor/parallel/sharding/call.py",
          "tests/sharding/cases_inside.py -k plain_outputs", "    elif LAID_OUT in x.__dict__:", "    elif False:"),
    Fault("reduce_dtype is ignored", "ms_dtensor/parallel/precision.py", f"{BRANCH} -k dtype_that_was_asked_for", "",
          wrapped("MixedPrecisionPolicy", "__post_init__", "object.__setattr__(self, 'reduce_dtype', None); real(self)")),
    Fault("nothing is gathered ahead", "ms_dtensor/comm/group.py", f"{BRANCH} -k next_unit", "",
          wrapped("Group", "all_gather", "work = real(self, *args, **kwargs); isinstance(work, Work) and work.wait(); return work")),
    # -- what a device packs together, and where it has its gradients ----------------------------------------------------------
    Fault("what autograd has added to a blank is lost", "ms_dtensor/parallel/sharding/reduce.py", f"{SUMS} -k packed_together",
          "if key in place and not is_blank(grad := gradients[key]):", "if (grad := gradients[key]) is None:"),
    Fault("gradients are copied one by one", "ms_dtensor/parallel/sharding/reduce.py", f"{BRANCH} -k packing",
          "gradient(cast(total, param.dtype))", "gradient(copy(cast(total, param.dtype)))"),
    Fault("a piece of columns is taken for one of rows", "ms_dtensor/comm/parts.py", f"{SUMS} -k packed_together",
          "        return math.prod(self.shapes[i][:self.dims[i]])", "        return 1"),
    Fault("alike parameters are unpacked one by one", "ms_dtensor/comm/parts.py", f"{BRANCH} -k packing",
          "(self.widths[i], n) if n is not None else (self.widths[i], None, i)", "(self.widths[i], n, i)"),
    Fault("parts are written rank by rank", "ms_dtensor/parallel/sharding/block.py", f"{SUMS} -k packed_together",
          "(k, n, x.shape[0] // (k * n), *x.shape[1:])), 1, first, stop)", "(n, k, x.shape[0] // (k * n), *x.shape[1:])), 0, first, stop)"),
    Fault("a row outlives a write", "ms_dtensor/parallel/sharding/block.py", f"{KEPT_ROWS} -k written",
          'phase != "backward" or self.stale())', 'phase != "backward")'),
    Fault("a row outlives an optimizer's step", "ms_dtensor/dispatch/memo.py", f"{KEPT_ROWS} -k written",
          "    memo_of(x).stepped += 1\n", "    pass\n"),
    Fault("a recording keeps rows", "ms_dtensor/parallel/sharding/call.py", f"{KEPT_ROWS} -k alone",
          "self.recorded and self.sought is not None", "self.recorded"),
    # -- and more ------------------------------------------------------------------------------------------------------------
    Fault("a share of a mean is over the world", DEVICE, f"{BRANCH} -k mean_is_over", "            wire = self.ops.scaled(wire, 1 / n)\n",
          "            wire = self.ops.scaled(wire, 1 / self.size)\n"),
    Fault("gradients are reduced at once", "ms_dtensor/comm/group.py", f"{BRANCH} -k next_unit", "",
          wrapped("Group", "reduce_scatter",
                  "work = real(self, *args, **kwargs); isinstance(work, Work) and work.wait(); return work")),
    Fault("messages are not waited for", HCCL, f"{BRANCH} -k messages", "                handle.wait()", "                pass"),
    Fault("an all-reduce writes its input", DEVICE, CONTRACT, "else self.ops.copy(wire) if back is None else wire", "else wire"),
    Fault("products of bfloat16 are HCCL's", HCCL, f"{RANKS} -k not_in_the_table", ' for t in _NUMBERS if t not in _NO_PRODUCT})',
          ' for t in _NUMBERS})'),
    Fault("communicators are made in the caller's order", DEVICE, "tests/comm/test_group.py -k sorted_ranks",
          "ranks = tuple(sorted(group))", "ranks = tuple(group)"),
    Fault("HCCL_BUFFSIZE is not asked", "ms_dtensor/comm/buffers.py", f"{EMULATOR} -k stated_buffer", 'os.environ.get("HCCL_BUFFSIZE", "200")', '"200"'),
    Fault("attention forgets its scale", ATTENTION, f"{KERNELS} -k BSND-2", "_kernel(heads, keep, scale,", "_kernel(heads, keep, 1.0,"),
    Fault("attention forgets its mode", ATTENTION, f"{KERNELS} -k BNSD-4", "0, form, sparse_mode)\n    return kernel",
          "0, form, 0)\n    return kernel"),
    Fault("bits of dropped weights are turned round", ATTENTION, f"{KERNELS} -k bits", 'np.packbits(kept, -1, "little")',
          'np.packbits(kept, -1, "big")'),
    Fault("ends of sequences are not told", ATTENTION, f"{KERNELS} -k TND", "attn_mask, None, *ends)", "attn_mask, None, None, None)"),
    Fault("gating numbers rows as if alone", MOE, f"{KERNELS} -k gating", "_row_numbers(x._shape[0], k, of, offset)",
          "_row_numbers(x._shape[0], k, of, 0)"),
    Fault("every rank adds what is whole", MOE, f"{KERNELS} -k finalizing", "TakenOnce.apply(x, mine, -0.0)", "TakenOnce.apply(x, True, -0.0)"),
    Fault("AdamW's second moment decays as the first", ADAMW, f"{ADAM} -k equals_numpy", "write(v, v * b2 + g * g * (1.0 - b2))",
          "write(v, v * b1 + g * g * (1.0 - b1))"),
    Fault("AdamW's kernel moves no master", ADAMW, f"{ADAM} -k one_kernel", "self._kernel(weight,", "self._kernel(param,"),
    Fault("clipping makes small gradients large", CLIP, f"{BRANCH} -k clipping", "mint.clamp(max_norm / (norm + 1e-6), max=1.0)",
          "max_norm / (norm + 1e-6)"),
    Fault("one tensor of two parameters is scaled twice", CLIP, f"{BRANCH} -k clipping", "if other is not grad and other._version == version]",
          "if other is not grad]"),
    Fault("truth values come back as bytes", DEVICE, f"{BRANCH} -k truth", "lambda y: self.ops.cast(y, x.dtype)\n", "None\n"),
    Fault("documents see each other", MODEL, f"{TWINS} -k documents", "mask = ops.logical_or(at > at", "mask = ops.logical_and(at > at"),
    Fault("a window is one too wide", MODEL, f"{TWINS} -k window", '"pre_tokens": cfg.sliding_window - 1', '"pre_tokens": cfg.sliding_window'),
    Fault("gate and value of SwiGLU are swapped", "model_zoo/llama/layers.py", f"{TWINS} -k either_kind", "ops.swiglu(mint.stack((gate, up), 1), 1)",
          "ops.swiglu(mint.stack((up, gate), 1), 1)"),
    # -- of others' rings: diffusers#14265, mindone#1438, pytorch#160285, PaddleFormers#3010 ------------------------------
    Fault("a ring's backward has stale keys", RING, RING_TEST,
          "                grads = zeros_for(there, there._shape, wide)\n                for blocks",
          "                there = taken(kv, np.arange(there._shape[0]))\n"
          "                grads = zeros_for(there, there._shape, wide)\n                for blocks"),
    Fault("a ring's backward takes dout for ones", RING, RING_TEST,
          "for x in (q, dout, out.astype(q.dtype), top, total))",
          "for x in (q, dout * 0 + 1, out.astype(q.dtype), top, total))"),
    Fault("a ring's gradients are doubled", RING, RING_TEST, "return added_up(grads, part.gives",
          "return added_up(grads * 2, part.gives"),
    Fault("a rank without tokens leaves the backward", "ms_dtensor/parallel/context.py", RING_TEST,
          "return connected(full((0, q._shape[1], v._shape[2]), 0, q.dtype), q, *there)",
          "return full((0, q._shape[1], v._shape[2]), 0, q.dtype)"),
    Fault("loads are one rank's", "ms_dtensor/parallel/router.py", f"{EXPERT_GRID} -k same_tokens",  # torchtitan#4154
          "summands = [PARTIAL if p.is_shard() else p for p in rows]", "summands = [REPLICATE for p in rows]"),
    Fault("tokens come home to others' places", OVER_RANKS, f"{EXPERTS_TEST} -k results_and_gradients",  # torchtitan#3604
          "home = Rows(n * k, order, send", "home = Rows(n * k, np.sort(order), send"),
    Fault("a rank that nobody chooses leaves the backward", OVER_RANKS,  # PaddleFormers#3010
          f"{EXPERTS_TEST} -k results_and_gradients",
          "return Nothing.apply(tuple(rows.shape), rows.dtype, rows, w1, w2, w3)",
          "return full(tuple(rows.shape), 0, rows.dtype)"),
    Fault("the host waits twice in a layer", "ms_dtensor/parallel/experts_counts.py", f"{EXPERT_GRID} -k waits_for_the_host",
          "        both = mint.cat(", "        got.asnumpy()\n        both = mint.cat("),
    Fault("an expert has room for one too many", "ms_dtensor/parallel/experts_room.py", f"{EXPERT_GRID} -k room_for_so_many",
          "place <= min(room,", "place <= min(room + 1,"),
    Fault("shared experts wait for tokens", "ms_dtensor/parallel/experts_rows.py", f"{EXPERTS_TEST} -k dispatch_is_under_way",
          "    meanwhile()\n    return arrive()", "    came = arrive()\n    meanwhile()\n    return came"),
    Fault("equal experts are not told apart", OVER_RANKS, f"{EXPERTS_TEST} -k cells_that_ranks", "comm.annotate(of=name)",
          'comm.annotate(of="")'),
    Fault("a rank without an NPU goes on", "scripts/ascend/ranks.py", "tests/zoo/test_ascend_first.py -k starts_for_the_cpu",
          'if device != "npu":', 'if device not in ("npu", "cpu"):'),
    Fault("a node without an NPU is not asked", "scripts/ascend/node.py", "tests/zoo/test_ascend_first.py -k without_an_npu",
          "    if not found:\n", "    if found is None:\n"),
    Fault("a room that takes other memory passes", "scripts/ascend/probes.py", "tests/zoo/test_ascend_first.py -k filled_anew",
          'told["after"] - told["held"] > side * side', 'told["after"] - told["held"] > side ** 3'),
]
