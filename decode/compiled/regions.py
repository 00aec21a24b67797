"""The whole step as one compiled region of fixed shape: propose, verify, accept, compact.

Eager steps are a few hundred small operations, each of which is launched by Python; where the model is small or the
device fast, that is most of the time. Here all shapes are fixed: the cache has a capacity, of which masks leave out
what holds no text yet, lengths live on the device, and acceptance walks to the greatest depth whether or not anything
is accepted. So a step is one call of `torch.compile(fullgraph=True)`, replayed as a CUDA graph on a GPU, and one
transfer of ids to the host. Plain decoding is the same region with a draft of the root alone.

There is one region for each batch size, tree, capacity (powers of two), rule, sampler and state of the modules; the
model keeps them. A region holds the texts of one session: whoever decodes takes it out, and puts it back at the end.

Shapes: B rows, N nodes, D the greatest depth, S slots (the capacity), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.accept import Acceptance, accept_greedy, ended_at, typical
from decode.cache import TreeCache
from decode.draft import Draft, Drafter, Frontier
from decode.drafters.dynamic_tree import DynamicTree
from decode.heads_cache import HeadsCache
from decode.loop import Acceptor, Session, Step, at_end, pack, unpack
from decode.ops.grouped_attention import grouped
from decode.sampling import POSITION_FREE, Target, cumulative, invert, most_probable
from decode.timers import Timer
from decode.topology import Topology
from decode.verify import layer_kinds, visible_slots
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.sequential import SequentialHeads
from medusa.tree import Layout, Tree

LEAST = 256
"""Slots of the smallest cache."""
KEPT = 8
"""Regions that a model keeps, with a cache each; the one not used for the longest time goes first."""


class FixedLayer(CacheLayerMixin):
    """One layer's keys and values [B, heads, S, size], written where the owner says."""

    is_sliding = False
    is_compileable = True
    keys: Tensor
    values: Tensor

    def __init__(self, owner: FixedCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.owner, self.keys, self.values, self.is_initialized = owner, keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a FixedCache is made from a cache that was filled")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states [B, heads, N, size] of a step's nodes behind the text; all slots are returned."""
        _write(self.keys, self.owner.slots, key_states)
        _write(self.values, self.owner.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # nobody asks: positions and masks are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.capacity, 0

    def get_max_cache_shape(self) -> int:
        return self.owner.capacity

    def get_max_length(self) -> int:
        return self.owner.capacity


class FixedCache(Cache):
    """A KV cache of fixed shape at fixed addresses; how much of it is text, `lengths` [B] says, on the device."""

    fixed_layers: list[FixedLayer]

    def __init__(self, like: TreeCache | FixedCache, capacity: int) -> None:
        """Empty, for what `like`, a cache that was filled, holds."""
        self.capacity = capacity
        layers = []
        for layer in like.tree_layers if isinstance(like, TreeCache) else like.fixed_layers:
            buffers = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (layer.keys, layer.values)]
            layers.append(FixedLayer(self, *(_static(buffer) for buffer in buffers)))
        self.rows = len(layers[0].keys)
        self.lengths = _static(torch.zeros(self.rows, dtype=torch.long, device=layers[0].keys.device))
        self.slots = self.lengths[:, None]
        self.fixed_layers = layers
        super().__init__(layers=list(layers))

    def load(self, cache: TreeCache) -> None:
        """Take over the committed text of `cache`."""
        count = cache.longest
        for mine, theirs in zip(self.fixed_layers, cache.tree_layers, strict=True):
            _fill(mine.keys, theirs.keys[:, :, :count])
            _fill(mine.values, theirs.values[:, :, :count])
        self.lengths.copy_(torch.tensor(cache.lengths))

    def take(self, other: FixedCache) -> None:
        """Take over everything from a smaller one."""
        for mine, theirs in zip(self.fixed_layers, other.fixed_layers, strict=True):
            _fill(mine.keys, theirs.keys)
            _fill(mine.values, theirs.values)
        self.lengths.copy_(other.lengths)

    def go_behind(self, count: int) -> Tensor:
        """The next `count` states go behind the text; returns their positions in a chain [B, count]."""
        positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        self.slots = positions.clamp_max(self.capacity - 1)
        return positions

    def move(self, path: Tensor) -> None:
        """Put the nodes path [B, C] of the last forward, in order, behind the text; see `TreeCache.commit`."""
        behind = torch.arange(path.shape[1], device=path.device) + self.lengths[:, None]
        source = (self.lengths[:, None] + path).clamp_max(self.capacity - 1)
        for layer in self.fixed_layers:
            for buffer in (layer.keys, layer.values):
                index = source[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                _write(buffer, behind.clamp_max(self.capacity - 1), buffer.gather(2, index))


def _write(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """states [B, heads, N, size] into slots [B, N] of buffer [B, heads, S, size]."""
    if len(slots) == 1:
        buffer.index_copy_(2, slots[0], states)
    else:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        buffer.transpose(1, 2).index_put_((rows, slots), states.transpose(1, 2))


def _fill(buffer: Tensor, states: Tensor) -> None:
    """states [B, heads, T, size] into the first slots of buffer [B, heads, S, size].

    Zeros behind them, not what an earlier text left there: a masked NaN would still reach the output, as 0 x NaN.
    """
    count = states.shape[2]
    buffer[:, :, :count] = states
    buffer[:, :, count:] = 0


def _static(tensor: Tensor) -> Tensor:
    """A CUDA graph may write here: the tensor stays where it is."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


class NoDraft:
    """Drafts nothing: plain decoding."""

    def __init__(self, device: torch.device) -> None:
        self.topology = Topology.of(Tree.chain(0).to(device))

    def propose(self, frontier: Frontier) -> Draft:
        return Draft(frontier.root[:, None], self.topology)


class Sampler:
    """What decides on tokens, in fixed shapes: transformers' own processors, and one number from [0, 1) a token."""

    def __init__(self, target: Target, acceptor: Acceptor) -> None:
        self.acceptor, self.truncation, self.do_sample = acceptor, target.truncation, target.do_sample
        self.processors: LogitsProcessorList = target.processors[0]

    @staticmethod
    def key(target: Target, acceptor: Acceptor) -> tuple[Any, ...]:
        """What a region was compiled for.

        Raises:
            RequestError: the sampler looks at more than scores, or keeps them."""
        for processors in target.processors:
            others = [type(p).__name__ for p in processors if not isinstance(p, POSITION_FREE)]
            if others:
                raise RequestError(
                    f"--compile has temperature, top-k, top-p, min-p and the like only, no {others[0]}, which looks at "
                    "the text; leave one of them out"
                )
        kinds = [
            [(type(p), {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(p).items()}) for p in row]
            for row in target.processors
        ]
        if any(kind != kinds[0] for kind in kinds):
            raise RequestError("--compile takes one set of sampling options for all rows of a batch")
        if target.kept_scores is not None or target.kept_logits is not None:
            raise RequestError(
                "output_scores and output_logits cannot be had from a compiled step; leave out --compile"
            )
        if acceptor.draft == "sample":
            raise RequestError("--compile verifies drafts that were chosen, not drawn; use draft topk")
        return (*acceptor, target.truncation, target.do_sample, kinds[0])

    def accept(self, draft: Draft, logits: Tensor, u: Tensor, room: Tensor) -> Acceptance:
        """logits [B, N, V], numbers u [B, D + 1] and how deep nodes may be accepted [B]."""
        if not self.do_sample and not self.processors:
            return accept_greedy(draft, most_probable(logits), room)
        if self.acceptor.rule == "typical":
            return self._typical(draft, logits, room)
        return self._walk(draft, logits, u, room)

    def _scores(self, logits: Tensor) -> Tensor:
        """logits [X, V] -> the target's scores [X, V]; none of these processors looks at ids."""
        anything = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
        scores: Tensor = self.processors(anything, logits.float())  # type: ignore[arg-type]
        if self.truncation is not None:
            scores = scores.masked_fill(~typical(scores.softmax(-1), *self.truncation), -torch.inf)
        return scores

    def _walk(self, draft: Draft, logits: Tensor, u: Tensor, room: Tensor) -> Acceptance:
        """`accept_walk` with all rows going on to the greatest depth; those that have ended stay where they are."""
        topology, rows = draft.topology, torch.arange(len(draft.ids), device=draft.ids.device)
        table = topology.find_children(topology.find_place())
        end, root, walking = torch.zeros_like(rows), torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
        for depth in range(topology.max_depth + 1):
            scores = self._scores(logits[rows, end])
            token = invert(cumulative(scores.softmax(-1)), rows, u[:, depth]) if self.do_sample else scores.argmax(-1)
            root = torch.where(walking, token, root)
            if depth < topology.max_depth:
                children = topology.at(table, rows, end)  # [B, C]
                held = (draft.ids.gather(1, children.clamp_min(0)) == token[:, None]) & (children >= 0)
                child = torch.where(held, children, -1).amax(-1)
                walking = walking & (child >= 0) & (room > depth)
                end = torch.where(walking, child, end)
        return ended_at(draft, end, root)

    def _typical(self, draft: Draft, logits: Tensor, room: Tensor) -> Acceptance:
        """`accept_typical` for all nodes at once."""
        topology, ids = draft.topology, draft.ids
        rows, nodes = ids.shape
        p = self._scores(logits.flatten(0, 1)).softmax(-1).unflatten(0, (rows, nodes))
        above = topology.parent.expand(rows, -1)
        passes = typical(p, self.acceptor.epsilon, self.acceptor.delta)
        of_token = (above * p.shape[-1] + ids).view(rows, -1)  # a node's token after its parent
        fits = passes.flatten(1).gather(1, of_token)
        log_p = p.flatten(1).gather(1, of_token).log()
        fits[:, 0], log_p[:, 0] = True, 0.0
        over = topology.ancestors.expand(rows, -1, -1)
        accepted = (fits[:, None] | ~over).all(-1) & (topology.depth <= room[:, None])
        worth = torch.where(over, log_p[:, None], 0.0).sum(-1)
        depth = torch.where(accepted, topology.depth, -1)
        longest = depth == depth.amax(-1, keepdim=True)
        end = torch.where(longest, worth, -torch.inf).argmax(-1)
        return ended_at(draft, end, p[torch.arange(rows, device=ids.device), end].argmax(-1))


class FixedHeadsCache:
    """`decode.heads_cache.HeadsCache` in fixed shapes: what heads that look back keep of the text."""

    heads: MedusaHeads
    backbone: Backbone
    prefix: FixedCache | None
    pairs: FixedCache | None

    def __init__(self, like: HeadsCache | FixedHeadsCache, capacity: int, max_depth: int) -> None:
        """`max_depth`: of the tree, whose paths are read."""
        self.heads, self.backbone = like.heads, like.backbone
        self.chain = Topology.of(Tree.chain(max_depth).to(like.backbone.device))
        self.prefix, self.pairs = None, None
        if like.prefix is not None:
            self.prefix = FixedCache(
                like.prefix if isinstance(like.prefix, FixedCache) else like.prefix.cache, capacity
            )
        if like.pairs is not None:
            self.pairs = FixedCache(like.pairs if isinstance(like.pairs, FixedCache) else like.pairs.cache, capacity)

    def load(self, reader: HeadsCache) -> None:
        """Take over what was read of the prompts."""
        for mine, theirs in ((self.prefix, reader.prefix), (self.pairs, reader.pairs)):
            if mine is not None and theirs is not None:
                mine.load(theirs.cache)
                theirs.cache.release()

    def take(self, other: FixedHeadsCache) -> None:
        """Take over everything from a smaller one."""
        for mine, theirs in ((self.prefix, other.prefix), (self.pairs, other.pairs)):
            if mine is not None and theirs is not None:
                mine.take(theirs)

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, end: Tensor, counts: Tensor) -> Tensor:
        """What the heads read at the ends of accepted paths [B, H].

        Args:
            before: [B, H] what they read before the root.
            hidden, ids: [B, D + 1, H], [B, D + 1] of the paths' nodes, padded with anything.
            end: [B] where in them each path ends.
            counts: [B] by how many nodes each row grows.
        """
        if self.prefix is not None:
            assert self.heads.prefix is not None
            cache = self.prefix
            positions = cache.go_behind(hidden.shape[1])
            allowed = visible_slots(self.chain, cache.lengths, cache.capacity)[:, None]
            hidden = self.heads.prefix(hidden, positions, additive(allowed, hidden.dtype), cache)
            cache.lengths.add_(counts)
        if self.pairs is not None:
            assert isinstance(self.heads, SequentialHeads)
            cache = self.pairs
            positions = cache.go_behind(hidden.shape[1])
            pairs = torch.cat([before[:, None], hidden[:, :-1]], dim=1)
            cache.update(*self.heads.project_kv(pairs, self.backbone.embed(ids).to(hidden), positions), 0)
            cache.lengths.add_(counts)
        return hidden.gather(1, end[:, None, None].expand(-1, -1, hidden.shape[-1]))[:, 0]

    def context_kv(self) -> ContextKV | None:
        if self.pairs is None:
            return None
        layer, lengths = self.pairs.fixed_layers[0], self.pairs.lengths[:, None]
        seen = torch.arange(self.pairs.capacity, device=lengths.device) < lengths
        return ContextKV(layer.keys, layer.values, seen[:, None], lengths, self.heads.config.num_heads)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `allowed`, else the least finite number."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


class Region:
    """The compiled step for one batch size, capacity, draft and sampler, with its state on the device."""

    def __init__(
        self,
        backbone: Backbone,
        cache: FixedCache,
        reader: FixedHeadsCache | None,
        drafter: Drafter,
        sampler: Sampler,
        hidden: Tensor,
    ) -> None:
        """`hidden` [B, H]: of the kind that the drafter starts from."""
        self.backbone, self.cache, self.drafter, self.sampler = backbone, cache, drafter, sampler
        self.reader = reader
        self.config, self.kinds = backbone.config, layer_kinds(backbone.config)
        device, rows = backbone.device, cache.rows
        self.root = _static(torch.zeros(rows, dtype=torch.long, device=device))
        self.hidden = _static(torch.zeros_like(hidden))
        self.alive = _static(torch.ones(rows, dtype=torch.long, device=device))
        ends = [end for end in (backbone.context, cache.capacity) if end is not None]
        self.end = min(ends)
        once = drafter.propose(self._frontier())
        _ = once.topology.non_ancestors  # what is found out once and kept is no part of a step
        self.compiled = compiled(self._step, device)

    def __call__(self, u: Tensor) -> list[list[int]]:
        """Numbers u [B, D + 1] -> per row what `unpack` takes; the cache, roots and hidden states have moved on."""
        with grouped(self.config), self.backbone.watched():
            packed: Tensor = self.compiled(u)
        return packed.tolist()

    def _frontier(self) -> Frontier:
        context_kv = None if self.reader is None else self.reader.context_kv()
        return Frontier(self.root, self.hidden, list(range(self.cache.rows)), context_kv)

    def _step(self, u: Tensor) -> Tensor:
        cache, lengths = self.cache, self.cache.lengths
        draft = self.drafter.propose(self._frontier())
        topology = draft.topology
        positions = (lengths[:, None] + topology.depth).clamp_max(self.end - 1)
        cache.go_behind(topology.num_nodes)
        readout = self.backbone.forward(
            draft.ids, cache, position_ids=positions, attention_mask=self._masks(topology, lengths)
        )
        accepted = self.sampler.accept(draft, readout.logits, u, self.end - 1 - lengths)
        if topology.max_children > 1:
            cache.move(accepted.path.clamp_min(0))
        packed, counts = pack(draft, accepted), accepted.length * self.alive  # a row that has ended stays where it is
        self.hidden.copy_(self._heads_read(draft, readout.hidden, accepted, counts))
        self.root.copy_(accepted.next_root)
        lengths.add_(counts)
        return packed

    def _heads_read(self, draft: Draft, hidden: Tensor, accepted: Acceptance, counts: Tensor) -> Tensor:
        """hidden [B, N, H] of a step -> what the heads start the next one from [B, H]."""
        if self.reader is None:
            return at_end(hidden, accepted)
        path = accepted.path.clamp_min(0)
        states = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[-1])).to(self.hidden.dtype)
        return self.reader.path(self.hidden, states, draft.ids.gather(1, path), accepted.length - 1, counts)

    def _masks(self, topology: Topology, lengths: Tensor) -> Any:
        masks = {}
        for kind in self.kinds:
            window = self.backbone.config.sliding_window if kind == "sliding_attention" else None
            chunk = self.backbone.config.attention_chunk_size if kind == "chunked_attention" else None
            allowed = visible_slots(topology, lengths, self.cache.capacity, window, chunk)
            masks[kind] = additive(allowed, self.backbone.dtype)[:, None]
        return masks if getattr(self.config, "layer_types", None) is not None else masks[self.kinds[0]]

    def load(self, session: Session, frontier: Frontier) -> None:
        """Start behind prompts that were read; the session's own context_kv is let go."""
        self.cache.load(session.cache)
        session.cache.release()
        if self.reader is not None and session.reader is not None:
            self.reader.load(session.reader)
        self.root.copy_(frontier.root)
        self.hidden.copy_(frontier.hidden)
        self.alive.fill_(1)

    def go_on_from(self, other: Region) -> None:
        """Take over from a region with a smaller cache."""
        self.cache.take(other.cache)
        if self.reader is not None and other.reader is not None:
            self.reader.take(other.reader)
        self.root.copy_(other.root)
        self.hidden.copy_(other.hidden)
        self.alive.copy_(other.alive)

    def end_rows(self, alive: Sequence[bool]) -> None:
        self.alive.copy_(torch.tensor(alive))


def compiled(step: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """A bound method, compiled whole and on its own: what was compiled for one object is never tried for another.

    Of the guards only those on tensors stay. All else that a region was compiled for is in its key: asking a thousand
    modules in every step whether they have changed takes longer than a small model's step; once a session, nobody
    notices (`_state`).
    """
    method: Any = step
    function = method.__func__
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options: dict[str, Any] = {
        "guard_filter_fn": partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=True),
        # Torch 2.13 writes the result of an operation into a part of a finished `cat`, and gives the whole of it away
        # for reuse all the same: a recurrent head then read the next token's embedding where its state had been.
        "inplace_buffers": False,
    }
    if device.type == "cuda":
        options["triton.cudagraphs"] = True
    return torch.compile(own.__get__(method.__self__), fullgraph=True, dynamic=False, options=options)


class Regions(list[tuple[Any, Region]]):
    """What was compiled for a model and is not in use, with its key, the last used one at the end.

    It lives and dies with the model; a copy of the model starts with nothing.
    """

    PLACE = "_medusa_regions"

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        return vars(model).setdefault(cls.PLACE, cls())

    def __deepcopy__(self, memo: dict[int, Any]) -> Regions:
        return Regions()

    def __reduce__(self) -> tuple[Any, ...]:
        return Regions, ()

    def take(self, key: Any, make: Callable[[], Region]) -> Region:
        """One for this key that nobody else has."""
        with self.lock:
            for place, (held, region) in enumerate(self):
                if held == key:
                    del self[place]
                    return region
        return make()

    def put_back(self, key: Any, region: Region) -> None:
        with self.lock:
            self.append((key, region))
            del self[:-KEPT]


EVERY_MODULES_OWN = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType, partial)


def _state(module: nn.Module) -> tuple[Any, ...]:
    """What the guards on modules would ask in every step, to be asked once a session.

    Of every submodule its hooks, which parameters it has (tied ones are one input of the region), and all settings:
    training or not, adapters that are on, a `forward` put in place of its own. Values of parameters may change.
    """
    return tuple(
        (
            type(part),
            *((id(p), p.dtype, p.device) for p in part._parameters.values() if p is not None),
            *part._forward_pre_hooks.values(),
            *part._forward_hooks.values(),
            *((name, _plain(value)) for name, value in vars(part).items() if name not in EVERY_MODULES_OWN),
        )
        for part in module.modules()
    )


def _plain(value: object) -> Any:
    """A number, a word, a function, or a container of such; of anything else (tensors, modules, caches) nothing."""
    if isinstance(value, PLAIN):
        return value
    if type(value) is dict:
        value = list(value.items())
    elif type(value) is set:
        value = sorted(value, key=repr)
    if type(value) in (list, tuple):
        return tuple(part for part in map(_plain, value) if part not in (None, ()))  # type: ignore[call-overload]
    return None


def require_compilable(session: Session) -> None:
    """Raises:
    RequestError: this model, these heads or this machine cannot be compiled whole."""
    backbone = session.backbone
    reason = None
    if backbone.rope_boundary is not None:
        reason = "longrope turns a text by how long it is"
    elif len(set((getattr(backbone.model, "hf_device_map", None) or {"": 0}).values())) > 1:
        reason = "the model is spread over devices"
    elif session.kept_hidden is not None:
        reason = "hidden states are to be kept"
    elif backbone.device.type == "cpu" and not _has_compiler():
        reason = "there is no C++ compiler (g++ or clang++) here"
    if reason:
        raise RequestError(f"--compile cannot be had: {reason}; leave it out")


def _has_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


class Compiled:
    """A session's loop over a compiled region; `run` is what `Session.run` is."""

    ahead = 1024
    """Tokens to be written that the first cache holds, at most."""

    def __init__(
        self,
        session: Session,
        acceptor: Acceptor,
        tree: Layout,
        heads: MedusaHeads | None,
        make_drafter: Callable[[], Drafter],
    ) -> None:
        """
        Args:
            heads: those that draft; with `None` the tree is a root alone.

        Raises:
            RequestError: something that cannot be compiled."""
        require_compilable(session)
        self.session, self.acceptor, self.tree, self.make_drafter = session, acceptor, tree, make_drafter
        self.regions, self.taken = Regions.of(session.backbone.model), list[tuple[Any, Region]]()
        # The heads themselves, so that none take the place of others that are gone.
        self.key = (
            len(session.sequences),
            heads,
            _content(tree),
            *Sampler.key(session.target, acceptor),
            *_surroundings(session.backbone),
            _state(session.backbone.model),
            _state(heads) if heads is not None else (),
        )
        self.lengths = [len(prompt) for prompt in session.sequences.prompts]

    def region(
        self, capacity: int, cache: TreeCache | FixedCache, reader: HeadsCache | FixedHeadsCache | None, hidden: Tensor
    ) -> Region:
        """The one that holds at least `capacity` slots of what is in these."""
        slots = max(LEAST, 1 << (capacity - 1).bit_length())

        def make() -> Region:
            backbone, sampler = self.session.backbone, Sampler(self.session.target, self.acceptor)
            fixed = None if reader is None else FixedHeadsCache(reader, slots, self.tree.max_depth)
            return Region(backbone, FixedCache(cache, slots), fixed, self.make_drafter(), sampler, hidden)

        key = (slots, *self.key)
        self.taken.append((key, self.regions.take(key, make)))
        return self.taken[-1][1]

    @torch.inference_mode()
    def run(self, clock: Timer) -> Iterator[Step]:
        """Decode until every row has ended. A stage of the clock is one region: all of a step counts as `verify`.

        Raises:
            RequestError: torch.compile does not get through this model."""
        try:
            yield from self._steps(clock)
        except TorchDynamoException as error:
            del self.taken[-1:]
            name, cause = type(self.session.backbone.model).__name__, getattr(error, "inner_exception", error)
            reason = f"{type(cause).__name__}: {str(cause).strip()}".split("\n")[0]
            raise RequestError(
                f"--compile cannot be had: torch.compile fails on {name} ({reason}); leave it out"
            ) from error
        finally:
            for key, region in self.taken:
                self.regions.put_back(key, region)

    def _steps(self, clock: Timer) -> Iterator[Step]:
        session, sequences, nodes = self.session, self.session.sequences, self.tree.num_nodes
        frontier = session.prefill(most_probable_first=self.acceptor.rule == "typical")
        first = max(self.lengths) + min(max(sequences.limits), self.ahead) + nodes
        region = self.region(first, session.cache, session.reader, frontier.hidden)
        region.load(session, frontier)
        u = torch.zeros(len(sequences), self.tree.max_depth + 1, dtype=torch.float64, device=session.backbone.device)
        rows, roots = frontier.rows, frontier.root.tolist()
        clock.start()
        while True:
            step = Step()
            for row in rows:
                written = sequences.extend(row, [roots[row]])
                if written:
                    step.ids[row], step.lengths[row] = written, 1
            rows = self._unfinished(rows, region)
            if not rows:
                if step.ids:
                    yield step
                return
            if max(self.lengths[row] for row in rows) + nodes > region.cache.capacity:
                larger = self.region(2 * region.cache.capacity, region.cache, region.reader, region.hidden)
                larger.go_on_from(region)
                region = larger
            if session.target.do_sample:
                u = session.target.draws.block(self.tree.max_depth + 1, u.device)
            clock.lap("other")
            lengths, roots, written_ids = unpack(region(u))
            clock.lap("verify")
            for row in rows:
                step.ids[row] += sequences.extend(row, written_ids[row][1 : lengths[row]])
                step.lengths[row] = lengths[row]
                self.lengths[row] += lengths[row]
            rows = self._unfinished(rows, region)
            clock.lap("other")
            yield step
            if not rows:
                return
            clock.start()

    def _unfinished(self, rows: list[int], region: Region) -> list[int]:
        """The rows that go on; the others stay in the batch, whose shape is fixed, and do nothing there."""
        reasons = self.session.sequences.finish_reason
        left = [row for row in rows if reasons[row] is None]
        if left and len(left) < len(rows):
            region.end_rows([reason is None for reason in reasons])
        return left


def _surroundings(backbone: Backbone) -> tuple[Any, ...]:
    """What machine code depends on, and no module holds."""
    kind = backbone.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return backbone.config._attn_implementation, precision, torch.get_num_threads()


def _content(tree: Layout) -> tuple[Any, ...]:
    """What two trees must have in common to be the same, whoever made them."""
    nodes = (*tree.candidates.parent.tolist(), *tree.candidates.rank.tolist())
    return (tree.num_nodes, tree.temperatures, *nodes) if isinstance(tree, DynamicTree) else nodes
