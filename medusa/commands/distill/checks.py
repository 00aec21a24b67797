"""The checks of `medusa distill` before anything is generated: settings of an earlier run, and room on the disk."""

from __future__ import annotations

from pathlib import Path

from decode.settings import Settings
from medusa.commands.distill.tasks import Task
from medusa.commands.options import warn
from medusa.errors import RequestError
from medusa.files import Json, free_bytes, read_json, readable
from medusa.records.sources import SETTINGS

BYTES_PER_LINE = 100  # of one answer, without its tokens
BYTES_PER_TOKEN = 12  # of one answer: an id, a comma, a space, and the text of the token


def require_same_settings(path: Path, about: Json, overwrite: bool) -> None:
    """Raise a `RequestError` if the output file exists and its settings are not `about`, unless `overwrite` is true."""
    sidecar = path.with_suffix(SETTINGS)
    if path.exists() and not overwrite and not (sidecar.exists() and read_json(sidecar) == about):
        raise RequestError(f"{path} exists and was made with other settings; choose another file or add --overwrite")


def require_room(path: Path, tasks: list[Task], settings: Settings) -> None:
    """Raise a `RequestError` if not even the shortest possible answers fit on the disk."""
    prompts, turns = sum(len(task.ids or ()) for task in tasks), sum(task.turns for task in tasks)
    least = 3 * prompts + BYTES_PER_LINE * turns
    most = least + BYTES_PER_TOKEN * (prompts + settings.max_new_tokens * turns)
    free = free_bytes(path)
    if least > free:
        raise RequestError(
            f"{path} will take {readable(least)} at least, and its disk has {readable(free)} left; choose a file on "
            "another disk, or fewer prompts with --max-prompts"
        )
    if most > free:
        warn(f"{path} may take {readable(most)}, and its disk has {readable(free)} left")
