# SPDX-License-Identifier: Apache-2.0
"""Hooks of cells, tensors and parameters; recomputation."""
import mindspore as ms
from mindspore import nn, ops

from ms_dtensor import ColwiseParallel, RowwiseParallel
from tests.surface.table import Net, random, row, seeded, values

HOOKS, RECOMPUTE = "hooks", "recomputation"


def gradients(net, s, batch=None):
    """Loss and all gradients."""
    step = ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, net.trainable_params())
    return step(*(batch or s.batch()))


# -- of cells -------------------------------------------------------------------------------------------------------------
@row(HOOKS, "Cell.register_forward_pre_hook changes the input")
def forward_pre_hook(s, net):
    seen = []

    def hook(cell, inputs):
        seen.append((type(cell).__name__, inputs[0].shape))
        return (inputs[0] * 1.5,)
    handle = net.up.register_forward_pre_hook(hook)
    with_hook = gradients(net, s)
    handle.remove()
    return with_hook, gradients(net, s), seen


@row(HOOKS, "Cell.register_forward_pre_hook(with_kwargs=True)")
def forward_pre_hook_kwargs(s, net):
    net.head.register_forward_pre_hook(lambda cell, args, kwargs: ((ops.tanh(args[0]),), kwargs), with_kwargs=True)
    return gradients(net, s)


@row(HOOKS, "Cell.register_forward_hook keeps and changes the output")
def forward_hook(s, net):
    kept = []

    def hook(cell, inputs, output):
        kept.append(ops.stop_gradient(output))
        return output * 0.5
    handle = net.down.register_forward_hook(hook)
    with_hook = gradients(net, s)
    handle.remove()
    return with_hook, gradients(net, s), kept


@row(HOOKS, "forward hooks on every cell: activation norms")
def forward_hooks_everywhere(s, net):
    norms = {}
    for name, cell in net.cells_and_names():
        if name:
            cell.register_forward_hook(
                lambda cell, inputs, output, name=name: norms.update({name: ops.stop_gradient(output).norm().asnumpy()}))
    return gradients(net, s), norms


@row(HOOKS, "Cell.register_backward_hook sees and doubles gradients")
def backward_hook(s, net):
    seen = []

    def hook(cell, grad_input, grad_output):
        seen.append((grad_input[0], grad_output[0]))
        return (grad_input[0] * 2,)
    handle = net.down.register_backward_hook(hook)
    with_hook = gradients(net, s)
    handle.remove()
    return with_hook, gradients(net, s), seen


@row(HOOKS, "Cell.register_backward_pre_hook scales gradients")
def backward_pre_hook(s, net):
    seen = []

    def hook(cell, grad_output):
        seen.append(grad_output[0])
        return (grad_output[0] * 0.25,)
    handle = net.head.register_backward_pre_hook(hook)
    with_hook = gradients(net, s)
    handle.remove()
    return with_hook, gradients(net, s), seen


@row(HOOKS, "a backward hook on the whole net")
def backward_hook_on_net(s, net):
    seen = []
    net.register_backward_hook(lambda cell, grad_input, grad_output: seen.append(grad_output[0]))
    x, y = s.batch()
    grads = ms.grad(lambda x: ((net(x) - y) ** 2).mean())(x)
    return grads, seen


@row(HOOKS, "backward hooks where nobody asks for the inputs' gradients")
def backward_hook_without_inputs(s, net):
    seen = []
    for cell in (net, net.up):
        cell.register_backward_hook(
            lambda cell, grad_input, grad_output: seen.append((1.0 * (grad_input[0] is None), grad_output[0])))
    return gradients(net, s), gradients(net, s), seen


@row(HOOKS, "backward hooks and pre-hooks on the same cells")
def both_backward_hooks(s, net):
    seen = []
    for cell in (net.up, net.down):
        cell.register_backward_pre_hook(lambda cell, grad_output: (ops.clip_by_value(grad_output[0], -0.01, 0.02),))
        cell.register_backward_hook(lambda cell, grad_input, grad_output: seen.append((grad_input[0], grad_output[0])))
    return gradients(net, s), seen


# -- of tensors and parameters --------------------------------------------------------------------------------------------
class Hooked(Net):
    """`Net` with a hook on an activation."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def construct(self, x):
        hidden = ms.ops.tanh(self.up(self.norm(x)))
        hidden.register_hook(self.hook)
        return self.head(x + self.down(hidden))


PLAN = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}


def pairs(s):
    return s.data(random(1, 8, 4, 7)), s.data(random(2, 8, 4, 5))


@row(HOOKS, "Tensor.register_hook on an activation")
def tensor_hook(s):
    seen = []

    def hook(grad):
        seen.append(grad)
        return grad * 3
    net = s.net(seeded(Hooked(hook)), PLAN)
    return gradients(net, s, pairs(s)), seen


@row(HOOKS, "Tensor.register_hook that clips by norm")
def tensor_hook_norm(s):
    net = s.net(seeded(Hooked(lambda grad: ops.clip_by_norm(grad, 0.05))), PLAN)
    return gradients(net, s, pairs(s))


@row(HOOKS, "Parameter.register_hook scales, is removed")
def parameter_hook(s, net):
    seen = []

    def hook(grad):
        seen.append(grad)
        return grad * 0.5
    handles = [p.register_hook(hook) for p in (net.up.weight, net.head.bias)]
    with_hook = gradients(net, s)
    for handle in handles:
        handle.remove()
    return with_hook, gradients(net, s), sorted(seen, key=lambda grad: grad.ndim)  # a unit's gradients come together


@row(HOOKS, "Parameter.register_hook on every parameter: gradient norms over three steps")
def parameter_hooks_everywhere(s, net):
    norms = []
    for p in net.trainable_params():
        p.register_hook(lambda grad, name=p.name: norms.append((name, grad.norm())))
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    for _ in range(3):
        optimizer(gradients(net, s)[1])
    return sorted(norms[-len(net.trainable_params()):], key=lambda pair: pair[0]), values(net)


@row(HOOKS, "ops.HookBackward")
def hook_backward(net, x, y):
    seen = []
    hook = ops.HookBackward(lambda grad: (seen.append(grad[0]), grad[0] * 2)[1])
    return ms.value_and_grad(lambda x: ((hook(net(x)) - y) ** 2).mean(), None, net.trainable_params())(x), seen


@row(HOOKS, "ops.InsertGradientOf")
def insert_gradient_of(net, x, y):
    def clipped(grad):
        return ops.clip_by_value(grad, -0.01, 0.02)
    clip = ops.InsertGradientOf(clipped)
    return ms.value_and_grad(lambda x: ((clip(net(x)) - y) ** 2).mean(), None, net.trainable_params())(x)


@row(HOOKS, "a custom bprop")
def custom_bprop(s):
    class Swish(nn.Cell):
        def construct(self, x):
            return x * ops.sigmoid(x)

        def bprop(self, x, out, dout):
            return (dout * (ops.sigmoid(x) + 0.5),)
    net, swish = s.net(), Swish()
    x, y = s.batch()
    return ms.value_and_grad(lambda x: ((swish(net(x)) - y) ** 2).mean(), None, net.trainable_params())(x)


@row(HOOKS, "ops.stop_gradient within the net")
def stop_gradient(s, net):
    net.down.register_forward_hook(lambda cell, inputs, output: ops.stop_gradient(output))
    return gradients(net, s)


# -- recomputation --------------------------------------------------------------------------------------------------------
def deep(before):
    """Two feed-forward blocks; `before` is applied to each of them."""
    blocks = [nn.SequentialCell(nn.Dense(7, 12), nn.Tanh(), nn.Dense(12, 7)) for _ in range(2)]
    for block in blocks:
        before(block)
    return seeded(nn.SequentialCell(*blocks, nn.Dense(7, 5)))


DEEP = {f"{i}.{j}": style(use_local_output=False) for i in range(2)
        for j, style in ((0, ColwiseParallel), (2, RowwiseParallel))}


def trained(s, net):
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    losses = []
    for _ in range(5):
        loss, grads = gradients(net, s, pairs(s))
        optimizer(grads)
        losses.append(loss)
    return losses, values(net)


@row(RECOMPUTE, "Cell.recompute before the model is distributed")
def recompute_before(s):
    return trained(s, s.net(deep(lambda block: block.recompute()), DEEP))


@row(RECOMPUTE, "Cell.recompute after it")
def recompute_after(s):
    net = s.net(deep(lambda block: None), DEEP)
    for block in (net[0], net[1]):
        block.recompute()
    return trained(s, net)


@row(RECOMPUTE, "Cell.recompute(use_reentrant=False)")
def recompute_not_reentrant(s):
    return trained(s, s.net(deep(lambda block: block.recompute(use_reentrant=False)), DEEP))


@row(RECOMPUTE, "ms.recompute(block, x)")
def recompute_function(s):
    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = deep(lambda block: None)

        def construct(self, x):
            for block in (self.inner[0], self.inner[1]):
                x = ms.recompute(block, x)
            return self.inner[2](x)
    return trained(s, s.net(Outer(), {f"inner.{name}": style for name, style in DEEP.items()}))


@row(RECOMPUTE, "recompute of one Dense inside a cut pair")
def recompute_inner(s):
    return trained(s, s.net(deep(lambda block: block[0].recompute()), DEEP))


@row(RECOMPUTE, "recompute and backward hooks")
def recompute_and_hooks(s):
    net, seen = s.net(deep(lambda block: block.recompute()), DEEP), []
    net[2].register_backward_hook(lambda cell, grad_input, grad_output: seen.append((grad_input[0], grad_output[0])))
    net[0].register_forward_hook(lambda cell, inputs, output: output * 0.5)
    return trained(s, net), seen


@row(RECOMPUTE, "ms.saved_tensors_hooks: pack to NumPy and back")
def saved_tensors(s, net):
    with ms.saved_tensors_hooks(lambda x: x.asnumpy().copy(), lambda x: ms.Tensor(x)):
        return gradients(net, s)
