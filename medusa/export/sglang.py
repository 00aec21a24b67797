"""Export for SGLang, which loads heads of kind `eagle` as a layer of EAGLE-3."""

from __future__ import annotations

from medusa.config import GATED
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted
from medusa.export.eagle3 import write_eagle3


def write(export: Export) -> Written:
    """Write heads of kind `eagle` as a layer of EAGLE-3, and return the command that serves it with SGLang.

    Raises:
        RequestError: the heads are of another kind, or differ from a layer of EAGLE-3.
    """
    config = export.heads.config
    if config.kind != "eagle":
        raise RequestError(
            "sglang has no Medusa heads; train kind eagle with "
            f"heads.kind=eagle heads.block={GATED} heads.lm_head=shared, or export to vllm"
        )
    write_eagle3(export, "sglang")
    steps = config.num_heads
    return Written(
        serve=f"python -m sglang.launch_server --model-path {quoted(export.backbone)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {quoted(export.place)} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 4 --speculative-num-draft-tokens {4 * steps}",
        lost="no tree of your own: SGLang grows one from --speculative-eagle-topk and --speculative-num-draft-tokens",
        heads=export.heads,
    )
