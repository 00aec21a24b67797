"""What scripts/peers.py compares: a counter of work for any method, and the decoding methods of other packages.

Each package is used through its public API as its documentation says. Its heads learn here, and the settings of its
decoding are the fastest of a few on texts to learn from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decode.bench.machine import stopwatch
from decode.bench.methods import Method, transformers_method
from decode.texts import OnStep, Prompts, Result, Seeds
from medusa.backbone import Backbone
from medusa.commands.models import Opened
from medusa.errors import RequestError, RunError, first_line
from medusa.files import Json

VERSIONS = {"economize": "0.3.2", "flashspec": "0.3.1"}
"""The other packages on PyPI, with the versions whose APIs are used here."""
LONGEST = 1024  # tokens of a text to learn from; the rest is cut off
TEXTS = 1  # of an optimizer step: more steps in the minutes, and no padding
FACTORS = (1, 3, 10)  # of the package's own learning rate, which is for long runs: the rates that are tried
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "mv": 0, "_linear_pointwise": 0}
"""Operations that are products of two matrices, with the place of the first one among the arguments."""
COMPOSED = ("linear", "matmul", "einsum")  # of such products
DRAFT_VOCABULARY = 8192  # frequent tokens that drafters choose from, of 49,152 of SmolLM2


class Counter(TorchDispatchMode):
    """Counts the work of decoding, in the same way for every method.

    Hooks count the calls of the model's decoder layers. All other matrix products are counted as PyTorch computes them.
    Matrices with more rows than any of a layer count as (parts of) LM heads, the others as a drafter's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        backbone = Backbone(model)
        self.layers, self.vocabulary = backbone.layers, backbone.vocab_size
        weights = [part.weight for part in self.layers[0].modules() if isinstance(part, nn.Linear)]
        self.widest, self.size = max(map(len, weights)), sum(weight.numel() for weight in weights)
        self.inside = 0
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.forwards = 0  # calls of the model's first layer
        self.applied = 0  # applications of a decoder layer to a token
        self.drafted = 0.0  # multiplications of a drafter's other layers, in applications of a decoder layer
        self.heads_read = 0.0  # rows of LM heads in all calls, in LM heads of the model
        self.vectors = 0.0  # products of an LM head and a vector, in whole LM heads

    def _enters(self, layer: nn.Module, args: object) -> None:
        self.inside += 1

    def _leaves(self, place: int, layer: nn.Module, args: object, out: Any) -> None:
        self.inside -= 1
        states = out if isinstance(out, Tensor) else out[0]
        self.applied += states.shape[:-1].numel()
        self.forwards += place == 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a product [B, M, K] x [B, K, N] and compute it."""
        name = func.overloadpacket.__name__
        if not self.inside and name in COMPOSED:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if not self.inside and name in PRODUCTS:
            left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            if name == "_linear_pointwise":  # of oneDNN, with a weight [N, K]
                self._count(1, left.shape[:-1].numel(), *right.shape[::-1])
            elif name == "mv":
                self._count(1, 1, *left.shape[::-1])
            else:
                self._count(left.shape[:-2].numel(), left.shape[-2], *right.shape[-2:])
        return func(*args, **(kwargs or {}))

    def _count(self, matrices: int, vectors: int, inputs: int, rows: int) -> None:
        if rows > self.widest:
            self.heads_read += matrices * rows / self.vocabulary
            self.vectors += matrices * vectors * rows / self.vocabulary
        else:
            self.drafted += matrices * vectors * inputs * rows / self.size

    def of(self, method: Method, prompts: Prompts) -> Json:
        """Decode the prompts one by one, and return what was counted for each new token.

        The first prompt is decoded twice, because a method may test the model, also when it finds hooks on it. The
        layers on all tokens of a prompt but its last are left out: no method can avoid them."""
        hooks = [layer.register_forward_pre_hook(self._enters) for layer in self.layers]
        hooks += [layer.register_forward_hook(partial(self._leaves, place)) for place, layer in enumerate(self.layers)]
        try:
            with self:
                method(prompts[:1])
                self.reset()
                new = sum(len(result.new_ids) for prompt in prompts for result in method([prompt]))
        finally:
            for hook in hooks:
                hook.remove()
        applied = self.applied - sum(len(prompt) - 1 for prompt in prompts) * len(self.layers)
        return {
            "tau": new / self.forwards,
            "layers": applied / new,
            "drafter_layers": self.drafted / new,
            "heads_read": self.heads_read / new,
            "head_vectors": self.vectors / new,
        }


class Text(NamedTuple):
    """A text of the model to learn from: its tokens, and the number of those of the prompt."""

    ids: list[int]
    prompt_tokens: int


def read_texts(file: Path) -> list[Text]:
    """Read the texts that scripts/real_model.py has written."""
    if not file.exists():
        raise RequestError(f"{file} does not exist; run scripts/real_model.py with --only text train calibrate first")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Text(line["input_ids"], line["prompt_tokens"]) for line in lines]


@dataclass
class Settings:
    """What methods of other packages are made from, and what was found out while they were made."""

    opened: Opened
    texts: list[Text]
    tuning: list[list[int]]  # prompts on which the settings of decoding are tried
    minutes: float  # CPU minutes to train each kind of heads
    trial_minutes: float  # CPU minutes to try each learning rate
    tell: Callable[[str], None]
    found: Json = field(default_factory=dict)

    def fastest(self, name: str, candidates: dict[str, Method]) -> Method:
        """Choose the candidate that decodes the prompts to tune on in the least time; remember all times and errors."""
        clock, seconds, failed = stopwatch(torch.device("cpu")), dict[str, float](), dict[str, str]()
        for setting, method in candidates.items():
            start = clock()
            try:
                tokens = sum(len(method([prompt])[0].new_ids) for prompt in self.tuning)
                seconds[setting] = (clock() - start) / tokens
            except Exception as error:  # whatever another package raises is a finding
                failed[setting] = first_line(error)
        if not seconds:
            raise RunError(f"{name} failed in every setting: {next(iter(failed.values()))}")
        chosen = min(seconds, key=lambda setting: seconds[setting])
        self.found.setdefault(name, {}).update(setting=chosen, seconds_per_token=seconds)
        if failed:
            self.found[name]["failed_settings"] = failed
        self.tell(f"{name}: {chosen}")
        return candidates[chosen]

    def ends(self) -> list[int]:
        """The end tokens of the model."""
        eos = self.opened.loaded.model.generation_config.eos_token_id
        return eos if isinstance(eos, list) else [eos] if eos is not None else []

    def method(self, decode: Callable[[Tensor, int], Any]) -> Method:
        """Make a method from a function that decodes one prompt [T] to a number of new tokens at most."""

        def decode_all(prompts: Prompts, on_step: OnStep | None = None, seeds: Seeds = None) -> list[Result]:
            limit = self.opened.settings.max_new_tokens
            return [Result(list(one), [int(n) for n in decode(torch.tensor(one), limit)]) for one in prompts]

        return decode_all


def stock_methods(given: Settings) -> Iterator[tuple[str, Method]]:
    """Make the assisted generation of transformers that needs no other model: prompt lookup."""
    model, settings, tokenizer = given.opened.loaded.model, given.opened.settings, given.opened.loaded.tokenizer
    tried = {
        f"{n} tokens": transformers_method(model, settings, tokenizer, prompt_lookup_num_tokens=n) for n in (3, 5, 10)
    }
    yield "transformers: prompt lookup", given.fastest("transformers: prompt lookup", tried)


def flashspec_methods(given: Settings) -> Iterator[tuple[str, Method]]:
    """Make the methods of flashspec that need no draft model."""
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel

    model = given.opened.loaded.model
    target = TargetModel("target", torch.device("cpu"), model.dtype, model=model)

    def lookup(gamma: int) -> Method:
        config = FlashSpecConfig(
            device="cpu",
            drafter_strategy="bandit",
            bandit=BanditConfig(n_arms=1),
            eos_token_ids=tuple(given.ends()),
            sampling=SamplingConfig(temperature=0.0, gamma=gamma),
        )
        engine = SpeculativeEngine(config, [NgramDrafter()], target)

        def decode(prompt: Tensor, limit: int) -> list[int]:
            found = engine.generate(prompt[None], max_new_tokens=limit)
            return found.output_ids[0, : found.n_tokens_generated].tolist()

        return given.method(decode)

    name = "flashspec: prompt lookup"
    yield name, given.fastest(name, {f"gamma {gamma}": lookup(gamma) for gamma in (2, 4, 6, 10)})


def economize_methods(given: Settings) -> Iterator[tuple[str, Method]]:
    """Train the heads of economize, and make its methods; a kind that fails is remembered with its error."""
    import economize
    from economize.techniques.eagle3 import Eagle3Config
    from economize.techniques.frspec import FRSpecConfig, frequency_order
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig
    from economize.techniques.medusa import MedusaConfig

    base = given.opened.loaded.model
    depth, size = len(Backbone(base).layers), Backbone(base).vocab_size
    counted = frequency_order([torch.tensor(text.ids) for text in given.texts], size)
    frequent = tuple(counted[: min(DRAFT_VOCABULARY, size)].tolist())

    def candidate(
        config: Any, state: dict[str, Tensor] | None, inner: Sequence[str], cycle: int, sure: float | None
    ) -> Method:
        model = economize.apply(base, config)
        technique: Any = model.techniques[config.technique]
        for name in inner:  # the trained drafter lies in the techniques that wrap it
            technique = getattr(technique, name)
        if state is not None:
            technique.load_state_dict(state)
        decoding = economize.DecodeConfig(cycle_length=cycle, min_confidence=sure)
        return given.method(
            lambda prompt, limit: model.decode(prompt, limit, decoding=decoding, stop=given.ends()).tokens.tolist()
        )

    def chains(config: Any, state: dict[str, Tensor] | None, inner: Sequence[str] = ()) -> dict[str, Method]:
        settings = [(cycle, sure) for cycle in (2, 4, 6) for sure in (None, 0.4)]
        return {f"cycle {n}, confidence {sure}": candidate(config, state, inner, n, sure) for n, sure in settings}

    def limited(config: Any) -> Any:
        return FRSpecConfig(drafter=config, vocab_size=len(frequent), token_ids=frequent)

    lookups = {f"cycle {n}": candidate(LookupConfig(), None, (), n, None) for n in (4, 7, 11)}
    yield "economize: prompt lookup", given.fastest("economize: prompt lookup", lookups)

    name, config = "economize: Medusa", MedusaConfig(head="shared")
    if (state := learned(given, name, config)) is not None:
        tried = chains(config, state)
        for tree, cycle in (("small", 6), ("mc_sim_7b_63", 5)):
            tried[f"tree {tree}"] = candidate(MedusaConfig(head="shared", tree=tree), state, (), cycle, None)
        yield name, given.fastest(name, tried)

    name, config = "economize: EAGLE-3", Eagle3Config(draft_vocab=len(frequent))
    if (state := learned(given, name, config, lambda technique: technique.set_draft_vocab(frequent))) is not None:
        yield name, given.fastest(name, chains(config, state))

    # the layers of its published figures, which are of a model of 24 layers
    name, layer = "economize: jump", round(depth * 17 / 24)
    config = economize.JumpConfig(
        target_layer=layer - 1, source_layer=layer, exit_layer=layer, predictor="linear", adaptation="full"
    )
    if (state := learned(given, name, config)) is not None:
        yield name, given.fastest(name, chains(limited(config), state, ["inner"]))
        name = "economize: jump and prompt lookup"
        yield name, given.fastest(name, chains(HybridConfig(fallback=limited(config)), state, ["fallback", "inner"]))


def learned(
    given: Settings, name: str, config: Any, prepare: Callable[[Any], object] = lambda technique: None
) -> dict[str, Tensor] | None:
    """Train a drafter of economize for the CPU minutes, at the best of three rates; return its state.

    The rate has the least loss in the second half of a trial, in which all rates read the same texts."""
    import economize
    from economize.train import Example, SequenceSource, default_objective, fit

    examples = []
    for ids, prompt_tokens in given.texts:
        mask = torch.zeros(len(ids), dtype=torch.long)
        mask[prompt_tokens - 1 : -1] = 1  # where the next token is one of the answer
        examples.append(Example(torch.tensor(ids[:LONGEST]), mask[:LONGEST]))

    def run(rate: float, steps: int) -> tuple[Any, list[float], float]:
        torch.manual_seed(0)
        model = economize.apply(given.opened.loaded.model, config)
        prepare(model.techniques[config.technique])
        start, warmup = process_time(), max(steps // 20, 1)
        source = SequenceSource(examples, TEXTS, seed=0)
        done = fit(model, source, lr=rate, steps=steps, warmup_steps=warmup, seed=0)
        given.opened.loaded.model.eval()
        return model.techniques[config.technique], done.losses, (process_time() - start) / steps

    try:
        own = default_objective(economize.apply(given.opened.loaded.model, config)).defaults.lr
        seconds, losses = run(own, 1)[2], dict[float, float]()
        for rate in (own * factor for factor in FACTORS):
            _, trial, seconds = run(rate, max(round(60 * given.trial_minutes / seconds), 2))
            half = trial[len(trial) // 2 :]
            losses[rate] = sum(half) / len(half) if all(map(math.isfinite, half)) else math.inf
            given.tell(f"{name}: rate {rate:g}, loss {losses[rate]:.3f}, {seconds:.1f} s a step")
        best = min(losses, key=lambda rate: losses[rate])
        steps = max(round(60 * given.minutes / seconds), 2)
        technique, _, seconds = run(best, steps)
    except Exception as error:  # whatever another package raises is a finding
        given.found[name] = {"failed": first_line(error)}
        return None
    about = {"rate": best, "trials": losses, "steps": steps, "cpu_minutes": steps * seconds / 60}
    given.found[name] = about | {"parameters": sum(part.numel() for part in technique.parameters())}
    return {key: value.detach().clone() for key, value in technique.state_dict().items()}


METHODS = {"economize": economize_methods, "flashspec": flashspec_methods}
