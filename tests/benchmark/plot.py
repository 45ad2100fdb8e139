"""The results as a plot (SVG) and as a part of the README."""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

from tests.benchmark.scenes import Round, Scene, median

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "examples" / "benchmark.svg"

_WIDTH, _ROW, _LABEL = 720, 22, 130


def svg(scenes: list[Scene], results: dict[str, dict[str, list[Round]]]) -> str:
    """Return bars of CPU per request or event, one group for each scene, scaled to the longest of its group."""
    parts: list[str] = []
    y = 10
    for scene in scenes:
        values = {name: median(rounds, lambda r: r.cpu) for name, rounds in results[scene.name].items()}
        unit = "event" if scene.stream else "request"
        parts.append(f'<text x="0" y="{y + 14}" font-weight="bold">{escape(scene.title)}: CPU per {unit}</text>')
        y += _ROW
        longest = max(values.values())
        for name, value in values.items():
            width = max(1, value / longest * (_WIDTH - _LABEL - 90))
            color = "#2a6f97" if name == "smolproxy" else "#b8c4cc"
            parts.append(f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="14" fill="{color}"/>')
            parts.append(f'<text x="{_LABEL + width + 6:.1f}" y="{y + 14}">{value:.0f} us</text>')
            y += _ROW
        y += 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}" '
        f'font-family="sans-serif" font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def write(scenes: list[Scene], results: dict[str, dict[str, list[Round]]], table: str) -> None:
    """Write the plot, and the table into the README between its comments."""
    FILE.write_text(svg(scenes, results))
    readme = ROOT / "README.md"
    block = f"<!-- benchmark: made by python -m tests.benchmark --write -->\n{table}\n<!-- end -->"
    readme.write_text(re.sub(r"<!-- benchmark: .*?<!-- end -->", lambda _: block, readme.read_text(), flags=re.DOTALL))
