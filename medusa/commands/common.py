"""Options that several commands have, and what they stand for."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from decode.drafters.base import DrafterConfig, DrafterFactory
    from decode.settings import Settings
    from decode.strategies.contrastive import Amateur, Contrast
    from medusa.heads.independent import MedusaHeads
    from medusa.loading import Loaded, LoadOptions
    from medusa.records.record import Record
    from medusa.tree import Layout


def add_backbone(
    parser: argparse.ArgumentParser, heads: bool = True, required: bool = True, backbone_required: bool = True
) -> None:
    """Options of the models; `required`: of --heads."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--backbone", required=backbone_required, metavar="B", help="a local folder, a Hub id, or demo (embedded)"
    )
    if heads:
        group.add_argument(
            "--heads", required=required, metavar="H", help="a local folder, a Hub id, or demo (shipped)"
        )
    group.add_argument("--revision", help="of the backbone on the Hub")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the backbone")


def add_machine(parser: argparse.ArgumentParser, json: bool = True) -> None:
    """`json`: there are results to be written at the end."""
    group = parser.add_argument_group("machine and output")
    group.add_argument(
        "--dtype", help="float32 (default on a CPU), bfloat16, float16 or float64; a GPU: the checkpoint's"
    )
    group.add_argument(
        "--device", help="cpu, cuda, cuda:1, mps, or auto to spread layers over all (default: a GPU if any)"
    )
    group.add_argument("--attention", help="sdpa (default where the model offers it) or eager")
    group.add_argument("--seed", type=seed, default=0, help="of everything random (default: 0)")
    group.add_argument("--threads", type=positive, help="CPU threads (default: PyTorch's choice); fewer can be faster")
    if json:
        group.add_argument("--json", metavar="FILE", help="write machine-readable results")
    group.add_argument("--quiet", action="store_true", help="no progress, no table")


def add_prompts(parser: argparse.ArgumentParser, text: bool = True) -> None:
    group = parser.add_argument_group("prompts")
    if text:
        group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    group.add_argument(
        "--prompts", metavar="FILE", help=".jsonl, .json, .txt (one a line), .parquet, a folder or a Hub dataset id"
    )
    group.add_argument("--max-prompts", type=positive, metavar="N", help="the first N prompts only")
    group.add_argument("--split", default="train", help="of a Hub dataset (default: train)")


def add_generation(
    parser: argparse.ArgumentParser, max_new_tokens: int = 256, tree: bool = True, batch_size: int | None = 1
) -> None:
    """How to write; `batch_size`: the default, or `None` where it is one text at a time."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K most probable; 0 is off")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample within this mass; 1 is off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="sample above P of the best; 0 is off")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1 avoids repeats")
    group.add_argument("--stop", action="append", default=[], metavar="STRING", help="end before it; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="write on after the end of the text")
    add_compile(group)
    if batch_size is None:
        parser.set_defaults(batch_size=1)
    else:
        told = "prompts at a time (default: %(default)s)"
        group.add_argument("--batch-size", type=positive, default=batch_size, metavar="N", help=told)
    if tree:
        group.add_argument(
            "--acceptance",
            help="greedy (default at temperature 0) and rejection (default above) lose nothing; "
            "typical and typical-sampled are lossy, and at temperature 0 topk:K and distance:D",
        )
        group.add_argument(
            "--draft", default="topk", help="topk (default), the heads' best guesses, or sample, draws from the heads"
        )
        add_stop_drafting(group)
        group.add_argument("--epsilon", type=float, default=0.09, help="of typical acceptance (default: 0.09)")
        group.add_argument("--delta", type=float, default=0.3, help="of typical acceptance (default: 0.3)")
        group.add_argument(
            "--tree",
            metavar="FILE|NAME",
            help="auto, chain, topk:3,3,2, a name or a file (default: the heads' own, else auto)",
        )


def add_compile(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compile",
        action="store_true",
        help="whole steps by torch.compile, CUDA graphs on a GPU; the first step takes seconds to minutes",
    )


def add_stop_drafting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stop-drafting",
        type=float,
        default=0.0,
        metavar="P",
        help="with --tree dynamic:N: draft no node that the heads believe in less than P, nor under it; 0 is off",
    )


def add_listening(parser: argparse.ArgumentParser, port: int) -> argparse._ArgumentGroup:
    """Options of commands that answer over the network; `None` is what was not asked for."""
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host", help="address to listen at (default: 127.0.0.1, this machine alone; 0.0.0.0: everybody)"
    )
    group.add_argument("--port", type=positive, metavar="N", help=f"default: {port}")
    return group


def add_drafter(parser: argparse.ArgumentParser, several: bool = False) -> None:
    parser.add_argument(
        "--drafter",
        metavar="NAME[:OPTIONS]",
        action="append" if several else "store",
        help="who guesses ahead: heads (default), blockwise, model:NAME, ngram, rest:DIR, lookahead, mix:A+B "
        "(docs/drafters.md)" + ("; repeatable: the first is `medusa`, the others take part" if several else ""),
    )


def add_amateur(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("contrastive decoding (docs/strategies.md)")
    group.add_argument(
        "--amateur",
        metavar="B",
        help="a small model of the same tokenizer, or demo: the text follows what the backbone says more than it does",
    )
    group.add_argument(
        "--contrast-alpha",
        type=float,
        metavar="A",
        help="leave out words less probable than A times the most probable one (default: 0.1)",
    )
    group.add_argument(
        "--contrast-beta",
        type=float,
        metavar="B",
        help="(1 + B) times the backbone's log-probability less B times the amateur's (default: just their difference)",
    )
    group.add_argument(
        "--amateur-temperature", type=float, metavar="T", help="of the amateur's own distribution (default: 1)"
    )


def require_listening(host: str, port: int) -> None:
    """Raises:
    RequestError: nobody can listen there; said before models are loaded."""
    import socket

    if port >= 2**16:
        raise RequestError(f"--port is {port}; it must be a whole number from 1 to {2**16 - 1}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        raise RequestError(
            f"cannot listen at {host}, port {port} ({error.strerror or error}); choose another --port or --host"
        ) from None


def require_extra(extra: str, *modules: str) -> None:
    """Raises:
    RequestError: a library of the optional extra is not installed."""
    from importlib.util import find_spec

    if lacking := [module for module in modules if find_spec(module) is None]:
        raise RequestError(f"this needs {' and '.join(lacking)}, which comes with: pip install 'medusa-heads[{extra}]'")


def allowed_hosts(host: str) -> list[str]:
    """What a request's Host header may say: of a server for this machine alone only this machine, so that no page
    from elsewhere reaches it under a name of its own (DNS rebinding)."""
    return ["127.0.0.1", "localhost", "[::1]"] if is_loopback(host) else ["*"]


def url_of(host: str, port: int) -> str:
    """Where a server is found, and by whom if not from this machine alone."""
    if is_loopback(host):
        return f"http://localhost:{port}"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}, for everybody who reaches this machine"


def is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def seed(text: str) -> int:
    """A seed that every generator takes, for argparse."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def console(args: argparse.Namespace) -> Console:
    """Where progress and tables for people go: standard error, or nowhere with --quiet."""
    from rich.console import Console

    return Console(stderr=True, quiet=args.quiet)


def warming_up(args: argparse.Namespace) -> Status:
    """What is shown while the first tokens are written."""
    told = "compiling the steps, which takes half a minute or more" if args.compile else "warming up"
    return console(args).status(told)


def output_console(args: argparse.Namespace) -> Console:
    """Where results for people go: standard output, or nowhere with --quiet."""
    from rich.console import Console

    return Console(quiet=args.quiet)


@contextlib.contextmanager
def progress_bars(args: argparse.Namespace) -> Iterator[Callable[[str, int], Callable[..., None]]]:
    """Progress bars on standard error: call with a title and a total; the result advances the bar, by 1 or by `n`."""
    from rich.progress import Progress

    with Progress(console=console(args), disable=args.quiet, transient=True) as progress:

        def start(title: str, total: int) -> Callable[..., None]:
            task = progress.add_task(title, total=total)
            return lambda n=1: progress.advance(task, n)

        yield start


def settings_of(args: argparse.Namespace) -> Settings:
    """Checked generation settings: called before any model is loaded."""
    from decode.settings import Settings

    return Settings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=tuple(args.stop),
        acceptance=getattr(args, "acceptance", None),
        epsilon=getattr(args, "epsilon", 0.09),
        delta=getattr(args, "delta", 0.3),
        draft=getattr(args, "draft", "topk"),
        stop_drafting=getattr(args, "stop_drafting", 0.0),
        ignore_eos=args.ignore_eos,
        compile=args.compile,
    )


def prepare_machine(args: argparse.Namespace) -> None:
    """Threads, seed, and transformers' own noise switched off."""
    import torch
    import transformers

    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.set_seed(args.seed)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def open_backbone(args: argparse.Namespace) -> Loaded:
    from medusa.loading import load_backbone

    return load_backbone(args.backbone, load_options(args))


def load_options(args: argparse.Namespace) -> LoadOptions:
    """The options of `add_backbone` and `add_machine` that say how to load the backbone."""
    from medusa.loading import LoadOptions

    placed = {name: getattr(args, name, None) for name in ("dtype", "device", "attention")}
    return LoadOptions(**placed, revision=args.revision, trust_remote_code=args.trust_remote_code)


def open_for_text(
    args: argparse.Namespace, plan: DrafterConfig | None, use: str
) -> tuple[Loaded, PreTrainedTokenizerBase]:
    """The backbone and its tokenizer, for a `use` that is of texts, drafted for as `plan` says.

    Raises:
        RequestError: a backbone that can hold no tree, with a plan; or one without a tokenizer."""
    from medusa.backbone import require_tree_support

    prepare_machine(args)
    loaded = open_backbone(args)
    if plan is not None:
        require_tree_support(loaded.model)
    if loaded.tokenizer is None:
        raise RequestError(f"{args.backbone} has no tokenizer, and {use}; put its tokenizer beside it")
    return loaded, loaded.tokenizer


def contrast_of(args: argparse.Namespace) -> Contrast | None:
    """How the backbone is to be contrasted; `None` without an amateur. Called before any model is loaded.

    Raises:
        RequestError: a constant out of range, or without an amateur to belong to; or steps are to be compiled."""
    from decode.settings import require_uncontrasted
    from decode.strategies.contrastive import Contrast

    named = {"contrast-alpha": "alpha", "contrast-beta": "beta", "amateur-temperature": "temperature"}
    given = {name: getattr(args, name.replace("-", "_")) for name in named}
    asked = {named[name]: value for name, value in given.items() if value is not None}
    if args.amateur is None:
        if asked:
            name = next(name for name, value in given.items() if value is not None)
            raise RequestError(f"--{name} belongs to contrastive decoding; give --amateur B, or leave it out")
        return None
    require_uncontrasted(args.compile, args.amateur)
    return Contrast(**asked)


def with_amateur(args: argparse.Namespace, loaded: Loaded, settings: Settings) -> Settings:
    """The settings with the amateur asked for, loaded.

    Raises:
        RequestError: an amateur that is none, or of another tokenizer."""
    from decode.drafters.base import DrafterContext
    from decode.drafters.small_model import load_small_model
    from decode.strategies.contrastive import Amateur

    contrast = contrast_of(args)
    if contrast is None:
        return settings
    trusts = args.trust_remote_code
    materials = DrafterContext(loaded.model, tokenizer=loaded.tokenizer, name=args.backbone, trust_remote_code=trusts)
    model = load_small_model(args.amateur, materials, "amateur")
    return replace(settings, amateur=Amateur(model, contrast, args.amateur))


def require_fitting(prompts: list[list[int]], loaded: Loaded, amateur: Amateur | None) -> None:
    """Raises:
    RequestError: a prompt that has no room in a model's context, or holds an id that none of them knows."""
    from decode.request import require_fitting
    from medusa.backbone import Backbone

    require_fitting(prompts, Backbone(loaded.model))
    if amateur is not None:
        require_fitting(prompts, Backbone(amateur.model), "amateur")


def plan_of(args: argparse.Namespace, spec: str | None, alone: bool = True) -> DrafterConfig:
    """The drafter asked for, by default the heads; `alone`: no other drafter is, to which --tree could belong.

    Raises:
        RequestError: no such drafter, no --heads where they are needed, or --tree, --compile or drawn drafts where it
            has none."""
    from decode.drafters import parse
    from decode.drafters.base import require_no_tree

    plan = parse(spec or "heads")
    if args.compile and not plan.compiles:
        raise RequestError(f"drafter {spec} cannot be compiled: it works on the host; leave out --compile")
    if getattr(args, "draft", "topk") == "sample" and not plan.can_draw:
        raise RequestError(f"drafter {spec} has no distribution to draw its guesses from; use --draft topk")
    if not plan.takes_tree and alone:
        require_no_tree(args.tree, args.stop_drafting)
    if plan.needs_heads and args.heads is None:
        raise RequestError(f"no heads: drafter {spec or 'heads'} needs --heads H")
    return plan


def open_source(
    args: argparse.Namespace, loaded: Loaded, plan: DrafterConfig, settings: Settings | None = None
) -> DrafterFactory:
    """The drafter that `plan` stands for, with the models that it takes.

    `settings`: what a tree is calibrated for where none is given; without them none is calibrated.

    Raises:
        RequestError: something that it needs does not fit the backbone."""
    from decode.drafters import drafter_factory
    from decode.drafters.base import DrafterContext

    heads, tree, stop_drafting = None, None, 0.0
    if plan.needs_heads:
        heads = open_heads(args, loaded)
    if plan.takes_tree:
        assert heads is not None, "a tree is of heads"
        stop_drafting = args.stop_drafting
        tree = args.tree if settings is None else choose_tree(args, loaded, heads, settings)
    materials = DrafterContext(
        loaded.model, heads, tree, loaded.tokenizer, args.backbone, args.trust_remote_code, stop_drafting
    )
    return drafter_factory(plan, materials)


def drafter_json(spec: str | None, source: DrafterFactory | None) -> dict[str, Any]:
    """What a result says of its drafter: its name, the heads' tree if it has one, and how many nodes a draft has."""
    if source is None:
        return {"drafter": None, "tree": None, "nodes": None}
    tree = getattr(source, "tree", None)
    return {
        "drafter": spec or "heads",
        "tree": None if tree is None else tree.to_json(),
        "nodes": source.num_nodes,
    }


def check_models(args: argparse.Namespace, *plans: DrafterConfig) -> None:
    """See that all models and the tree fit before the backbone's weights are loaded: a quick no to a wrong request."""
    from decode.drafters.heads import require_drawable, require_sizes
    from decode.drafters.trained_heads import HeadsDrafterConfig
    from medusa.heads.independent import MedusaHeads
    from medusa.loading import load_config

    config = load_config(args.backbone, load_options(args))
    for plan in plans:
        plan.check(config)
    if getattr(args, "amateur", None) is not None:
        _check_amateur(args, config)
    if getattr(args, "heads", None) is None or (plans and not any(plan.needs_heads for plan in plans)):
        return
    heads, text = MedusaHeads.from_pretrained(args.heads), config.get_text_config(decoder=True)
    require_sizes(heads.config, text.hidden_size, text.vocab_size)
    asked = getattr(args, "tree", None), getattr(args, "stop_drafting", 0.0)
    for tree in [tree for plan in plans or (HeadsDrafterConfig(),) for tree in plan.layouts(heads, *asked)]:
        tree.require_fit(heads.config.num_heads, heads.config.draft_vocab_size(text.vocab_size))
        if getattr(args, "draft", None) == "sample":
            require_drawable(tree)


def _check_amateur(args: argparse.Namespace, config: PretrainedConfig) -> None:
    """Raises:
    RequestError: it is no model, or its vocabulary or tokenizer is not that of the backbone, whose `config` this is."""
    from decode.drafters.small_model import require_same_tokenizer, require_same_vocabulary, small_model_path
    from medusa.loading import LoadOptions, load_config, load_tokenizer

    path, options = small_model_path(args.amateur), LoadOptions(trust_remote_code=args.trust_remote_code)
    require_same_vocabulary(args.amateur, load_config(path, options), config, "amateur")
    theirs, ours = load_tokenizer(path, options), load_tokenizer(args.backbone, load_options(args))
    require_same_tokenizer(args.amateur, theirs, ours, args.backbone, "amateur")


def open_heads(args: argparse.Namespace, loaded: Loaded) -> MedusaHeads:
    """Heads for `loaded`, checked against it; a backbone other than theirs gives a warning."""
    from decode.drafters.heads import require_sizes
    from medusa.backbone import Backbone
    from medusa.fingerprint import differs
    from medusa.heads.independent import MedusaHeads

    backbone = Backbone(loaded.model)
    heads = MedusaHeads.from_pretrained(args.heads, dtype=backbone.dtype, device=backbone.head_weight.device)
    require_sizes(heads.config, backbone.hidden_size, backbone.vocab_size)
    if differs(loaded.model, heads.config.backbone):
        warn(
            f"these heads were trained for {heads.config.backbone.get('name')}, a backbone of the same shape but not "
            f"this {loaded.name}; the text stays right, but few guesses will be"
        )
    return heads


def heads_folder(name: str) -> Path | None:
    """The folder of heads that is the user's own; none for shipped heads and those from the Hub."""
    return Path(name) if name != "demo" and Path(name).is_dir() else None


def choose_tree(args: argparse.Namespace, loaded: Loaded, heads: MedusaHeads, settings: Settings) -> Layout:
    """The tree asked for, else the one saved with the heads, else `auto`: the calibrated one for this situation.

    Where nothing was calibrated, that is done now, on text of the backbone's own and never on the run's prompts.

    Raises:
        RequestError: no such tree, or the heads cannot fill it."""
    from decode.bench.calibration.calibrate import calibrate
    from decode.bench.calibration.recording import own_texts
    from decode.bench.calibration.stored import files_for, situation, store, stored, stored_temperatures
    from decode.drafters.layouts import DynamicTree, resolve_tree
    from decode.tree_check import require_tree_forward

    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    asked: DynamicTree | None = None
    if args.tree != "auto" and (args.tree is not None or heads.config.tree):
        tree = resolve_tree(args.tree, heads)
        tree.require_fit(heads.config.num_heads, heads.config.draft_vocab_size(vocab_size))
        if not isinstance(tree, DynamicTree):
            return tree
        asked = tree
    require_tree_forward(loaded.model)
    files = files_for(heads_folder(args.heads))
    if asked is not None and (fitted := stored_temperatures(files, heads)) is not None:
        return replace(asked, temperatures=fitted)
    found = stored(files, situation(loaded.model, heads, settings, args.batch_size))
    place: Path | None = None
    if found is None:
        with console(args).status("choosing a tree"):
            texts = own_texts(loaded.model, settings, loaded.bos_token_id)
            found = calibrate(loaded.model, heads, texts, settings, args.batch_size, rounds=2)
        place = store(files, found)
    kept = f"; calibrated now, kept in {place}" if place else ""
    if asked is not None:  # of the calibration only the temperatures
        if not args.quiet:
            print(f"tree: dynamic, {asked.num_nodes} nodes{kept}", file=sys.stderr)
        return replace(asked, temperatures=tuple(found.temperatures))
    best = found.best
    if not args.quiet:
        kind = "dynamic, " if best.dynamic else ""
        print(f"tree: {kind}{best.nodes} nodes, predicted tau {best.tau:.2f}{kept}", file=sys.stderr)
    return found.tree


def read_prompts(args: argparse.Namespace) -> list[Record]:
    """The prompts asked for, read and checked.

    Raises:
        RequestError: none given, or one that cannot be read.
    """
    from itertools import islice

    from medusa.records.record import Record
    from medusa.records.sources import read_records

    given = getattr(args, "prompt", [])
    for text in given:
        if not text:
            raise RequestError("the prompt is empty; give at least one token")
    records = [Record(f"--prompt {number}", text=text, is_prompt=True) for number, text in enumerate(given, 1)]
    if args.prompts:
        separator = getattr(args, "document_separator", None)
        records += list(islice(read_records(args.prompts, split=args.split, separator=separator), args.max_prompts))
    if not records:
        raise RequestError("no prompts: give --prompts FILE" + (" or --prompt TEXT" if hasattr(args, "prompt") else ""))
    return records


def batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def how_it_went(tokens: int, seconds: float, tokens_per_step: float) -> str:
    return f"{tokens} tokens, {tokens / max(seconds, 1e-9):.0f} a second, {tokens_per_step:.2f} a step"


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def hint_at_bfloat16(args: argparse.Namespace, loaded: Loaded) -> None:
    """Say what a float32 run on a CPU with fast bfloat16 leaves on the table; small models gain nothing by it."""
    import torch

    from decode.bench.machine import has_fast_bfloat16

    model = loaded.model
    slow = model.dtype == torch.float32 and model.device.type == "cpu" and model.num_parameters() > 20_000_000
    if slow and has_fast_bfloat16() and not args.quiet:
        print(
            "hint: this CPU is fast at bfloat16, where a step of 8 nodes costs about 1.2 plain tokens instead of 1.8: "
            "try --dtype bfloat16",
            file=sys.stderr,
        )


def warn_if_useless(tokens: int, tokens_per_step: float) -> None:
    """Say in words what a tau near 1 means."""
    if tokens > 64 and tokens_per_step < 1.15:
        warn("hardly any guess was right: these heads do not fit this backbone (another one, or another dtype?)")


def write_results(args: argparse.Namespace, content: Any) -> None:
    from medusa.files import write_json

    if args.json:
        write_json(Path(args.json), content)


def check_output(path: str | None) -> None:
    """Raises:
    RequestError: results could not be written there; said before the work, not after it."""
    if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise RequestError(f"cannot write {path}: it is a folder, or lies in one that does not exist")
