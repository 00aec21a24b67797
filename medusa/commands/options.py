"""Options that several commands share. The options of a command are checked before any model is loaded."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from decode.settings import Settings
from decode.strategies.options import ContrastOptions, require_uncontrasted
from medusa.commands.effects import require_no_input, require_revisions
from medusa.commands.inputs import require_drafter
from medusa.commands.prompting import raw_option, template_option
from medusa.errors import OptionError, RequestError
from medusa.files import require_writable, write_json
from medusa.options import QUANTIZATIONS, LoadOptions, Options, count, group, option
from medusa.places import may_be_on_hub, require_backbone, require_heads
from medusa.records.record import Record
from medusa.records.sources import read_records, require_records, require_splits
from medusa.shipped import require_tree

if TYPE_CHECKING:
    from rich.console import Console

    from medusa.loading import BackboneFiles
    from medusa.progress import Stage


SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # options that only change sampling, with the values that do not
Item = TypeVar("Item")
PAGE_SUFFIXES = (".html", ".htm")


class Models(Options):
    backbone: str = option(
        "",
        "use this backbone: a folder, a GGUF file, a Hub id, or demo (shipped) (default: the one in the heads' config)",
        metavar="B",
        brief="use this backbone (default: the heads' own)",
        exists=require_backbone,
    )
    heads: str | None = option(
        None,
        "use these heads: a folder, a Hub id, or demo (shipped)",
        metavar="H",
        brief="use these heads: a folder, a Hub id, or demo",
        exists=require_heads,
    )
    drafter: str | None = option(
        None,
        "draft with heads (default), blockwise, mtp, model:NAME, ngram, rest:DIR, lookahead or mix:A+B "
        "(docs/drafters.md)",
        metavar="NAME",
        brief="draft with heads (default), ngram, model:B or others",
        exists=require_drafter,
    )
    tree: str | None = option(
        None,
        "arrange the heads' guesses in this tree: auto, chain, topk:3,3,2, dynamic:N, the name of a shipped tree, or a "
        "file (default: the tree saved with the heads, else auto)",
        metavar="FILE|NAME",
        brief="use this tree: auto, chain, topk:3,2, ... or a file",
        exists=require_tree,
    )


class ModelsWithHeads(Models):
    """The models of a command about the guesses of heads: trained heads, or the backbone's own MTP layer."""

    drafter: str | None = option(
        None,
        "take the guesses of heads (default) or of mtp, the layer for multi-token prediction that comes with the "
        "backbone (docs/drafters.md)",
        metavar="NAME",
        brief="heads (default), or mtp: the backbone's own layer",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = (self.drafter or "heads").partition(":")[0]
        if name not in ("heads", "mtp"):
            raise RequestError(f"--drafter is {self.drafter!r}, which has no heads; give heads or mtp")
        if name == "heads" and self.heads is None:
            raise RequestError("HEADS is missing; give heads, or --backbone B --drafter mtp")
        if name == "mtp" and self.heads is not None:
            raise RequestError(
                f"--drafter {self.drafter} takes the guesses of the backbone's own layer, not those of {self.heads}; "
                "leave out --drafter, or give --backbone B instead of the heads"
            )


class Prompts(Options):
    prompt: tuple[str, ...] = option((), "use this prompt; repeatable", metavar="TEXT")
    prompts: str | None = option(
        None,
        "read a .jsonl, .json, .parquet or .txt (one per line) file, a folder, a Hub dataset, or demo (shipped)",
        metavar="FILE",
        brief="read prompts from a file, a folder or a Hub dataset",
        exists=require_records,
    )
    max_prompts: int | None = count(None, "use only the first N prompts")
    skip_long: bool = option(False, "leave out prompts that are longer than the model's context")
    split: str = option("train", "read this split of a Hub dataset", metavar="NAME")

    def check_given(self, names: Sequence[str]) -> None:
        if "split" in names:
            require_splits(self.prompts)
        if "max-prompts" in names and self.prompts is None:
            raise RequestError("--max-prompts counts prompts of --prompts FILE; add --prompts, or leave it out")

    def read(self) -> list[Record]:
        """Read the prompts of --prompt and --prompts; raise a `RequestError` if there is none, or one is empty."""
        if not all(self.prompt):
            raise RequestError("--prompt is empty; give at least one character")
        records = [Record(f"--prompt {n}", text=text, is_prompt=True) for n, text in enumerate(self.prompt, 1)]
        if self.prompts is not None:
            records += islice(read_records(self.prompts, split=self.split), self.max_prompts)
        if not records:
            raise RequestError("there are no prompts; give --prompts FILE or --prompt TEXT")
        return records


class RuntimeOptions(Options):
    seed: int = option(
        0,
        "seed all random number generators with N",
        f"a whole number from 0 to {2**32 - 1}",
        lambda value: 0 <= value < 2**32,
        "N",
        brief="seed all random numbers with N",
    )
    threads: int | None = count(
        None,
        "use N CPU threads (default: PyTorch's choice; to decode large models, the fastest in a trial, unless --quiet)",
        brief="use N CPU threads",
    )

    def prepare(self) -> None:
        """Set the number of threads and the seed; switch off messages of transformers, and attention by cuDNN.

        cuDNN makes a plan for every length of keys (23 to 37 ms on an H100), and decoding changes it in every step. Its
        attention was also wrong without an error (pytorch#193893, #196678). The switch is global, so only commands set
        it, never the library."""
        import torch
        import transformers

        if self.threads:
            torch.set_num_threads(self.threads)
        torch.backends.cuda.enable_cudnn_sdp(False)
        transformers.set_seed(self.seed)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


class Output(Options):
    json: str | None = option(None, "write machine-readable results to FILE", metavar="FILE")
    quiet: bool = option(False, "print no progress and no tables")
    command_line: str = option("", "the whole command line, which is written into results", hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_writable(self.json, "--json")

    @property
    def continuing(self) -> str:
        """The command line without --overwrite, to continue this run later; empty if there is no command line."""
        words = shlex.split(self.command_line)
        return shlex.join(word for word in words if not (len(word) > 3 and "--overwrite".startswith(word)))

    @property
    def progress(self) -> Console:
        """The console for progress and notes: standard error, or nothing with --quiet."""
        from rich.console import Console

        return Console(stderr=True, quiet=self.quiet)

    @property
    def console(self) -> Console:
        """The console for tables and other results: standard output, or nothing with --quiet."""
        from rich.console import Console

        return Console(quiet=self.quiet)

    @contextlib.contextmanager
    def progress_bars(self) -> Iterator[Callable[[str, int], Callable[..., None]]]:
        """Show progress bars. Yield a function that starts a bar and returns a function that advances this bar.

        The second function takes the number of finished items, and optionally a new title for the bar."""
        from medusa.progress import ProgressLines

        with ProgressLines(*ProgressLines.get_default_columns(), quiet=self.quiet, transient=True) as progress:

            def start(title: str, total: int) -> Callable[..., None]:
                task = progress.add_task(title, total=total)
                return lambda n=1, title=None: progress.update(task, advance=n, description=title)

            yield start

    def track(self, items: Sequence[Item], title: str) -> Iterator[Item]:
        """Yield items, and show a progress bar that counts them."""
        with self.progress_bars() as start:
            advance = start(title, len(items))
            for item in items:
                yield item
                advance()

    def stage(self, message: str) -> contextlib.AbstractContextManager[Stage]:
        """Show a message while work of unknown length runs. The context's `update` changes the message."""
        from medusa.progress import stage

        return stage(message, self.quiet)

    def note(self, message: str) -> None:
        """Print a line on standard error, unless --quiet is given."""
        if not self.quiet:
            print(message, file=sys.stderr)

    @contextlib.contextmanager
    def written(self, results: Sequence[object], content: Callable[[], object]) -> Iterator[None]:
        """Write the `content` at the end of the context, also after an error or Ctrl-C if there are `results`."""
        try:
            yield
        except BaseException:
            if results:  # of the finished prompts
                self.write(content())
            raise
        self.write(content())

    def write(self, content: object) -> None:
        """Write results to the file of --json, if the user named a file."""
        if self.json:
            write_json(Path(self.json), content)


class Contrasting(ContrastOptions):
    amateur: str | None = option(
        None,
        "decode contrastively: prefer tokens that the backbone finds more probable than this small model does; "
        "both need the same tokenizer; demo is shipped",
        metavar="B",
        exists=require_backbone,
    )

    def check_given(self, names: Sequence[str]) -> None:
        if self.amateur is None and names:
            raise RequestError(f"--{names[0]} belongs to contrastive decoding; add --amateur B, or leave it out")


NO_CONTRAST = Contrasting()


class CommandOptions(Options):
    """Base class of the options of commands that decode. Each command's subclass adds, replaces or omits options."""

    by_position: ClassVar[tuple[str, ...]] = ("heads",)
    models: Models = group(Models, "models")
    load: LoadOptions = group(LoadOptions, "loading")
    settings: Settings = group(Settings, "generation")
    raw: bool | None = raw_option()
    template_option: tuple[str, ...] = template_option()
    batch_size: int = count(1, "decode N prompts at a time")
    contrasting: Contrasting = group(Contrasting, "contrastive decoding (docs/drafters.md)")
    runtime: RuntimeOptions = group(RuntimeOptions, "runtime")
    output: Output = group(Output, "output")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_uncontrasted(self.settings.compile, self.contrasting.amateur)
        require_revisions(self.models.backbone, self.load.revision)
        if (prompts := getattr(getattr(self, "prompts", None), "prompts", None)) and Path(prompts).is_file():
            require_no_input(self.output.json, "json", prompts=prompts)
        if not self.uses_typical:
            for name in ("epsilon", "delta"):
                if (value := getattr(self.settings, name)) != getattr(Settings, name):
                    problem = f"{value:g} needs typical acceptance; add {{}} typical {{}} T, or leave it out"
                    raise OptionError(name, problem, "acceptance", "temperature")
        sampling = [name for name in SAMPLING if getattr(self.settings, name) != SAMPLING[name]]
        if sampling and not self.may_sample:
            flag = f"--{sampling[0].replace('_', '-')}"
            raise RequestError(f"{flag} has no effect at --temperature 0; add --temperature 1, or leave out {flag}")

    @property
    def may_sample(self) -> bool:
        """Whether the command samples tokens, so that options such as --top-p have an effect."""
        return self.settings.do_sample

    @property
    def uses_typical(self) -> bool:
        """Whether the command decodes by typical acceptance, so that --epsilon and --delta have an effect."""
        return self.settings.uses_typical

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Draft models of transformers' assisted generation, which `medusa benchmark` can measure."""
        return ()

    def completed(self) -> Self:
        """Return the options with the backbone that the heads record, if the user named none.

        Raise RequestError if the heads record no backbone, or if the backbone cannot be found."""
        models, load = self.models, self.load
        if models.backbone:
            return self
        if models.heads is None:
            raise RequestError("--backbone is missing; add --backbone B, or give heads that record their backbone")
        from medusa.checkpoints.folder import recorded_backbone

        name, revision, quantization = recorded_backbone(models.heads)
        if name is None:
            raise RequestError(f"the heads {models.heads} do not record their backbone; add --backbone B")
        load = replace(
            load,
            revision=load.revision or (revision if may_be_on_hub(name) else None),
            quantization=load.quantization or (quantization if quantization in QUANTIZATIONS else None),
        )
        made = replace(self, models=replace(models, backbone=name), load=load)
        try:
            _ = made.files.config
        except RequestError as error:
            raise RequestError(f"the heads {models.heads} record a backbone, but {error}; add --backbone B") from None
        return made

    @cached_property
    def files(self) -> BackboneFiles:
        """The files of the backbone, each of which is read once."""
        from medusa.loading import BackboneFiles

        return BackboneFiles(self.models.backbone, self.load)

    def warming_up(self) -> contextlib.AbstractContextManager[object]:
        """Show a message while the first tokens are generated and, with --compile, the steps are compiled."""
        slow = "compiling the decoding steps, which takes half a minute or more"
        return self.output.stage(slow if self.settings.compile else "warming up")


def batches(items: list[Item], size: int) -> list[list[Item]]:
    """Split items into lists of `size` items; the last list may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def warn(message: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {message}", file=sys.stderr)


def warn_of_copies(prompts: Sequence[Sequence[int]], settings: Settings) -> None:
    """Warn if some prompts of a greedy measurement are equal: their texts are, too, and show nothing new."""
    if not settings.do_sample and (different := len(set(map(tuple, prompts)))) < len(prompts):
        warn(
            f"only {different} of {len(prompts)} prompts differ, and copies make no figure more certain; leave them out"
        )
