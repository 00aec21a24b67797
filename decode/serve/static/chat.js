// Follows the text as it grows, unless the reader has scrolled away from its end.
addEventListener("load", () => {
  let follow = true;
  addEventListener("scroll", () => { follow = innerHeight + scrollY > document.body.scrollHeight - 160; });
  new ResizeObserver(() => { if (follow) scrollTo(0, document.body.scrollHeight); }).observe(document.body);
});
