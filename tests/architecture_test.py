"""The structure of the package: its layers, the size of its files."""

import ast
import pathlib
import re

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGE = _ROOT / "moh_jax"
_MOST_LINES = 600
_MOST_LINES_OF_KERNELS = 900
_ABOVE_TRAINING = ("inference", "convert", "evaluation")


def _layers() -> list[set[str]]:
  """The table of layers in docs/architecture.md, the lowest first.

  Folders that stand in one row do not import one another.
  """
  text = (_ROOT / "docs" / "architecture.md").read_text()
  table = text.partition("<!-- layers -->")[2].partition("\n## ")[0]
  rows = re.findall(r"^\| (`[^|]*) \|", table, flags=re.MULTILINE)
  return [set(re.findall(r"`(\w+)/`", row)) for row in rows]


def _imports(path: pathlib.Path) -> set[str]:
  """Modules of the package that a file imports, also inside functions."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
  return {name for name in names if name.startswith("moh_jax.")}


def _type_checking(path: pathlib.Path) -> set[str]:
  """Modules that a file imports for annotations alone."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
      for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom):
          names |= {part.module}
          names |= {f"{part.module}.{a.name}" for a in part.names}
  return names


def _modules() -> dict[str, pathlib.Path]:
  """Every module but the public face, by name."""
  return {
    ".".join(path.relative_to(_ROOT).with_suffix("").parts): path
    for path in _PACKAGE.rglob("*.py")
    if path.parent != _PACKAGE
  }


class LayersTest(absltest.TestCase):
  def test_every_folder_has_a_layer(self):
    folders = {
      path.name
      for path in _PACKAGE.iterdir()
      if path.is_dir() and any(path.glob("*.py"))
    }
    self.assertEqual(set.union(*_layers()), folders)

  def test_imports_point_down(self):
    rank = {name: i for i, names in enumerate(_layers()) for name in names}
    wrong = []
    for module, path in _modules().items():
      here = module.split(".")[1]
      for name in _imports(path) - _type_checking(path):
        there = name.split(".")[1]
        above = rank.get(there, -1) > rank[here]
        beside = rank.get(there) == rank[here] and there != here
        if above or beside:
          wrong.append(f"{module} imports {name}")
    self.assertEmpty(wrong)

  def test_training_is_for_training(self):
    for module, path in _modules().items():
      if module.split(".")[1] in _ABOVE_TRAINING:
        for name in _imports(path):
          self.assertFalse(name.startswith("moh_jax.training"), module)

  def test_no_module_imports_itself_through_others(self):
    modules = _modules()
    graph = {
      module: (_imports(path) - _type_checking(path)) & set(modules)
      for module, path in modules.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
      self.assertNotIn(module, trail, " -> ".join((*trail, module)))
      if module not in done:
        for other in graph[module]:
          visit(other, (*trail, module))
        done.add(module)

    for module in graph:
      visit(module, ())

  def test_no_file_is_too_long(self):
    long = {
      module: lines
      for module, path in _modules().items()
      if (lines := len(path.read_text().splitlines()))
      > (_MOST_LINES_OF_KERNELS if ".kernels." in module else _MOST_LINES)
    }
    self.assertEmpty(long)

  def test_only_records_know_families_by_name(self):
    pattern = re.compile(
      r"family\s*(==|!=|in)\s*[\"'(\[{]|"
      r"isinstance\([\w.]+, *(ViT|DiT|LLM|TextData|Data)\w*Config"
    )
    found = [
      f"{module}:{number}"
      for module, path in _modules().items()
      for number, line in enumerate(path.read_text().splitlines(), 1)
      if pattern.search(line.partition("#")[0])
    ]
    self.assertEmpty(found)


if __name__ == "__main__":
  absltest.main()
