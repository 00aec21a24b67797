"""Compiled decoding (`--compile`): `torch.compile` compiles a whole step: draft, forward, acceptance, cache update.

Launching a few hundred small operations takes most of an eager step's time for a small model or on a fast device. In a
compiled step all shapes are fixed: masks hide the cache's unused slots, text lengths and options of sampling are
tensors on the device, and the tokens after all nodes are decided at once. A step is one call of a function compiled
with `fullgraph=True`, which a GPU replays as a CUDA graph, and one transfer of ids to the host. With own CUDA graphs,
the next step usually runs already. Where the most probable tokens are too few for a cut, the host decides on a token.

A region is a compiled step with its caches. Each batch size, tree, acceptance rule, kind of sampling and state of the
modules needs its own region. A session takes a region of its model and puts it back at the end. Plain decoding uses the
same step, with a draft of the root alone.

The region of a server's running batch has steps for 1, 2, 4, 8 rows and so on, and for several kinds of sampling. All
read and write the first rows of the same tensors. Texts are in the first of these rows: one that joins is copied to the
row after them, and the last one moves to the place of one that leaves. The rows after the texts do nothing. So no
number of texts moves a tensor, and all CUDA graphs stay valid.

The number of cache slots is no part of the compiled code. Attention reads a window, the first slots of the cache, which
grows with the text in steps of 256 slots, and by up to an eighth from 2048 slots on. When the text reaches the cache's
end, larger caches replace the old ones. Neither compiles anything."""
