"""The argument parser and the exit status of command-line programs. Errors are reported in one line."""

from __future__ import annotations

import argparse
import errno
import os
import select
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from medusa.errors import Interrupted, OptionError, RequestError, RunError, did_you_mean
from medusa.files import is_full

MOST_SPACES = 4  # in a path that was not quoted
LONGEST = 1000  # characters of an error; of a longer one, the beginning and the end are printed


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that reports invalid arguments in one line, without the usage text.

    Positional arguments may stand anywhere between the options. An unknown option is answered with the nearest one."""

    def error(self, message: str) -> NoReturn:
        """Print the error `message` on standard error and exit with status 2."""
        if message.startswith("unrecognized arguments: ") and not message.partition(": ")[2].startswith("-"):
            message = f"unexpected argument{message.partition(':')[2]}; quote values with spaces"
        hint = "" if message.endswith(("?", ")")) else f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments like argparse. Positional words after an option go to the positional that takes several."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            return super().parse_known_args(words, namespace)
        self._require_known(words)
        self._require_quoted(words)
        namespace, rest = super().parse_known_args(words, namespace)
        several = next((one.dest for one in self._actions if one.nargs == "*" and not one.option_strings), None)
        if several is not None and not any(word.startswith("-") for word in rest):
            setattr(namespace, several, [*getattr(namespace, several, ()), *rest])
            rest = []
        return namespace, rest

    def _require_quoted(self, words: Sequence[str]) -> None:
        """Report consecutive words that are together the path of a file or folder whose name has spaces."""
        for start, word in enumerate(words):
            for end in range(start + 2, min(start + MOST_SPACES + 2, len(words) + 1)):
                first = word.partition("=")[2] if word.startswith("--") else word
                path = " ".join([first, *words[start + 1 : end]])
                if first and os.path.exists(path) and not os.path.exists(first):
                    self.error(f"the path {path} has a space, so the shell cut it; quote it: {shlex.quote(path)}")

    def _require_known(self, words: Sequence[str]) -> None:
        """Report the first option among `words` that does not exist, with the nearest known option."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and not any(one.startswith(name) for one in known):
                self.error(f"unknown option {name}{did_you_mean(name, known)}")


def width() -> int:
    """Return the number of columns that help texts fill."""
    return max(shutil.get_terminal_size().columns - 2, 1)


def exit_status(program: str, run: Callable[[], int | None]) -> int:
    """Call `run` and return its exit status (0 for `None`). Errors are printed in one line that begins with `program`.

    The status is 1 after a `RunError` or for a full disk, 2 after a `RequestError` or for a name that is too long for a
    file, 130 after Ctrl-C and 143 after SIGTERM."""
    try:
        return run() or 0
    except RequestError as error:
        told = error.typed if isinstance(error, OptionError) else error
        print(f"{program}: error: {_one_line(told)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"{program}: failed: {_one_line(error)}", file=sys.stderr)
        return 1
    except Exception as error:  # each option that names a file would otherwise look for these
        if is_full(error):
            told = f"a disk is full, or takes no larger file ({error}); make room and run the command again"
            print(f"{program}: failed: {_one_line(told)}", file=sys.stderr)
            return 1
        if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        told = f"{name[:40]}... has {len(name)} characters, more than the name of a file may have"
        print(f"{program}: error: {told}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(f"{program}: interrupted{stopped.saved and '; '}{stopped.saved}", file=sys.stderr)
        return 128 + stopped.number  # as in shells
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130  # as in shells


def _one_line(error: Exception | str) -> str:
    told = " ".join(str(error).split())
    return told if len(told) <= LONGEST else f"{told[: LONGEST // 2]} ... {told[-LONGEST // 2 :]}"


UNREAD = 128 + 13  # of programs that SIGPIPE ends, which Windows does not have


def until_pipe_closes(run: Callable[[], int]) -> int:
    """Call `run` and return its exit status: that of SIGPIPE if the output's reader closes the pipe, as `head` does."""
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:  # which a shell can close
                sys.stdout.flush()  # otherwise Python would flush at its end, and print a traceback
    except BrokenPipeError:
        if not _discard_closed():  # the pipe of something else, such as a worker process
            raise
        return UNREAD
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the program if its console's pipe is closed
            _discard_closed()
            return UNREAD
        raise


def _discard_closed() -> bool:
    """Send the rest of outputs without a reader to the null device; return whether there are such outputs."""
    null, closed = os.open(os.devnull, os.O_WRONLY), False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(null, stream.fileno())
            closed = True
    os.close(null)
    return closed
