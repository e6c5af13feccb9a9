"""Draws pictures as SVG: boxes, text and lines, in colours for a light and a dark reader.

Each picture has a background and a style of its own, which follows `prefers-color-scheme`, so it is
legible on any page. pictures.py and walk_pictures.py draw with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# class of a shape or a text -> (light, dark)
FILLS = {
    "page": ("#ffffff", "#0d1117"),
    "free": ("#f3f4f6", "#1c2128"),
    "first": ("#cfe2ff", "#17375e"),
    "second": ("#ffe0b0", "#5a3d0c"),
    "both": ("#d3efd5", "#1d4a2a"),
    "host": ("#e9e3f8", "#3a2f5c"),
    "device": ("#d5ecf0", "#16454f"),
    "alarm": ("#fbdcdc", "#5f2326"),
}
INKS = {"ink": ("#1f2328", "#e6edf3"), "soft": ("#57606a", "#9aa4af")}
LINE = ("#8c959f", "#6e7681")


@dataclass
class Picture:
    """A drawing under way; coordinates are pixels from the upper left corner."""

    name: str
    width: int
    height: int
    title: str  # for readers that do not see the picture
    parts: list[str] = field(default_factory=list)

    def box(self, x, y, width, height, kind="free", radius=4):
        """Draws a rectangle filled with the colour of a kind."""
        self.parts.append(
            f'<rect class="{kind} edge" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="{radius}"/>'
        )

    def frame(self, x, y, width, height):
        """Draws a strong outline without a filling."""
        self.parts.append(
            f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )

    def text(self, x, y, words, size=13, anchor="start", kind="ink", mono=False, bold=False):
        """Writes one line; y is its baseline."""
        style = f'class="{kind}{" mono" if mono else ""}"'
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text {style} x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def label(self, x, y, width, height, lines, kind="free", mono=False, size=13):
        """Draws a box with lines of text in its middle; the first of several is bold."""
        self.box(x, y, width, height, kind)
        step = size + 5
        baseline = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.35
        for number, words in enumerate(lines):
            bold = number == 0 and len(lines) > 1
            small = size if number == 0 else size - 1
            ink = "ink" if number == 0 else "soft"
            self.text(
                x + width / 2, baseline + number * step, words, small, "middle", ink, mono, bold
            )

    def line(self, *points, arrow=True, dashed=False):
        """Draws a line through points (x, y), with an arrow at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<polyline class="line" points="{path}"{head}{dash}/>')

    def svg(self) -> str:
        """Returns the file's text."""
        light = _rules(0)
        dark = _rules(1)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            '<path class="head" d="M0 0L10 5L0 10z"/></marker></defs>'
        )
        lines = [
            "<!-- written by docs/pictures.py -->",
            head,
            f"<title>{escape(self.title)}</title>",
            "<style>",
            ".mono { font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace }",
            ".line { fill: none; stroke-width: 1.4 }",
            ".frame { fill: none; stroke-width: 2.2 }",
            *light,
            "@media (prefers-color-scheme: dark) {",
            *dark,
            "}",
            "</style>",
            marker,
            f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _rules(scheme: int) -> list[str]:
    """Returns the rules of style of a scheme: 0 is light, 1 is dark."""
    rules = []
    for name, colours in (FILLS | INKS).items():
        rules.append(f".{name} {{ fill: {colours[scheme]} }}")
    rules.append(f".head {{ fill: {LINE[scheme]} }}")
    rules.append(f".frame {{ stroke: {INKS['ink'][scheme]} }}")
    rules.append(f".edge, .line {{ stroke: {LINE[scheme]} }}")
    return rules
