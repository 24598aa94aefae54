"""One HTML page about a checkpoint, which needs no network and no server."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border: 1px solid #ccc; padding: .15rem .5rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
table.sortable th { cursor: pointer; background: #f2f2f2; }
th[aria-sort=ascending]::after { content: " \\25B2"; }
th[aria-sort=descending]::after { content: " \\25BC"; }
.scroll { max-height: 28rem; overflow: auto; }
.warning { background: #fff3cd; border-left: 4px solid #b8860b;
  padding: .4rem .8rem; margin: .5rem 0; }
img { max-width: 100%; } pre { font-size: .8rem; overflow: auto; }
.text span { padding: 1px 0; white-space: pre-wrap; }
figure { display: inline-block; margin: .4rem; text-align: center;
  font-size: .8rem; } figure img { width: 96px; image-rendering: pixelated; }
"""

# Sorts a table by the column whose header is clicked; numbers as numbers.
_SCRIPT = """
document.querySelectorAll("table.sortable").forEach(function (table) {
  var heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach(function (head, column) {
    head.addEventListener("click", function () {
      var up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      var body = table.tBodies[0], rows = Array.from(body.rows);
      rows.sort(function (a, b) {
        var x = a.cells[column].textContent, y = b.cells[column].textContent;
        var numbers = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
        var order = numbers ? x - y : x.localeCompare(y);
        return up ? order : -order;
      });
      rows.forEach(function (row) { body.appendChild(row); });
    });
  });
});
document.querySelectorAll("select.layer").forEach(function (select) {
  function show() {
    var texts = JSON.parse(document.getElementById("routing").textContent);
    var layer = texts.layers[select.value];
    document.querySelectorAll("p.text").forEach(function (text, number) {
      Array.from(text.children).forEach(function (token, place) {
        var head = layer.heads[number][place];
        token.style.background = head < 0 ? "" : layer.colors[head] + "99";
        token.title = head < 0 ? "" : "head " + layer.names[head];
      });
    });
  }
  select.addEventListener("change", show);
  show();
});
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
  """The whole page.

  Args:
    title: plain text.
    sections: pairs of a heading, plain text, and its HTML; empty ones are left
      out.
  """
  parts = [
    f"<section><h2>{html.escape(heading)}</h2>\n{body}</section>"
    for heading, body in sections
    if body
  ]
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
    f"<body><h1>{html.escape(title)}</h1>\n"
    + "\n".join(parts)
    + f"\n<script>{_SCRIPT}</script>\n</body></html>\n"
  )


def table(
  header: Sequence[str], rows: Sequence[Sequence[Any]], sortable: bool = False
) -> str:
  """A table of plain text and numbers; a click on a header may sort it."""

  def line(cells: Sequence[Any], tag: str) -> str:
    inner = "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"

  body = "\n".join(line(row, "td") for row in rows)
  kind = ' class="sortable"' if sortable else ""
  return (
    f'<div class="scroll"><table{kind}><thead>{line(header, "th")}</thead>'
    f"<tbody>{body}</tbody></table></div>"
  )


def image(png: bytes, alt: str) -> str:
  """A picture inside the page."""
  data = base64.b64encode(png).decode()
  return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def captioned(png: bytes, caption: str) -> str:
  """A small picture with a line under it."""
  return (
    f"<figure>{image(png, caption)}<figcaption>{html.escape(caption)}"
    "</figcaption></figure>"
  )


def warning(text: str) -> str:
  """A line that must not be overlooked."""
  return f'<p class="warning">{html.escape(text)}</p>'


def preformatted(text: str) -> str:
  """Text as it stands."""
  return f"<pre>{html.escape(text)}</pre>"


def colored_texts(
  texts: Sequence[Sequence[str]], layers: Mapping[str, Mapping[str, Any]]
) -> str:
  """Texts whose tokens have the colour of their head, in a layer of choice.

  Args:
    texts: tokens of each text.
    layers: by name "heads" (for each text a number for each token, -1 where it
      has none), "colors" and "names" by that number.
  """
  options = "".join(f"<option>{html.escape(name)}</option>" for name in layers)
  paragraphs = "\n".join(
    '<p class="text">'
    + "".join(f"<span>{html.escape(token)}</span>" for token in tokens)
    + "</p>"
    for tokens in texts
  )
  # "<" would end the element where a text has "</script>".
  data = json.dumps({"layers": layers}).replace("<", "\\u003c")
  return (
    f'<label>Layer <select class="layer">{options}</select></label>\n'
    f"{paragraphs}\n"
    f'<script type="application/json" id="routing">{data}</script>'
  )


def _text(cell: Any) -> str:
  if isinstance(cell, float):
    return f"{cell:.4g}"
  return html.escape(str(cell))
