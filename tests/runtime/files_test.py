"""Files that are whole, JSON of a schema, and names."""

import msgspec
from absl.testing import parameterized

from moh_jax.runtime import files
from tests.folders import FolderTest
from tests.two_processes import python


class _Row(msgspec.Struct):
  file: str
  size: int


class _Table(msgspec.Struct):
  rows: list[_Row]


class FilesTest(FolderTest):
  def test_what_fails_leaves_the_file_as_it_was(self):
    file = self.root / "a.json"
    files.write_whole(file, b"old")
    with self.assertRaisesRegex(OSError, "full"):
      with files.replacing(file) as temporary:
        temporary.write_bytes(b"n")
        raise OSError("full")
    self.assertEqual(file.read_bytes(), b"old")
    self.assertEqual([file], list(self.root.iterdir()))

  def test_standard_output_is_written(self):
    code = (
      "from moh_jax.runtime import files; import pathlib; "
      "files.write_whole(pathlib.Path('/dev/stdout'), b'b\\n')"
    )
    self.assertEqual(python("-c", code)[1], "b\n")

  @parameterized.parameters("", "..", "../x", "a/../../x", "/etc")
  def test_names_that_leave_the_folder(self, name):
    with self.assertRaisesRegex(ValueError, "must be a name inside"):
      files.inside(self.root, name, "--split")
    self.assertEqual(files.inside(self.root, "a/b", "x"), self.root / "a/b")

  def test_output_under_a_folder_that_cannot_be_written(self):
    files.check_writable(self.root / "new" / "file.json")
    self.assertEmpty(list(self.root.iterdir()))
    (file := self.root / "file").touch()
    for path in (file, "/dev/stdout"):
      files.check_writable(path)
    for path in ("/proc/x/y", file / "y"):
      with self.assertRaisesRegex(OSError, f"^{path}: .*cannot be writ"):
        files.check_writable(path)

  def test_values_come_back_with_keys_that_the_schema_lacks(self):
    text = '{"rows": [{"file": "a", "size": 2}], "other": 1}'
    found = files.parse_json(text, _Table)
    self.assertEqual(found["rows"], [{"file": "a", "size": 2}])
    self.assertEqual(found["other"], 1)

  @parameterized.parameters(
    ('{"rows": [{"file": "a", "size": "b"}]}', r"at `\$.rows\[0\].size`"),
    ('{"rows": [{"file": "a"}]}', "missing required field `size`"),
    ("{", "not valid JSON"),
    (b"\xff\xff", "not valid JSON"),
  )
  def test_refusals_name_file_and_field(self, content, text):
    with self.assertRaisesRegex(ValueError, f"^x.json: .*{text}"):
      files.parse_json(content, _Table, "x.json")
