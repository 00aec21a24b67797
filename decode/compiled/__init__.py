"""The decoding step as one region of `torch.compile` with fixed shapes: propose, verify, accept and compact together.

An eager step is a few hundred small operations, each launched by Python. Where the model is small or the device fast,
launching takes most of the time. In a compiled step all shapes are fixed: the cache has a capacity, and masks leave out
the slots without text; lengths are on the device; acceptance walks to the greatest depth whether or not a node is
accepted. So a step is one call of `torch.compile(fullgraph=True)`, which a GPU replays as a CUDA graph, and one
transfer of ids to the host. Plain decoding is the same region with a draft of the root alone.

There is one region for each batch size, tree, capacity (a power of two), rule, sampler and state of the modules. The
model keeps the regions. A region holds the texts of one session: a session takes it, and puts it back at the end.
"""
