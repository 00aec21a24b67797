"""Names of models, heads and datasets: what is shipped, what is a folder, and what can be on the Hugging Face Hub."""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path

from medusa.errors import RequestError

SHIPPED = "demo"  # the name of the backbone, the heads and the draft model that come with the package
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")  # owner/name
SHORT_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")  # some old models and datasets have no owner
PATIENCE = 3.0  # seconds to wait for an answer of the Hub


def may_be_on_hub(name: str, needs_owner: bool = False) -> bool:
    """Whether a name can be a Hub id: it has the form of an id, and does not look like a path on this machine.

    A name looks like a path if it starts with `.`, `~` or `/`, or if the folder that contains it exists."""
    if name == SHIPPED or not (HUB_ID if needs_owner else SHORT_HUB_ID).fullmatch(name):
        return False
    path = Path(name)
    return not path.exists() and not (len(path.parts) > 1 and path.parent.is_dir())


def require_file(name: str) -> None:
    """Raise RequestError if there is no such file."""
    if not Path(name).is_file():
        raise RequestError(f"there is no file {name}; give the path of one that exists")


def require_heads(name: str) -> None:
    """Raise RequestError if `name` is no folder, can be no Hub id, and is not shipped. The Hub is not asked."""
    if not (name and Path(name).is_dir()) and name != SHIPPED and not may_be_on_hub(name, needs_owner=True):
        ways = "give a folder that exists, a Hub id such as org/name, or demo"
        raise RequestError(f"no heads at {name or repr(name)}: {ways}")


def require_backbone(name: str) -> None:
    """Raise RequestError if `name` is no file or folder, can be no Hub id, and is not shipped. The Hub is not asked."""
    if name != SHIPPED and not Path(name).exists() and not may_be_on_hub(name):
        ways = f"give a folder, a GGUF file, a Hub id or {SHIPPED}"
        raise RequestError(f"no backbone at {name}: {why_missing(name)}; {ways}")


def hub_keywords(name: str) -> dict[str, bool]:
    """Return the keyword arguments with which to load `name`: only local files if the name or the network needs it.

    Without a network, transformers and huggingface_hub try for half a minute before they read their cache."""
    return {} if Path(name).exists() or hub_is_reachable() else {"local_files_only": True}


def why_missing(name: str, needs_owner: bool = False) -> str:
    """Return why nothing can be loaded by a name that does not exist as a file or folder; empty if the Hub answers."""
    if not may_be_on_hub(name, needs_owner):
        return "there is no such folder"
    return "" if hub_is_reachable() else f"it is not on this machine, and {unreachable()}"


def unreachable() -> str:
    """Return the part of an error message that says that the Hub cannot be reached, and what to do."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 forbids to load it from the Hugging Face Hub; unset it, or give a local path"
    return "the Hugging Face Hub cannot be reached; check the network, or give a local path"


@cache
def hub_is_reachable() -> bool:
    """Whether the Hugging Face Hub answers within 3 seconds; false if `HF_HUB_OFFLINE` is set. Asked once."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered: list[object] = []

    def ask() -> None:
        try:
            answered.append(get_session().head(constants.ENDPOINT, timeout=PATIENCE))
        except Exception:  # httpx and its proxies raise errors of many types, which all mean: not reachable
            return

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name in DNS has no time limit of its own
    asking.start()
    asking.join(PATIENCE)
    return bool(answered)
