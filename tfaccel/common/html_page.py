"""An HTML page that needs no other file: its style and its pictures lie in the page itself.

html_page("Training run a", f"<h2>Curves</h2>{svg_of(figure)}")
html_page(title, png_of(path.read_bytes(), shows="the worst images"))
"""

import base64
import io

from tfaccel.common.tables import as_html

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1.2em; max-width: {width};
  color: #282828; background: #fff }}
h1 {{ font-size: 1.4em; line-height: 1.25; margin: 0.2em 0 }}
h2 {{ font-size: 1.05em; margin: 2em 0 0.6em }}
div {{ overflow-x: auto }}
pre {{ background: #f4f6f7; padding: 0.8em 1em; border-radius: 6px; overflow-x: auto;
  font-size: 0.85em }}
table {{ border-collapse: collapse; font-size: 0.85em; font-variant-numeric: tabular-nums }}
th {{ font-weight: 600; color: #5f6b76; white-space: nowrap }}
th, td {{ padding: 0.3em 0.7em; border-bottom: 1px solid #e4e8eb }}
img, svg {{ max-width: 100%; height: auto }}
{style}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def html_page(title: str, body: str, *, width: str = "70em", style: str = "") -> str:
    """Returns a page.

    Args:
      title: of the page, as plain text.
      body: HTML below the title.
      width: the largest width of the text, in CSS.
      style: further CSS.
    """
    return PAGE.format(title=as_html(title), body=body, width=width, style=style)


def png_of(data: bytes, *, shows: str) -> str:
    """Returns a PNG file's picture as HTML; `shows` says in words what it shows."""
    text = base64.b64encode(data).decode()
    return f'<img src="data:image/png;base64,{text}" alt="{as_html(shows)}">'


def svg_of(figure) -> str:
    """Returns a Matplotlib figure as HTML, without the time at which it was drawn."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]  # the lines before it are only for an SVG file
