"""Compiled decoding (`--compile`): `torch.compile` compiles a whole step, from the draft to the compacted cache.

An eager step launches a few hundred small operations from Python. For a small model or a fast device, launching takes
most of the time. In a compiled step all shapes are fixed: the cache has a fixed capacity, masks hide its unused slots,
text lengths are tensors on the device, and acceptance always walks to the greatest depth. A step is one call of a
function compiled with `fullgraph=True`, which a GPU replays as a CUDA graph, and one transfer of ids to the host.
Plain decoding uses the same step with a draft of the root alone.

A region is a compiled step with its caches. Each batch size, tree, capacity (a power of two), acceptance rule, set of
sampling options and state of the modules has its own region. The model keeps its regions. A session takes a region for
its texts, and puts it back at the end.
"""
