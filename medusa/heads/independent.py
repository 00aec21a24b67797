"""Medusa heads: guesses for the tokens after the next one, from one hidden state (Medusa paper, section 2.1).

The backbone's LM head predicts the token at distance 1 from the position of a hidden state. Head i, counted from 0,
guesses the token at distance i + 2.

Shapes: K heads (k of them run), H hidden size, E size of the backbone's hidden states (H, or larger for several
layers), V vocabulary size, N tokens that heads guess among if their vocabulary is reduced, B rows, T tokens, `...` any
positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.blocks import MLPBlock, SquareBlock
from medusa.heads.context_kv import AttendsToText
from medusa.heads.inputs import HeadInputs, following_ids, visible
from medusa.heads.kind import Kind
from medusa.heads.pretrained import PretrainedHeads
from medusa.heads.stacked import product

if TYPE_CHECKING:
    from medusa.heads.prefix import Prefix

LMHead = Callable[[Tensor], Tensor]  # computes logits [..., V] from hidden states [..., H]


class MedusaHeads(PretrainedHeads, Kind):
    """K heads that read the backbone's last hidden state independently: the base class of all kinds of heads.

    With `lm_head: own` each head has an LM head, and with `one` they have one together. With `lm_head: shared` all
    heads use the backbone's LM head. The caller passes it to `forward`, so that the heads contain no module of the
    backbone."""

    stacked_weights: ClassVar[tuple[str, ...]] = ("lm_heads",)

    def __init__(self, config: MedusaConfig) -> None:
        """Create untrained heads: all blocks are the identity, and LM heads are zero until `start_from` is called."""
        super().__init__(config)
        self.vocabulary: Tensor | None  # [N] ids of the tokens that heads guess among (`medusa.vocabulary`)
        self.register_buffer("vocabulary", None if config.vocabulary is None else torch.arange(config.vocabulary))
        self.prefix: Prefix | None = None
        if config.prefix_layers:
            from medusa.heads.prefix import Prefix  # imported here, because it needs transformers

            self.prefix = Prefix(config)
        self.make_blocks()
        self.lm_heads: nn.Parameter | None = None
        if config.lm_head != "shared":
            if config.vocab_size is None:
                needs = f"heads.lm_head={config.lm_head} needs heads.vocab_size"
                raise RequestError(f"{needs}; give the backbone's vocabulary size")
            # [K, H, V]: on a CPU, a batched product with [K, V, H] is 2.6 times slower at one position.
            tokens = config.draft_vocab_size(config.vocab_size)
            count = 1 if config.lm_head == "one" else config.num_heads
            self.lm_heads = nn.Parameter(torch.zeros(count, config.output_size, tokens))

    def make_blocks(self) -> None:
        """Create the heads' modules between the backbone's hidden state and the LM head."""
        block = SquareBlock if self.config.block == "square" else MLPBlock
        self.blocks = nn.ModuleList(block(self.config) for _ in range(self.config.num_layers))

    def start_from(self, lm_head_weight_VH: Tensor) -> None:
        """Copy the weight [V, H] of the backbone's LM head into the LM head of each head, as the start of training."""
        if self.lm_heads is not None:
            with torch.no_grad():
                rows = slice(None) if self.vocabulary is None else self.vocabulary.to(lm_head_weight_VH.device)
                self.lm_heads.copy_(lm_head_weight_VH[rows].T)

    def set_dropout(self, rate: float) -> None:
        """Set the dropout rate of the blocks' outputs (residual dropout: Vaswani et al. 2017, section 5.4).

        Prefix layers have no dropout. Raise RequestError for heads of the original Hydra, which have none at all."""
        found = [module for module in self.modules() if isinstance(module, nn.Dropout)]
        if not found:
            raise RequestError(f"training.dropout: heads of kind {self.config.kind} have no dropout; leave it out")
        for module in found:
            module.p = rate

    def join(self, hidden: Tensor) -> Tensor:
        """Join the hidden states [..., E] of several layers of the backbone to one feature [..., H].

        Heads that read only the last hidden state (E = H) return it unchanged."""
        return hidden

    def embed(self, ids: Tensor, backbone_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the input embeddings [..., H] of token ids [...]: the heads' own ones, else the backbone's.

        They do not learn. The result has the heads' device and dtype. `backbone_embed` is `Backbone.embed`."""
        with torch.no_grad():
            return backbone_embed(ids).to(self.device, self.dtype)

    def read(self, hidden: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Join the hidden states [B, T, E] of whole texts, run the prefix layers on them, and return their output.

        A position attends to itself and to earlier positions of its document (`document_ids` [B, T]). Heads without
        prefix layers that read one layer return the hidden states unchanged."""
        hidden = self.join(hidden)
        if self.prefix is None:
            return hidden
        return self.prefix(hidden, position_ids, visible(hidden.shape[1], document_ids, hidden.device)[:, None])

    def inputs(
        self,
        hidden: Tensor,
        input_ids: Tensor,
        embed: Callable[[Tensor], Tensor],
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        place: Tensor | None = None,
        num_heads: int | None = None,
    ) -> HeadInputs:
        """Compute the inputs of the heads at positions of whole texts.

        Args:
            hidden: [B, T, E] the backbone's hidden states, of one layer or of several.
            input_ids: [B, T or more] token ids of the texts. They can continue after the last hidden state.
            embed: the function from token ids to the backbone's input embeddings (`Backbone.embed`).
            position_ids, document_ids: [B, T]; by default each row is one document that starts at position 0.
            place: [R] indices of the selected positions in the flattened [B * T]; by default all positions, as [B, T].
            num_heads: the number of heads that will run; all heads by default."""
        hidden = hidden.to(self.device, self.dtype)
        length = hidden.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden.device).expand(len(hidden), -1)
        read = self.read(hidden, position_ids, document_ids)
        ids = following_ids(input_ids, num_heads or self.config.num_heads)[:, :length]  # [B, T, K]
        context_kv = following = None
        if isinstance(self, AttendsToText):
            token = self.embed(ids[..., 0], embed) if self.reads_pairs else read
            seen = visible(length, document_ids, hidden.device)
            kv = self.project_kv(read, token, position_ids, seen=seen)
            # A position attends to earlier positions of its document. If keys are of pairs, head 0 adds the key of the
            # position itself; else the text has it, and the draft begins at the token after the position.
            earlier = visible(length, document_ids, hidden.device, before=int(self.reads_pairs))
            positions = position_ids if place is None else position_ids.flatten()[place]
            positions = positions if self.reads_pairs else positions + 1
            context_kv = self.context_kv(kv, earlier, positions, place)
        if place is not None:
            read, ids = read.flatten(0, 1)[place], ids.flatten(0, 1)[place]
        if self.follows_path or self.reads_root:
            following = self.embed(ids, embed)
        return HeadInputs(read, following, context_kv)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        """Compute the inputs [k, ..., H] of the LM heads of the first k = `num_heads` heads (all by default)."""
        hidden, count = inputs.hidden, self.config.num_heads if num_heads is None else num_heads
        x_KMH = hidden.reshape(1, -1, hidden.shape[-1]).expand(count, -1, -1)
        for block in self.blocks:
            x_KMH = block(x_KMH, slice(count))
        return x_KMH.reshape(count, *hidden.shape)

    def logits(self, features: Tensor, lm_head: LMHead | None = None) -> Tensor:
        """Apply LM heads to the features [k, ..., H] of the first k heads; return logits [k, ..., V] (V tokens)."""
        if self.lm_heads is None:
            if lm_head is None:
                raise RequestError("these heads share the backbone's LM head; pass it as `lm_head`")
            return lm_head(features)
        count = min(len(self.lm_heads), len(features))  # 1, if all heads have one together
        logits = product(features.reshape(count, -1, features.shape[-1]), self.lm_heads, slice(count))
        return logits.reshape(*features.shape[:-1], logits.shape[-1])

    @property
    def edge_rows(self) -> Tensor | None:
        """The rows [N, r] of further columns of the LM head, if features have r numbers more (`medusa.heads.dflash`).

        The logits are then [x ; code] times [LM head row ; edge row], for features [x ; code]."""
        return None

    @property
    def is_confident(self) -> bool:
        """Whether the heads also predict how probably their guesses are accepted (`confidence`)."""
        return False

    def confidence(self, features: Tensor) -> Tensor:
        """Compute the logit [...] of the probability that a guess from features [..., H + r] is accepted.

        Only for heads that predict it (`is_confident`), as `confidence_weights`."""
        raise NotImplementedError

    def confidence_weights(self, features: Tensor) -> Tensor:
        """Return how much a confidence learns [...] from features [..., H + r]; on average 1."""
        raise NotImplementedError

    def forward(self, inputs: HeadInputs, lm_head: LMHead | None = None, num_heads: int | None = None) -> Tensor:
        """Compute the logits [k, ..., V] of the first k = `num_heads` heads (all by default) at positions [...].

        With a reduced `vocabulary` of N tokens the logits are [k, ..., N]. Heads with `lm_head: shared` need `lm_head`:
        the backbone's LM head, from `medusa.vocabulary.lm_head_for`."""
        return self.logits(self.features(inputs, num_heads), lm_head)


class IndependentHeads(MedusaHeads):
    """Heads of kind `medusa`, which other programs read and write, too (`medusa.checkpoints.published`)."""

    form = "medusa"
    published_form = "medusa.checkpoints.published:FORM"
