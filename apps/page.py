"""A report as one HTML file with its pictures inside, readable without a network in ten years."""

import base64
from html import escape
from pathlib import Path

from apps.outputs import written

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 0.6rem 0 1.4rem; font-variant-numeric: tabular-nums }
th, td { padding: 0.2rem 0.8rem; border-bottom: 1px solid #ddd; text-align: right } caption { font-weight: 600 }
caption, th:first-child, td:first-child, .two th:nth-child(2), .two td:nth-child(2) { text-align: left }
img { max-width: 100%; height: auto } figure { margin: 1.5rem 0 } figcaption { color: #444; max-width: 60rem }
pre { white-space: pre-wrap; font-size: 13px } .scroll { overflow-x: auto } .quiet { color: #666 }
"""


def write_page(path, title, parts):
    """A page of ``parts``, text in HTML, complete or absent; returns its path."""
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    with written(path) as (part,):
        part.write_text("\n".join([f"{head}<body>", *parts, "</body></html>\n"]))
    return path


def figure(title, path, caption=""):
    """A PNG or GIF under its title, and what is to be said of it below."""
    data, kind = base64.b64encode(Path(path).read_bytes()).decode(), Path(path).suffix[1:]
    return (
        f"<figure><h3>{escape(title)}</h3><img alt='{escape(title)}' src='data:image/{kind};base64,{data}'>"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
