"""The classes of images: lists of their names, and labels by name."""

import dataclasses
import logging
import pathlib

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 1 << 24  # of a list of classes


@dataclasses.dataclass(frozen=True)
class ClassList:
  """A file of class names, whose positions are the labels.

  Attributes:
    where: names the file in messages.
    lines: those of it that are not empty.
  """

  where: str
  lines: tuple[str, ...]

  def names(self, found: tuple[str, ...]) -> tuple[str, ...]:
    """The classes: the whole line where it is in `found`, else its first word.

    Raises:
      ValueError: a class is there twice.
    """
    names = tuple(n if n in found else n.split()[0] for n in self.lines)
    if len(set(names)) < len(names):
      twice = next(name for name in names if names.count(name) > 1)
      raise ValueError(f"{self.where}: class {twice!r} is there twice")
    return names


def read_class_list(file: str) -> ClassList:
  """Reads a list of classes.

  Args:
    file: a class on each line, such as "n01440764", "n01440764 tench, Tinca
      tinca" or "polar bear"; the data tell whether the first word or all is the
      name. Empty lines are left out.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no text or names no class.
  """
  path = pathlib.Path(file)
  where = f"data.class_list={file!r}"
  if not path.is_file():
    raise FileNotFoundError(f"{where}: no such file")
  try:
    with path.open("rb") as stream:
      text = stream.read(_MOST_BYTES).decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"{where}: not UTF-8: {error}") from error
  lines = tuple(line.strip() for line in text.splitlines() if line.strip())
  if not lines:
    raise ValueError(f"{where}: names no class")
  return ClassList(where, lines)


def match_classes(
  found: tuple[str, ...], wanted: tuple[str, ...] | ClassList, where: str
) -> tuple[tuple[str, ...], list[int]]:
  """Finds the labels of class folders among a model's classes, by name.

  Folders that are named by numbers, as those of ImageNet-V2, are labels
  themselves, or where the classes have such names too, the class of that value:
  leading zeros do not matter.

  Args:
    found: names of the folders.
    wanted: classes of the model, or a list of them.
    where: name of the data, for the message.

  Returns:
    The wanted classes, and the label of each folder.

  Raises:
    ValueError: a folder is none of the classes, two are the same one, or a list
      has one twice.
  """
  whose, origin = "the model's", ", the names of the training's folders"
  if isinstance(wanted, ClassList):
    whose, origin = "the", f" of {wanted.where}"
    wanted = wanted.names(found)
  labels = {name: label for label, name in enumerate(wanted)}
  unknown = [name for name in found if name not in labels]
  if unknown and all(map(str.isdecimal, found)):
    values = {int(n): i for i, n in enumerate(wanted) if n.isdecimal()}
    values = values or {label: label for label in range(len(wanted))}
    labels = {n: values[int(n)] for n in found if int(n) in values}
    unknown = [name for name in found if name not in labels]
    if len(set(labels.values())) < len(labels):
      raise ValueError(f"{where}: class folders {found} have a number twice")
  if unknown:
    known = ", ".join(wanted[:10]) + ", ..." * (len(wanted) > 10)
    raise ValueError(
      f"{where}: class folder {unknown[0]!r} is none of {whose} "
      f"{len(wanted)} classes ({known}){origin}"
    )
  if missing := len(wanted) - len(set(found)):
    _LOG.warning("%s: no folder of %d classes", where, missing)
  return wanted, [labels[name] for name in found]


def check_class_names(
  ours: tuple[str, ...], theirs: tuple[str, ...], where: str
) -> None:
  """Checks that the labels of model and data mean the same classes.

  Args:
    ours: class names that the model was trained with.
    theirs: class names of the data.
    where: name of the data, for the message.

  Raises:
    ValueError: a label has two names.
  """
  for label, (mine, other) in enumerate(zip(ours, theirs)):
    if mine != other:
      raise ValueError(
        f"{where}: class {label} is {other!r}, the model's is {mine!r}; class "
        "directories must have the names of the training split"
      )
