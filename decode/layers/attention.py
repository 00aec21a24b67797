"""The layers of a `TreeCache` that attend, with the interface that transformers' attention calls.

Keys and values lie in buffers of the cache, which all layers share. Shapes: B rows, H KV heads, N nodes of a forward, W
cache slots of the window, D head size."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decode.layers.recurrent import StateLayer


class Place(NamedTuple):
    """Where the cache holds a layer's keys or values: the index of the buffer, and of the part of this buffer."""

    buffer: int
    part: int


class Buffers(Protocol):
    """Where layers keep their keys and values: a `TreeCache`."""

    @property
    def longest(self) -> int:
        """The number of slots that the longest text fills."""

    @property
    def width(self) -> int:
        """The number of slots of the window, W."""

    def place(self, states: Tensor, per_layer: int) -> Place:
        """Find a place for keys or values like `states`, of which a layer has `per_layer`."""

    def write(self, place: Place, states: Tensor) -> None:
        """Write keys or values [B, H, N, D] to the slots reserved last."""

    def read(self, place: Place) -> Tensor:
        """The keys or values [B, H, W, D] in the window."""


class TreeLayer(CacheLayerMixin):
    """One layer of a `TreeCache`, with the interface that transformers' attention calls."""

    is_sliding = False  # our masks limit windows by position, so no key is ever dropped

    def __init__(self, owner: Buffers) -> None:
        self.owner = owner
        self.places: tuple[Place, ...] = ()  # of keys and of values
        super().__init__()

    @property
    def keys(self) -> Tensor | None:  # a view, as buffers move when they grow
        """The keys [B, H, W, D] in the window, which Mllama asks for; `None` before the first forward."""
        return self.owner.read(self.places[0]) if self.places else None

    @keys.setter
    def keys(self, value: object) -> None:
        """Ignore what transformers' constructor sets."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # If keys and values have one shape, as in most models, one buffer holds both.
        per_layer = 2 if key_states.shape == value_states.shape else 1
        self.places = tuple(self.owner.place(states, per_layer) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H, N, D] of N nodes after each text; returns those of all W slots of the window."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for place, states in zip(self.places, (key_states, value_states), strict=True):
            self.owner.write(place, states)
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and values [B, H, W, D] of the W slots of the window."""
        keys, values = (self.owner.read(place) for place in self.places)
        return keys, values

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def crop(self, tokens_to_remove: int) -> None:
        raise RuntimeError("a TreeCache keeps what was committed; commit less instead of cropping")


class BothLayer(StateLayer, TreeLayer):  # type: ignore[override]  # the two bases declare `is_croppable` differently
    """A layer with recurrent states beside its attention."""

    def __init__(self, owner: Buffers, number_of_states: int) -> None:
        TreeLayer.__init__(self, owner)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        TreeLayer.lazy_initialization(self, *args, **kwargs)

    crop = TreeLayer.crop
