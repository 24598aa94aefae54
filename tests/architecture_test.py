"""The structure of the package: its layers, the size of its files."""

import ast
import functools
import pathlib
import re

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGE = _ROOT / "moh_jax"
_PAGE = _ROOT / "docs" / "architecture.md"
_MOST_LINES = 600
_MOST_LINES_OF_KERNELS = 900
_MOST_LAYERS = 9
_NAMED = re.compile(r"moh_jax(\.\w+)+(:\w+)?")


@functools.cache
def _modules() -> dict[str, pathlib.Path]:
  """Every module but those of the public face, by name."""
  return {
    ".".join(path.relative_to(_ROOT).with_suffix("").parts): path
    for path in _PACKAGE.rglob("*.py")
    if path.parent != _PACKAGE
  }


@functools.cache
def _imports(module: str) -> frozenset[str]:
  """Modules of the package that one imports.

  Imports inside of functions, for annotations, and by name, as "MODULE:NAME",
  count.
  """
  names = set()
  for node in ast.walk(ast.parse(_modules()[module].read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      if _NAMED.fullmatch(node.value):
        names.add(node.value.partition(":")[0])
  return frozenset(names & _modules().keys())


def _folder(module: str) -> str:
  return module.split(".")[1]


@functools.cache
def _below() -> dict[str, set[str]]:
  """The folders that each folder imports."""
  graph: dict[str, set[str]] = {_folder(module): set() for module in _modules()}
  for module in _modules():
    graph[_folder(module)] |= {_folder(name) for name in _imports(module)}
  return {name: others - {name} for name, others in graph.items()}


@functools.cache
def _layer(folder: str) -> int:
  """The longest way down from a folder; RecursionError in a circle."""
  return 1 + max(map(_layer, _below()[folder]), default=0)


def _picture() -> str:
  """The layers of the package, the highest first, and what each imports."""
  layers: dict[int, list[str]] = {}
  for folder in sorted(_below()):
    layers.setdefault(_layer(folder), []).append(folder)
  lines = ["```text"]
  for layer in sorted(layers, reverse=True):
    for folder in layers[layer]:
      below = sorted(_below()[folder], key=lambda x: (-_layer(x), x))
      lines.append(f"{layer}  {folder:<11} -> {' '.join(below)}".rstrip(" ->"))
  return "\n".join([*lines, "```"])


class LayersTest(absltest.TestCase):
  maxDiff = None

  def test_picture_shows_the_imports(self):
    drawn = _PAGE.read_text().partition("<!-- layers -->")[2]
    drawn = drawn.partition("<!-- end of layers -->")[0].strip()
    self.assertEqual(drawn, _picture(), f"{_PAGE} should have\n{_picture()}")

  def test_layers_are_few(self):
    entries = [path for path in _PACKAGE.iterdir() if path.name != "py.typed"]
    entries = [path for path in entries if path.name != "__pycache__"]
    self.assertLessEqual(len(entries), 15)
    # The public faces and `python -m moh_jax` are above all folders.
    self.assertLess(max(map(_layer, _below())), _MOST_LAYERS)

  def test_no_module_imports_itself_through_others(self):
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
      self.assertNotIn(module, trail, " -> ".join((*trail, module)))
      if module not in done:
        for other in _imports(module):
          visit(other, (*trail, module))
        done.add(module)

    for module in _modules():
      visit(module, ())

  def test_no_file_is_too_long(self):
    for module, path in _modules().items():
      most = _MOST_LINES_OF_KERNELS if ".kernels." in module else _MOST_LINES
      self.assertLessEqual(path.read_text().count("\n"), most, module)

  def test_only_records_know_families_by_name(self):
    pattern = re.compile(
      r"family\s*(==|!=|in)\s*[\"'(\[{]|"
      r"isinstance\([\w.]+, *(ViT|DiT|LLM|TextData|Data)\w*Config"
    )
    for module, path in _modules().items():
      self.assertIsNone(pattern.search(path.read_text()), module)
