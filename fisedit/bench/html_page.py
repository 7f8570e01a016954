"""Tables and pictures as one HTML page without scripts. Knows no measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def html_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table whose columns are the first row's keys.

    Args:
        rows: share their keys.
    """
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def figure(file: str, caption: str) -> str:
    """A picture beside the page, with its caption.

    Args:
        file: name of the picture, relative to the page.
        caption: plain text.
    """
    text = escape(caption)
    return f'<figure><img src="{file}" alt="{text}" /><figcaption>{text}</figcaption></figure>'


def html_page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page.

    Args:
        title: plain text.
        sections: heading, plain text; and what is below it, HTML.
    """
    body = "\n".join(f"<h2>{escape(heading)}</h2>\n{content}" for heading, content in sections)
    return _PAGE.format(title=escape(title), body=body)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #202024; background: #fcfcfa; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 1.5rem 0; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
