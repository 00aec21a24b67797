"""`medusa chat` as a user types it: a pipe, a terminal, wrong requests."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from decode.texts import Decoding
from medusa.__main__ import main
from medusa.commands.network import Network
from medusa.errors import RequestError, require_extra
from tests.commands.place import Outcome

CHAT = ("chat", "--backbone", "demo", "--max-new-tokens", "8", "--threads", "1")
WITH_HEADS = (*CHAT, "--heads", "demo", "--tree", "eight")


@pytest.fixture
def say(medusa: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run the command in this process, with lines on standard input."""

    def run(*words: str, lines: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return medusa(*words)

    return run


def test_a_conversation_through_a_pipe(say: Any, tmp_path: Path) -> None:
    """Texts, continuation, plain decoding (with the same text), an unknown command, and the end of the input."""
    kept = tmp_path / "chat.json"
    lines = "Once upon a time\n\n/reset\n/plain\nOnce upon a time\n/frobnicate now\n/help\n/reset\n\n"
    done = say(*WITH_HEADS, "--json", str(kept), lines=lines)
    assert done.status == 0
    first, second, again = done.out.splitlines()
    assert first == again != second
    assert done.err.count("has no chat template") == 1
    assert "one token a step" in done.err
    assert "no command /frobnicate" in done.err
    assert "/quit    leave" in done.err
    assert "the prompt is empty" in done.err
    told = [line for line in done.err.splitlines() if line.startswith("8 tokens, ")]
    assert [line.endswith("1.00 a step") for line in told] == [False, False, True]
    content = json.loads(kept.read_text(encoding="utf-8"))
    assert [result["text"] for result in content["results"]] == [first, second, again]
    assert content["settings"]["drafter"] == "heads"


def test_commands_take_nothing_and_paths_are_messages(say: Any) -> None:
    done = say(*CHAT, "--plain", lines="/reset now\n/quit please\n/foo\n/etc/hosts\n/\n/quit\nnever read\n")
    assert (done.status, len(done.out.splitlines())) == (0, 2)
    warnings = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: /reset takes nothing after it; type /reset alone",
        "warning: /quit takes nothing after it; type /quit alone",
        "warning: there is no command /foo; choose /plain, /reset, /help or /quit",
    ]


def test_a_line_that_is_not_utf8_is_refused_alone(medusa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"Once upon a time\ncaf\xe9 and\nThe dog\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", lines)
    done = medusa(*CHAT, "--plain")
    assert (done.status, len(done.out.splitlines())) == (0, 2)
    assert "the text is not UTF-8 after" in done.err
    done = medusa("generate", "demo", "caf\udce9 and", "--max-new-tokens", "2")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "is not UTF-8" in done.err


def test_quiet_prints_only_the_answers(say: Any) -> None:
    done = say(*CHAT, "--plain", "--quiet", lines="Once upon a time\n/plain\n/quit\nnever read\n")
    assert (done.status, len(done.out.splitlines()), done.err) == (0, 1, "")


def test_another_drafter_and_the_options_of_generate(say: Any) -> None:
    done = say(*CHAT, "--drafter", "ngram", "--temperature", "0.7", "--seed", "3", "--stop", ".", lines="The dog\n")
    again = say(*CHAT, "--plain", "--temperature", "0.7", "--seed", "3", "--stop", ".", lines="The dog\n")
    assert done.status == again.status == 0
    assert done.out == again.out
    assert "." not in done.out


@pytest.mark.full
def test_contrastive_text_is_the_same_with_heads(say: Any) -> None:
    lines = "Once upon a time\n/plain\n/reset\nOnce upon a time\n"
    done = say(*WITH_HEADS, "--amateur", "demo", "--contrast-beta", "0.5", lines=lines)
    assert done.status == 0, done.err
    first, second = done.out.splitlines()
    assert first == second


def test_ctrl_c_stops_an_answer_and_not_the_program(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Decoding.__iter__

    def interrupted(self: Decoding) -> Any:
        for number, step in enumerate(steps(self)):
            if number == 1:
                signal.raise_signal(signal.SIGINT)
            yield step

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Decoding, "__iter__", interrupted)
    monkeypatch.setattr("decode.texts.TextGenerator.warm_up", lambda *_: None)
    done = say(*WITH_HEADS, lines="Once upon a time\nOne day\n")
    assert done.status == 0
    assert len(done.out.splitlines()) == 2
    assert done.err.count("(stopped)") == 2
    assert "8 tokens" not in done.err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_program_and_keeps_the_finished_answers(
    say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come while the second prompt is read, before any text is shown."""
    steps, asked = Decoding.__iter__, list[Decoding]()

    def interrupted(self: Decoding) -> Any:
        asked.append(self)
        for step in steps(self):
            if len(asked) == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            yield step

    monkeypatch.setattr(Decoding, "__iter__", interrupted)
    monkeypatch.setattr("decode.texts.TextGenerator.warm_up", lambda *_: None)
    kept = tmp_path / "chat.json"
    done = say(*WITH_HEADS, "--json", str(kept), lines="Once upon a time\nOne day\nThe dog\n")
    assert done.status == 130
    assert done.err.splitlines()[-2:] == ["stopping ...", "medusa chat: interrupted"]
    (result,) = json.loads(kept.read_text(encoding="utf-8"))["results"]
    assert result["text"] == done.out.splitlines()[0]


def test_without_the_extra_an_error_names_the_package_to_install(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="type: pip install 'nicegui>="):
        require_extra("web", "nicegui")


def test_a_used_port_is_rejected_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RequestError, match=r"cannot listen at 127\.0\.0\.1, port"):
            Network(port=taken.getsockname()[1]).require_free()
        both = [(socket.AF_INET, 0, 0, "", (host, taken.getsockname()[1])) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
        with pytest.raises(RequestError, match="cannot listen at a-name-with-two-addresses, port"):
            Network(host="a-name-with-two-addresses").require_free()
    monkeypatch.undo()
    with pytest.raises(RequestError, match=r"cannot listen at 192\.0\.2\.1"):
        Network(host="192.0.2.1").require_free()


@pytest.mark.parametrize(
    ("host", "alone"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("box", False)]
)
def test_only_a_public_server_accepts_any_host_name(host: str, alone: bool) -> None:
    assert (Network(host=host).allowed_hosts == ["*"]) is not alone


@pytest.mark.parametrize(
    ("host", "name", "shown"),
    [
        ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ("0:0:0:0:0:0:0:1", "[::1]", "localhost"),
        ("localhost", "localhost", "localhost"),
    ],
)
def test_a_local_server_accepts_and_shows_its_own_address(
    host: str, name: str, shown: str, capsys: pytest.CaptureFixture
) -> None:
    network = Network(host=host, port=8765)
    assert name in network.allowed_hosts
    network.announce("serve")
    assert f"http://{shown}:8765 (" in capsys.readouterr().err


def _until(terminal: int, word: bytes) -> bytes:
    """The output of a terminal until `word` appears."""
    shown = b""
    while word not in shown:
        ready, _, _ = select.select([terminal], [], [], 120)
        assert ready, f"the terminal waits after {shown[-200:]!r}"
        shown += os.read(terminal, 4096)
    return shown


def test_in_a_terminal_accepted_tokens_are_green(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal, with a user in another thread: answers, colours, Ctrl-D."""
    user, program = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")

    def type_and_read() -> bytes:
        shown = _until(user, b"> ")
        os.write(user, b"Once upon a time\r")
        shown += _until(user, b"\r\n> ")
        os.write(user, b"\x04")
        return shown

    with open(program, closefd=False) as stdin, open(program, "w", buffering=1) as out, ThreadPoolExecutor(1) as thread:
        for name, stream in (("stdin", stdin), ("stdout", out), ("stderr", out)):
            monkeypatch.setattr(sys, name, stream)
        shown = thread.submit(type_and_read)
        assert main(list(WITH_HEADS)) == 0
        text = shown.result(120).decode()
    os.close(user)
    assert "\x1b[32m there was" in text or "\x1b[32m there" in text
    assert "tokens, " in text
