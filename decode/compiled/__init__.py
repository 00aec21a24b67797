"""The decoding step as one region of `torch.compile` with fixed shapes: propose, verify, accept and compact together.

An eager step launches a few hundred small operations from Python. For a small model or a fast device, launching takes
most of the time. In a compiled step all shapes are fixed: the cache has a capacity, masks hide the slots without text,
lengths are on the device, and acceptance always walks to the greatest depth. A step is one call of
`torch.compile(fullgraph=True)`, which a GPU replays as a CUDA graph, and one transfer of ids to the host. Plain
decoding uses the same region with a draft of the root alone.

There is one region for each batch size, tree, capacity (a power of two), rule, sampler and state of the modules. The
model keeps its regions. A session takes a region for its texts, and puts it back at the end.
"""
