"""The colours of reports, in the light theme and in the dark one."""

COLORS = {
    # name: (light, dark). A picture drawn with the light colour follows the page's theme (`decode.bench.report.page`).
    "ink": ("#1f2933", "#e4e7eb"),
    "faint": ("#616e7c", "#9aa5b1"),
    "line": ("#d9dee3", "#3e4c59"),
    "paper": ("#ffffff", "#161b20"),
    "card": ("#f5f7f8", "#1f272e"),
    "good": ("#0a7a4b", "#5fd39a"),
    "bad": ("#b3261e", "#ff8a80"),
    "plain": ("#9aa5b0", "#77838f"),
    "transformers": ("#52606d", "#b8c2cc"),
    "medusa": ("#0b7a75", "#3cbcb1"),
    "amber": ("#f2a541", "#f2b661"),
    "violet": ("#7a3e9d", "#c59ae0"),
    "blue": ("#3b76c4", "#7fb0ec"),
}
INK = {name: light for name, (light, _) in COLORS.items()}
"""The colours to draw with."""
