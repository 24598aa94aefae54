"""Files of arrays, images, tensors, text and tokenizers."""

import gzip
import io
import json
import struct
import zipfile
import zlib

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import safetensors.numpy
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from moh_jax.convert import tensor_files
from moh_jax.data import decode, text_files, tokenizers
from moh_jax.evaluation import fid, image_metrics
from moh_jax.runtime import files
from tests.fuzz import hostile


def _written(write, *args, **options) -> bytes:
  file = io.BytesIO()
  write(*args, file, **options)
  return file.getvalue()


def _zipped(parts: dict[str, bytes]) -> bytes:
  file = io.BytesIO()
  with zipfile.ZipFile(file, "w") as archive:
    for name, content in parts.items():
      archive.writestr(name, content)
  return file.getvalue()


_ARRAYS = io.BytesIO()
_MOMENTS = {"mu": np.zeros(4), "sigma": np.zeros((4, 4))}
np.savez_compressed(_ARRAYS, arr_0=np.zeros((3, 4, 4, 3), np.uint8), **_MOMENTS)
_PIXELS = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
_IMAGES = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
_SAFETENSORS = safetensors.numpy.save(
  {"a.weight": np.ones((3, 2), np.float32), "b": np.arange(4)},
  {"moh_jax": "{}"},
)
_SIZE = 8 + int.from_bytes(_SAFETENSORS[:8], "little")
_ROWS = [{"text": "a house", "n": 1}, {"text": "é" * 40}, {"text": None}]
_LINES = "".join(json.dumps(row) + "\n" for row in _ROWS).encode()
_TABLE = pyarrow.table({"text": [row["text"] for row in _ROWS] * 20})
_TEXTS = {
  "x.jsonl": _LINES,
  "x.txt": b"plain text\n",
  "x.jsonl.gz": gzip.compress(_LINES),
  "x.txt.gz": gzip.compress(b"plain text" * 50),
  "x.jsonl.zst": pyarrow.compress(_LINES, "zstd", asbytes=True),
  "x.parquet": _written(pyarrow.parquet.write_table, _TABLE),
  "x.arrow": _written(pyarrow.feather.write_feather, _TABLE),
}
_HEADERS = st.fixed_dictionaries(
  {
    "descr": st.sampled_from(("|u1", "<f8", "|O", "<U9", "|V0", "x", 3, [])),
    "fortran_order": st.sampled_from((True, False, 0, "x")),
    "shape": st.one_of(
      st.lists(st.integers(-2, 2**40), max_size=5).map(tuple),
      st.sampled_from((3, "x", (2**62, 4), (1.0,), (True,), None)),
    ),
  }
)


def _read_texts(file):
  for group in text_files.list_pieces([str(file)], 1 << 20):
    for text in text_files.read_texts(group, "text"):
      text.encode()


def _read_image(file):
  for channels in (1, 3):
    decode.decode_image(file.read_bytes(), channels, "x")


_ARRAY_READERS = (
  files.read_npz,
  lambda file: list(image_metrics.open_images(file).batches(2)),
  lambda file: fid.read_statistics(file, 4, 4),
)
_TENSOR_READERS = (tensor_files.read_tensors, tensor_files.read_text)
_TEXT_READERS = (_read_texts, lambda file: text_files.Prompts(str(file)))
# Name of a file, what it holds, and what reads it.
_FILES = (
  ("x.npz", _ARRAYS.getvalue(), _ARRAY_READERS),
  ("x.safetensors", _SAFETENSORS, _TENSOR_READERS),
  *((name, content, _TEXT_READERS) for name, content in _TEXTS.items()),
  *(
    (
      f"x.{kind}",
      _written(Image.fromarray(_PIXELS).save, format=kind),
      (_read_image,),
    )
    for kind in _IMAGES
  ),
)


def _png(columns: int, rows: int) -> bytes:
  """A PNG file whose header states any size."""

  content = bytearray(_written(Image.fromarray(_PIXELS).save, format="PNG"))
  content[16:24] = struct.pack(">II", columns, rows)
  content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
  return bytes(content)


class FilesTest(hostile.ReaderTest, parameterized.TestCase):
  def _read(self, name: str, content: bytes, readers):
    file = self.write(name, content)
    for read in readers:
      self.check(read, file)

  @hostile.examples(300)
  @given(st.sampled_from(_FILES), st.data())
  def test_damaged_file(self, case, data):
    name, content, readers = case
    self._read(name, data.draw(hostile.damaged(content)), readers)

  @hostile.examples()
  @given(_HEADERS, st.binary(max_size=64))
  def test_header_of_an_array_that_lies(self, header, content):
    text = (repr(header) + "\n").encode("latin1")
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    file = _zipped({"arr_0.npy": head + content})
    self._read("x.npz", file, _ARRAY_READERS)

  @parameterized.parameters(
    (100_000, 100_000, "pixels"), (9_000, 9_000, "cannot hold")
  )
  def test_png_that_lies_about_its_size(self, columns, rows, text):
    with self.assertRaisesRegex(ValueError, f"liar.png.*{text}"):
      decode.decode_image(_png(columns, rows), 3, "liar.png")

  @hostile.examples()
  @given(hostile.altered(json.loads(_SAFETENSORS[8:_SIZE])))
  def test_header_of_safetensors(self, header):
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    content = len(text).to_bytes(8, "little") + text + _SAFETENSORS[_SIZE:]
    self._read("x.safetensors", content, _TENSOR_READERS)

  def test_document_that_unpacks_to_more_than_allowed(self):
    content = gzip.compress(b"a" * (9 << 24), compresslevel=1)
    with self.assertRaisesRegex(ValueError, "bomb.txt.gz: too long"):
      _read_texts(self.write("bomb.txt.gz", content))


@pytest.mark.transformers
class TorchTest(hostile.ReaderTest):
  @classmethod
  def setUpClass(cls):
    # First: its memory is no example's.
    torch = pytest.importorskip("torch")
    super().setUpClass()
    whole = torch.zeros(2, 3)
    tree = {"model": {"a": whole, "b": whole[0, 1:]}}
    with zipfile.ZipFile(io.BytesIO(_written(torch.save, tree))) as archive:
      cls.pickle = archive.read("archive/data.pkl")

  def _archive(self, pickle: bytes) -> bytes:
    head = {"net/data.pkl": pickle, "net/version": b"3"}
    return _zipped(head | {"net/data/0": bytes(24)})

  @hostile.examples()
  @given(st.data())
  def test_torch_archive(self, data):
    whole = data.draw(hostile.damaged(self._archive(self.pickle)))
    pickle = data.draw(hostile.damaged(self.pickle))
    for content in (whole, self._archive(pickle)):
      for read in _TENSOR_READERS:
        self.check(read, self.write("x.pth", content))


_TOKENIZER = tokenizers.train_bpe(["a house, a tree"] * 4, 270)
_BESIDE = {
  "tokenizer_config.json": {
    "bos_token": "<|begin_of_text|>",
    "eos_token": {"content": "<|end_of_text|>"},
    "add_bos_token": True,
    "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"0": {"content": "<|begin_of_text|>"}},
  },
  "special_tokens_map.json": {"eos_token": "<|end_of_text|>"},
  "generation_config.json": {"eos_token_id": [1, 0]},
  "config.json": {"eos_token_id": 1},
  "added_tokens.json": {"<x>": 400},
  "tokenizer.json": json.loads(_TOKENIZER),
}


class TokenizersTest(hostile.ReaderTest):
  def _read(self):
    found = tokenizers.load_tokenizer(self.folder)
    found.decode(found.encode("a house <|end_of_text|>"))

  @hostile.examples(90)
  @given(st.sampled_from(sorted(_BESIDE)), st.data())
  def test_tokenizer_and_files_beside_it(self, name, data):
    for other, value in _BESIDE.items():
      self.write(other, json.dumps(value).encode())
    self.write(name, data.draw(hostile.json_files(_BESIDE[name])))
    self.check(self._read)
    self.check(tokenizers.read_files_beside, self.folder)
