"""The sizes of the states that heads of several layers read, and how such heads are trained whatever the sizes.

In a language model the states grow from layer to layer, up to tens or hundreds, while the LM head's input is about 1.
Heads join the states of several layers by a matrix `fc`, and each layer of the heads adds its output to what `fc`
gives. With states of size 40, these outputs are too small for a long time, and a step of Adam, which changes all
weights of `fc` by about the learning rate, changes the result 40 times as much as a step of any other matrix does.

So heads are trained as if `fc` read states of size 1: `fc` = W / s, for the size s of each column's layer, and the
optimiser steps W. What is stored is `fc`, so programs that load the heads need no sizes.

Shapes: H hidden size, E size of the states of several layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads

TOKENS = 64  # random ones; their states have sizes within twice those of texts


@torch.no_grad()
def state_sizes(backbone: Backbone) -> Tensor:
    """Measure the sizes [E] of the states that `backbone` reads; all numbers of a layer have the same size.

    It is the median, over random tokens, of a state's root mean square. A median, because in many models the state of
    the first token is hundreds of times as large."""
    ids = torch.randint(backbone.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    states = backbone.hidden_states(ids.to(backbone.device), use_cache=False)[0].float()
    by_layer = states.unflatten(-1, (-1, backbone.hidden_size)).square().mean(-1).sqrt().median(0).values
    return by_layer.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(backbone.hidden_size)


@contextmanager
def even_steps(heads: MedusaHeads, sizes: Tensor) -> Iterator[None]:
    """Within this context, optimisers step the matrix `fc` [H, E] of the heads as if all states had size 1.

    The states have the `sizes` [E]. During a step, the weight is W = `fc` x sizes, and its gradient is that of `fc`
    divided by the sizes. So a rule that reads the weight itself, such as weight decay, also sees W."""
    weight = heads.get_parameter("fc.weight")
    sizes = sizes.to(weight)

    def steps_weight(optimizer: Optimizer) -> bool:
        return any(held is weight for group in optimizer.param_groups for held in group["params"])

    def to_even(optimizer: Optimizer, *_: object) -> None:
        if steps_weight(optimizer):
            weight.data.mul_(sizes)

    def to_fc(optimizer: Optimizer, *_: object) -> None:
        if steps_weight(optimizer):
            weight.data.div_(sizes)

    hooks = [
        weight.register_hook(lambda gradient: gradient / sizes),
        register_optimizer_step_pre_hook(to_even),
        register_optimizer_step_post_hook(to_fc),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
