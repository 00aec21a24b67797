// Follows the text as it grows, unless the reader has scrolled away from its end.
addEventListener("load", () => {
  let follow = true;
  addEventListener("scroll", () => { follow = innerHeight + scrollY > document.body.scrollHeight - 160; });
  new ResizeObserver(() => { if (follow) scrollTo(0, document.body.scrollHeight); }).observe(document.body);
});

// Copies a text, and returns whether the browser allowed it. Pages without HTTPS have no navigator.clipboard.
async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

// Shows the tree of guesses of the step that the reader points at, taps or focuses. The server draws the tree.
const steps = (() => {
  const WAIT = 90, STAY = 250, SPACE = 8; // milliseconds before the panel opens and closes; pixels to the text
  let wanted = null; // { text: the id of the text's element, step: the index of the step }
  let pointed = ""; // the text and the step under the mouse
  let timer = 0;
  const panel = () => document.querySelector(".peek");
  const anchor = () => wanted && document.getElementById(wanted.text)?.querySelector(`[data-step="${wanted.step}"]`);
  const later = (action, milliseconds) => { clearTimeout(timer); timer = setTimeout(action, milliseconds); };

  function close() {
    clearTimeout(timer);
    wanted = null;
    pointed = "";
    panel()?.classList.remove("open");
    document.querySelectorAll(".step.shown").forEach((step) => step.classList.remove("shown"));
  }

  function place() {
    const step = anchor(), box = panel();
    if (!step || box.querySelector("[data-shown]")?.dataset.shown !== `${wanted.text} ${wanted.step}`) return;
    document.querySelectorAll(".step.shown").forEach((other) => other.classList.remove("shown"));
    step.classList.add("shown");
    box.classList.add("open");
    box.style.bottom = "";
    if (matchMedia("(max-width: 720px)").matches) { // the style sheet makes the panel as wide as the page
      box.style.left = box.style.top = "";
      box.style.bottom = `${innerHeight - document.querySelector(".ask").getBoundingClientRect().top + SPACE}px`;
      return;
    }
    const at = step.getClientRects()[0], below = [...step.getClientRects()].at(-1).bottom + SPACE;
    const left = Math.min(at.left, innerWidth - box.offsetWidth - SPACE);
    const top = below + box.offsetHeight + SPACE > innerHeight ? at.top - box.offsetHeight - SPACE : below;
    box.style.left = `${Math.max(left, SPACE)}px`;
    box.style.top = `${Math.max(top, SPACE)}px`;
  }

  function open(asked, emit) {
    wanted = asked;
    emit(wanted.step);
    place(); // the panel may hold this tree already
  }

  function move(event, step) { // the arrow keys move between the steps of a text
    const all = [...step.closest(".text").querySelectorAll(".step")], at = all.indexOf(step);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
    if (!(event.key in to)) return;
    event.preventDefault();
    const next = all[Math.min(Math.max(to[event.key], 0), all.length - 1)];
    if (!next.hasAttribute("tabindex")) return; // the text still grows
    step.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  function on(event, emit) {
    const step = event.target.closest?.(".step");
    if (!step) return;
    const asked = { text: step.closest(".text").id, step: Number(step.dataset.step) };
    if (event.type === "pointermove") { // unlike pointerover, it does not occur when the text moves under the mouse
      const now = `${asked.text} ${asked.step}`;
      if (event.pointerType !== "mouse" || now === pointed) return;
      pointed = now;
      later(() => open(asked, emit), WAIT);
    } else if (event.type !== "keydown") {
      clearTimeout(timer);
      open(asked, emit);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(asked, emit);
    } else {
      move(event, step);
    }
  }

  const outside = (target) => !target.closest?.(".step, .peek");
  addEventListener("pointerover", (event) => {
    if (event.pointerType !== "mouse") return;
    if (event.target.closest?.(".peek")) clearTimeout(timer);
    if (!outside(event.target)) return;
    pointed = "";
    if (wanted && !anchor()?.matches(":focus-visible")) later(close, STAY);
    else clearTimeout(timer);
  });
  addEventListener("pointerdown", (event) => { if (outside(event.target)) close(); });
  addEventListener("focusin", (event) => { if (outside(event.target)) close(); });
  addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  addEventListener("scroll", place, { passive: true });
  addEventListener("resize", place);
  addEventListener("load", () => {
    const found = new MutationObserver(() => {
      if (!panel()) return;
      found.disconnect();
      new MutationObserver(place).observe(panel(), { childList: true, subtree: true });
    });
    found.observe(document.body, { childList: true, subtree: true });
  });
  return { on };
})();
