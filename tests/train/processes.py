"""Copies of the test process, to be killed or to train together. A new Python would spend seconds importing torch."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from medusa.__main__ import main


def forked(work: Callable[[], object], errors: Path | None = None) -> int:
    """Fork this process to run only `work`; gives the process id, and `errors` gets the traceback."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            # PyTorch renews its thread pool at the first use after a fork, where two threads of the copy would race.
            torch.set_num_threads(torch.get_num_threads())
            torch.seed()  # the copy must not profit from random numbers of its parent
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            if errors is not None:
                errors.write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(status)
    return process


def forked_command(words: Sequence[str], out: int, err: int, program: Callable[[Sequence[str]], int] = main) -> int:
    """Run `medusa`, or another program, in a copy of this process that writes to these descriptors.

    Gives the process id."""

    def work() -> None:
        for number, target, name in ((1, out, "stdout"), (2, err, "stderr")):
            os.dup2(target, number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        try:
            status = program(words)
            sys.stdout.flush()  # as Python does at its end
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
        raise SystemExit(status)

    return forked(work)


def as_two_ranks(work: Callable[[], object], folder: Path) -> None:
    """Run `work` in two processes with the environment of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def ranked(rank: int) -> None:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in told.items()}, MASTER_ADDR="127.0.0.1")
        AcceleratorState._reset_state(reset_partial_state=True)  # of runs in the parent
        try:
            work()
        finally:
            torch.distributed.destroy_process_group()

    errors = [folder / f"rank{rank}.txt" for rank in range(2)]
    ranks = [forked(lambda rank=rank: ranked(rank), errors[rank]) for rank in range(2)]  # type: ignore[misc]
    failed = [os.waitpid(process, 0)[1] for process in ranks]
    assert not any(failed), [path.read_text() for path in errors if path.exists()]
