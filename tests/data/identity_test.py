"""A set of shards that has changed is not the set of before."""

import json
import pathlib
import shutil

from absl.testing import absltest

from moh_jax.data import identity
from moh_jax.data.token_sets import TokenSet
from tests.data.text import tiny_text


class IdentityTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.create_tempdir().full_path)
    self.folder, self.documents = root / "set", self._documents(4)
    tiny_text.write(self.folder, self.documents)
    self.before = {"text": TokenSet(self.folder).identity()}

  def _documents(self, shards, seed=0):
    return tiny_text.random_documents(shards, 6, 50, seed=seed)

  def _rewritten(self, documents):
    shutil.rmtree(self.folder)
    tiny_text.write(self.folder, documents)
    return self._differences()

  def _differences(self):
    now = {"text": TokenSet(self.folder).identity()}
    return " ".join(identity.differences(now, self.before))

  def test_same_set_elsewhere_has_the_same_identity(self):
    moved = self.folder.with_name("moved")
    shutil.copytree(self.folder, moved)
    self.assertEqual(TokenSet(moved).identity(), self.before["text"])

  def test_removed_shard_is_named_by_number_and_sizes(self):
    found = self._rewritten(self.documents[:3])
    self.assertIn("data 'text': ", found)
    self.assertIn("shards 3 here, 4 there", found)
    self.assertRegex(found, r"tokens \d+ here, \d+ there")

  def test_added_shard(self):
    more = [*self.documents, self._documents(1, seed=1)[0]]
    self.assertIn("shards 5 here, 4 there", self._rewritten(more))

  def test_reordered_shards(self):
    found = self._rewritten(self.documents[::-1])
    self.assertIn("fingerprint", found)
    self.assertNotIn("shards", found)

  def test_shortened_shard(self):
    shorter = [self.documents[0][:-1], *self.documents[1:]]
    self.assertRegex(self._rewritten(shorter), r"examples|tokens")

  def test_exchanged_files_of_the_same_names(self):
    """Also where metadata.json was made to fit."""
    path = self.folder / "metadata.json"
    metadata = json.loads(path.read_text())
    one, other = metadata["shards"][:2]
    files = [self.folder / entry["file"] for entry in (one, other)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[::-1]):
      file.write_bytes(content)
    for name in ("bytes", "examples", "tokens", "documents"):
      one[name], other[name] = other[name], one[name]
    path.write_text(json.dumps(metadata))
    self.assertIn("fingerprint", self._differences())

  def test_other_sources_are_named(self):
    facts = {"examples": 3}
    found = identity.differences(
      {"a": facts, "b": facts}, {"b": facts, "c": {}}
    )
    self.assertEqual(found, ["data 'a' is new", "data 'c' is gone"])


if __name__ == "__main__":
  absltest.main()
