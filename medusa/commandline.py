"""The argument parser and the exit status of command-line programs. Errors are reported in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from medusa.errors import Interrupted, RequestError, RunError


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that reports invalid arguments in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the error `message` on standard error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def exit_status(program: str, run: Callable[[], int | None]) -> int:
    """Call `run` and return its exit status (0 for `None`). Errors are printed in one line that begins with `program`.

    The status is 1 after a `RunError`, 2 after a `RequestError` 130 after Ctrl-C and 143 after SIGTERM."""
    try:
        return run() or 0
    except RequestError as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"{program}: failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except Interrupted as stopped:
        print(f"{program}: interrupted{stopped.saved and '; '}{stopped.saved}", file=sys.stderr)
        return 128 + stopped.number  # as in shells
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130  # as in shells
