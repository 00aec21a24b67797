"""The page of `medusa chat --web` in a real browser: what a reader sees and reaches, on a desktop and on a phone."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="needs the extra web")

from decode.loop import StepOutcome, Stepper, Timer
from decode.serve.chat_options import NO_DRAFTER
from medusa.__main__ import main
from tests.train.processes import forked_command

pytestmark = pytest.mark.slow
STEP = Stepper.step
TOKENS = re.compile(r"^24$")  # the number of tokens; as plain text it would match a time of 0.24 s, too


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def slow_step(self: Stepper, timer: Timer) -> StepOutcome:
    """A step that takes 20 ms longer."""
    time.sleep(0.02)
    return STEP(self, timer)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Run `medusa chat --web` in a copy of this process; gives the port."""
    port, told = free_port(), tmp_path_factory.mktemp("chat") / "told"
    words = ["chat", "--backbone", "demo", "--heads", "demo", "--tree", "eight", "--web"]
    words += ["--port", str(port), "--max-new-tokens", "24", "--threads", "1"]

    def outside_pytest(words: Sequence[str]) -> int:
        del os.environ["PYTEST_CURRENT_TEST"]  # with which NiceGUI serves in another way
        Stepper.step = slow_step  # a text shall not end before the browser can stop it
        return main(words)

    with told.open("w") as file:
        process = forked_command(words, file.fileno(), file.fileno(), outside_pytest)
    while not (said := told.read_text()).endswith("ends it)\n"):
        assert os.waitpid(process, os.WNOHANG) == (0, 0), said
        time.sleep(0.05)
    assert said.splitlines()[-1] == f"chat: http://localhost:{port} (Ctrl-C ends it)"
    yield port
    os.kill(process, signal.SIGTERM)
    os.waitpid(process, 0)


@pytest.fixture(scope="module")
def chromium(port: int) -> Iterator[Any]:
    """Chromium, which starts after the process was copied."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser, whose pages close with the test: open ones would go on drawing and asking the server."""
    yield chromium
    for context in list(chromium.contexts):
        context.close()


def test_in_a_browser(browser: Any, port: int) -> None:
    """Both sides reach the same text, marked on one side only; a second reader has a separate conversation."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page, asked, troubles = context.new_page(), [], []
    page.set_default_timeout(120_000)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(f"http://localhost:{port}")
    page.get_by_text("Once upon a time").click()
    page.wait_for_selector(".faster")
    assert page.locator(".same").inner_text() == "the same text, token for token"
    plain, drafted = (page.locator(f".card.{kind} .text") for kind in ("plain", "drafted"))
    assert plain.inner_text() == drafted.inner_text() != ""
    assert plain.locator("mark").count() == 0 < drafted.locator("mark").count()
    assert page.locator(".plain .value").nth(1).inner_text() == "1.00"
    assert float(page.locator(".drafted .value").nth(1).inner_text()) > 1.5

    other = browser.new_context().new_page()
    other.set_default_timeout(120_000)
    other.goto(f"http://localhost:{port}")
    other.wait_for_selector(".openings")
    assert other.locator("article").count() == 0

    page.locator(".q-toggle").click()  # heads alone
    page.locator("textarea").fill("<b>The dog</b>")
    page.locator("textarea").press("Enter")
    page.wait_for_function("document.querySelectorAll('article').length == 2")
    last = page.locator("article").nth(1)
    last.locator(".figure .value", has_text=TOKENS).wait_for()
    assert last.locator(".card").count() == 1
    assert last.locator(".message").inner_text() == "<b>The dog</b>"

    page.get_by_label("Start again").click()
    page.wait_for_function("document.querySelectorAll('article').length == 0")
    assert troubles == []
    assert all(url.startswith((f"http://localhost:{port}/", "data:")) for url in asked), asked


def opened(browser: Any, port: int, **context: Any) -> Any:
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(120_000)
    page.goto(f"http://localhost:{port}")
    return page


def answered(browser: Any, port: int, **context: Any) -> Any:
    page = opened(browser, port, **context)
    page.get_by_text("Once upon a time").click()
    page.wait_for_selector(".faster")
    return page


def test_a_step_that_the_reader_points_at_shows_its_tree(browser: Any, port: int) -> None:
    page = answered(browser, port, viewport={"width": 1280, "height": 800})
    for place in (1, 0):
        step = page.locator(".drafted .step").nth(place)
        step.hover(position={"x": 4, "y": 8})
        page.wait_for_selector(f".peek.open [data-shown$=' {step.get_attribute('data-step')}']")
        marked = step.locator("mark").all_inner_texts()
        nodes = page.locator(".peek .node.accepted text").all_text_contents()
        assert "".join(nodes).replace("␣", " ").split() == step.inner_text().split()
        assert (len(nodes) > 1) is bool(marked)
        assert page.locator(".peek .node").count() == 8
        assert page.locator(".peek .rejected rect").count() == 8 - len(nodes)
    page.locator(".peek .node").first.hover()  # the panel stays while the reader scrolls in it
    page.wait_for_timeout(600)
    assert page.locator(".peek.open").count() == 1
    page.mouse.move(2, 400)
    page.wait_for_selector(".peek", state="hidden")


def test_the_keyboard_reaches_every_step(browser: Any, port: int) -> None:
    page = answered(browser, port, viewport={"width": 1280, "height": 800})
    steps = page.locator(".drafted .step")
    page.get_by_label("Copy the text: With heads").focus()
    page.keyboard.press("Tab")
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", steps.count() - 1), ("Home", 0)):
        page.keyboard.press(key)
        assert steps.nth(place).evaluate("step => step === document.activeElement")
        page.wait_for_selector(f".peek.open [data-shown$=' {steps.nth(place).get_attribute('data-step')}']")
    page.keyboard.press("Escape")
    page.wait_for_selector(".peek", state="hidden")
    page.keyboard.press("Enter")
    page.wait_for_selector(".peek.open")
    page.keyboard.press("Tab")
    page.wait_for_selector(".peek", state="hidden")


def test_a_tap_shows_a_tree_at_the_bottom_of_a_phone(browser: Any, port: int) -> None:
    page = answered(browser, port, viewport={"width": 390, "height": 844}, has_touch=True)
    page.locator(".drafted .step").first.tap(position={"x": 4, "y": 8})
    page.wait_for_selector(".peek.open")
    box = page.locator(".peek").bounding_box()
    field = page.locator(".ask").bounding_box()
    assert (box["x"], round(box["x"] + box["width"])) == (8, 382)
    assert round(box["y"] + box["height"]) == round(field["y"]) - 8  # the reader can still write
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".message").tap()
    page.wait_for_selector(".peek", state="hidden")


def test_an_answer_is_copied_written_again_and_shown_after_a_reload(browser: Any, port: int) -> None:
    page = answered(browser, port, permissions=["clipboard-read", "clipboard-write"])
    text = page.locator(".card.drafted .text").inner_text()
    page.get_by_label("Copy the text: With heads").click()
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == text
    page.evaluate("document.querySelector('article').dataset.old = 1")
    page.get_by_label("Write this answer again").click()
    page.wait_for_selector("article:not([data-old]) .faster")
    assert page.locator("article").count() == 1
    page.reload()
    page.wait_for_selector(".faster")
    assert page.locator(".card.drafted .text").inner_text() == text
    page.locator(".drafted .step").first.click(position={"x": 4, "y": 8})
    page.wait_for_selector(".peek.open")


def test_a_stopped_answer_shows_no_speedup(browser: Any, port: int) -> None:
    page = opened(browser, port)
    page.get_by_label("Options").click()
    page.get_by_label("Maximum of new tokens").fill("450")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    page.get_by_text("The old boat").click()
    page.wait_for_selector(".drafted mark")
    page.get_by_label("Stop").click()
    page.get_by_text("stopped: speeds are compared only for finished texts").wait_for()
    assert page.locator(".faster").count() == 0


def test_a_reload_keeps_the_answer_that_is_being_written_and_the_options(browser: Any, port: int) -> None:
    page = opened(browser, port)
    page.get_by_label("Options").click()
    length = page.get_by_label("Maximum of new tokens")
    for typed, used in (("", "24"), ("0", "1"), ("450.4", "450")):
        length.fill(typed)
        page.keyboard.press("Tab")
        page.wait_for_function("used => document.querySelector('.options input').value === used", arg=used)
    page.get_by_role("slider", name="Temperature").click()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.get_by_text("heads, 8 nodes · rejection").wait_for()
    page.wait_for_timeout(300)
    heat = page.get_by_text("Temperature 0.").inner_text()
    page.keyboard.press("Escape")
    page.get_by_text("The old boat").click()
    page.wait_for_selector(".drafted mark")
    page.reload()
    page.get_by_text("stopped: speeds are compared only for finished texts").wait_for()
    assert page.locator(".message").inner_text() == "The old boat"
    assert page.locator(".drafted mark").count() > 0
    page.get_by_label("Options").click()
    assert (length.input_value(), page.get_by_text("Temperature 0.").inner_text()) == ("450", heat)


def test_the_enter_key_ends_a_composition_and_sends_otherwise(browser: Any, port: int) -> None:
    """Chromium and Firefox say that a word is being composed; Safari only has another code of the key."""
    page = opened(browser, port)
    page.wait_for_function("window.did_handshake")
    field = page.get_by_label("Message", exact=True)
    field.fill("にほん")
    for how in ({"isComposing": True}, {"keyCode": 229}):
        enter = {"key": "Enter", "bubbles": True, "cancelable": True, **how}
        assert field.evaluate("(field, enter) => field.dispatchEvent(new KeyboardEvent('keydown', enter))", enter)
    page.wait_for_timeout(500)
    assert page.locator("article").count() == 0
    assert field.input_value() == "にほん"
    field.press("Enter")
    page.wait_for_selector("article")
    assert (page.locator(".message").inner_text(), field.input_value()) == ("にほん", "")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_options_fit_into_their_menu(browser: Any, port: int, width: int) -> None:
    page = opened(browser, port, viewport={"width": width, "height": 800})
    page.get_by_label("Options").click()
    page.get_by_label("Drafter").click()
    page.get_by_role("option", name="heads, dynamic tree of 16 nodes").click()
    page.wait_for_timeout(500)  # until the menu is where it stays
    menu = page.locator(".q-menu", has=page.locator(".options"))
    assert menu.evaluate("menu => menu.scrollWidth - menu.clientWidth") == 0
    edges = menu.evaluate(
        "menu => [menu, ...menu.querySelectorAll('.options > *')].map(one => one.getBoundingClientRect().right)"
    )
    assert max(edges) == edges[0] <= width
    assert menu.bounding_box()["x"] >= 0


def test_plain_decoding_can_be_chosen(browser: Any, port: int) -> None:
    page = opened(browser, port)
    page.get_by_label("Options").click()
    page.get_by_label("Drafter").click()
    page.get_by_role("option", name=NO_DRAFTER).click()
    page.keyboard.press("Escape")
    page.get_by_text("The old boat").click()
    page.locator(".plain .value", has_text=TOKENS).wait_for()
    assert page.locator(".card").count() == 1


CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const paint = numbers(getComputedStyle(at).backgroundColor);
      if (paint.length < 4 || paint[3] === 1) return paint;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const style = getComputedStyle(node), drawn = node.tagName === "text";
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.getClientRects().length || style.visibility === "hidden" || node.tagName === "title") continue;
    const back = drawn ? numbers(getComputedStyle(node.parentElement.querySelector("rect")).fill) : behind(node);
    const [a, b] = [light(numbers(drawn ? style.fill : style.color)), light(back)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.textContent.trim().slice(0, 30)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_words_have_a_contrast_of_at_least_4_5(browser: Any, port: int, scheme: str) -> None:
    page = answered(browser, port, viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    page.locator(".drafted .step").first.hover(position={"x": 4, "y": 8})
    page.wait_for_selector(".peek.open")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 30
    assert [word for word in found if word[0] < 4.5] == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_does_not_scroll_sideways(browser: Any, port: int, width: int, scheme: str) -> None:
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    page.set_default_timeout(120_000)
    page.goto(f"http://localhost:{port}")
    page.get_by_text("The old boat").click()
    page.wait_for_selector(".faster")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) is (scheme == "dark")


def test_requests_for_other_hosts_are_refused(port: int) -> None:
    """Pages of other hosts cannot reach the local server under their own name (DNS rebinding)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/", headers={"Host": "elsewhere.example"})
    assert connection.getresponse().status == 400
