"""A headless browser that opens a page from disk, for tests of reports."""

import json
import pathlib
import re
import shutil
import subprocess

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_BEFORE = """<script>
window.problems = [];
window.addEventListener("error", function (event) {
  window.problems.push(event.message || "resource " + event.target.src);
}, true);
</script>"""
_AFTER = """<script>
window.addEventListener("load", function () {
  var result = (function () { %s })();
  result.problems = window.problems;
  result.pictures = Array.from(document.images).map(function (image) {
    return image.naturalWidth; });
  result.requests = performance.getEntriesByType("resource").map(
    function (entry) { return entry.name; }).filter(
    function (name) { return !name.startsWith("data:"); });
  document.body.textContent = "@@" + JSON.stringify(result) + "@@";
});
</script>"""


def find():
  """The path of a browser, or None."""
  return next(filter(None, map(shutil.which, _NAMES)), None)


def open_page(content, script, folder):
  """Opens a page and runs a script in it.

  Args:
    content: HTML.
    script: body of a JavaScript function that returns an object.
    folder: for the page and the browser's profile.

  Returns:
    The script's result, with the page's "problems" (errors), the widths of its
    "pictures" and its "requests" for anything outside the page.
  """
  page = pathlib.Path(folder, "page.html")
  content = content.replace("<head>", f"<head>{_BEFORE}", 1)
  body, end = content.rsplit("</body>", 1)
  page.write_text(f"{body}{_AFTER % script}</body>{end}")
  done = subprocess.run(
    [
      *(find(), "--headless", "--no-sandbox", "--disable-gpu"),
      *(f"--user-data-dir={folder}/profile", "--dump-dom", page.as_uri()),
    ],
    capture_output=True,
    text=True,
    timeout=300,
    check=True,
  )
  found = re.search("@@(.*)@@", done.stdout, re.DOTALL)
  assert found, done.stdout[:2000]
  text = found[1].replace("&lt;", "<").replace("&gt;", ">")
  return json.loads(text.replace("&amp;", "&"))
