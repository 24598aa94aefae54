import json
import os

import msgspec
from absl.testing import parameterized

from moh_jax.runtime import json_files
from moh_jax.runtime.files import check_regular, check_writable, inside
from tests import folders


class _Row(msgspec.Struct, forbid_unknown_fields=True):
  file: json_files.FileName
  size: json_files.Count


class _Table(msgspec.Struct):
  rows: list[_Row]


def _nested(depth: int) -> str:
  return "[" * depth + "]" * depth


class ParseTest(parameterized.TestCase):
  def test_values_come_back_with_keys_that_the_schema_lacks(self):
    text = _nested(64)
    self.assertEqual(json_files.parse_json(text, list), json.loads(text))
    text = '{"rows": [{"file": "a", "size": 2}], "other": "\\udcff"}'
    found = json_files.parse_json(text, _Table)
    self.assertEqual(found["rows"], [{"file": "a", "size": 2}])
    self.assertEqual(found["other"], "\udcff")

  @parameterized.parameters(
    ('{"rows": [{"file": "a", "size": -1}]}', r"rows\[0\].size=-1 must be"),
    ('{"rows": [{"file": "a", "size": 1e30}]}', r"size=1e\+30 must be 'int'"),
    ('{"rows": [{"file": "../a", "size": 1}]}', "file='../a' must be a text"),
    ('{"rows": [{"file": "..", "size": 1}]}', "file='..' must be a text"),
    ('{"rows": [{"file": "a"}]}', r"rows\[0\]: has no entry 'size'"),
    ('{"rows": [{"file": "a", "size": 1, "x": 1}]}', "unknown entry 'x'"),
    ("[]", "must be 'object', not array"),
    ('{"rows": [], "x": {"a": 1, "a": 2}}', "'a' stands in it 2 times"),
    ("{", "not valid JSON"),
    ("NaN", "NaN is no finite number"),
    ("[1" + "0" * 400 + "]", r"10+\.\.\. has more than 300 digits"),
    ('{"rows": 1e999}', "1e999 is no finite number"),
    (_nested(100_000), "nested more than 64 deep"),
    (_nested(65), "nested more than 64 deep"),
    (b"\xff\xff", "not valid JSON"),
    ("1" * 5000, "not valid JSON"),
    (" " * 200, "at most 100"),
  )
  def test_refusals_name_file_field_and_value(self, content, text):
    most = 100 if content == " " * 200 else 1 << 20
    with self.assertRaisesRegex(ValueError, f"^x.json: .*{text}"):
      json_files.parse_json(content, _Table, "x.json", most)

  def test_tuples_become_lists(self):
    self.assertEqual(json_files.plain({"a": (1, (2,))}), {"a": [1, [2]]})


class PathTest(folders.FolderTest):
  def test_pipe_is_refused_and_not_waited_for(self):
    pipe = self.root / "pipe"
    os.mkfifo(pipe)
    with self.assertRaisesRegex(ValueError, "is a pipe"):
      json_files.read_json(pipe)
    with self.assertRaisesRegex(ValueError, "is a folder"):
      check_regular(self.root)
    with self.assertRaisesRegex(FileNotFoundError, "none: no such file"):
      check_regular(self.root / "none")

  @parameterized.parameters("", "..", "../x", "a/../../x", "/etc", "\0")
  def test_names_that_leave_the_folder(self, name):
    with self.assertRaisesRegex(ValueError, "must be a name inside"):
      inside(self.root, name, "--split")
    self.assertEqual(inside(self.root, "a/b", "x"), self.root / "a/b")

  def test_output_under_a_folder_that_cannot_be_written(self):
    check_writable(self.root / "new" / "file.json", "--out")
    with self.assertRaisesRegex(OSError, "--out /proc/x/y: .*cannot be writ"):
      check_writable("/proc/x/y", "--out")
    self.assertEmpty(list(self.root.iterdir()))
