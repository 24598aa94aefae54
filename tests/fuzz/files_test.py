"""Files of arrays, images, tensors, text and tokenizers, and of JSON."""

import dataclasses
import gzip
import io
import json
import shutil
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

from moh_jax import config as config_lib
from moh_jax.cli import generate
from moh_jax.config import parse
from moh_jax.config.run import section_types
from moh_jax.convert import llama, llama_config, tensor_files, vae
from moh_jax.data import (
  decode,
  input_files,
  text_files,
  token_sets,
  tokenizer_files,
  tokenizers,
)
from moh_jax.data.image_shards import ArrayRecordSource, LatentSource
from moh_jax.data.shard_writer import ShardSetWriter
from moh_jax.evaluation import fid, image_metrics
from moh_jax.ops.kernels import attention as kernels
from moh_jax.runtime import checkpoint, files, steps
from moh_jax.runtime.steps import load_config
from tests.data import tiny_text
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
_DOCUMENTS = {
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
_DAMAGED = (
  ("x.npz", _ARRAYS.getvalue(), _ARRAY_READERS),
  ("x.safetensors", _SAFETENSORS, _TENSOR_READERS),
  *((name, content, _TEXT_READERS) for name, content in _DOCUMENTS.items()),
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
  @given(st.sampled_from(_DAMAGED), st.data())
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
    (100_000, 100_000, "pixels"), (9_000, 9_000, "truncated")
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
    self.check(tokenizer_files.read_files_beside, self.folder)


_LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 300,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
  "tie_word_embeddings": False,
}
_OURS = {
  **_LLAMA,
  "architectures": ["MoHLlamaForCausalLM"],
  "router": {"kind": "query_norm"},
  "shared_heads": [1, 1],
  "selected_heads": [2, 2],
  "head_order": [[0, 1, 2, 3], [3, 2, 1, 0]],
  "moh_jax": {"remat": "none"},
}
_VAE = {
  "_class_name": "AutoencoderKL",
  "block_out_channels": [32, 64],
  "layers_per_block": 1,
  "norm_num_groups": 32,
}
_TILE = {"rows": 64, "keys": 64, "warps": 4, "stages": 2}
_TILES = {
  "backend": "triton",
  "device": "x",
  "head_dim": 64,
  "dtype": "float32",
  **dict.fromkeys(("forward", "dq", "dkv"), _TILE),
}
_MESSAGES = [{"role": "user", "content": "hi"}, {"role": "x", "content": None}]
_SCORES = {"accuracy": 0.5, "tasks": {"x": {"acc": 1}}, "step": 3}
_INDEX = {"weight_map": {"a.weight": "x.safetensors", "b": "y.safetensors"}}
_STATE = {"_data_files": [{"filename": "data.arrow"}], "_split": None}
_ROW = {"text": "a house", "n": 1}


_FAMILIES = ("vit", "dit", "llm")


def _sections(family):
  config = config_lib.Config(section_types(family)["model"]())
  return config_lib.to_dict(config)


def _stored(family):
  """The item `config` of a family's checkpoint."""
  return {
    "config": _sections(family),
    "class_names": ["ant"],
    "tokenizer_sha256": "0" * 64,
  }


def _read_stored(file):
  found = steps.read_json_item(file.parents[3], 2)
  checkpoint.metadata_from_json(found)


# A JSON file, what it holds, and what reads it.
_FILES = (
  ("x.json", _LLAMA, lambda file: llama_config.read_config(file, "llama")),
  ("x.json", _OURS, lambda file: llama_config.read_config(file, "moh-hf")),
  ("x.json", _VAE, vae.read_config),
  ("x.json", [_TILES], kernels.read),
  ("x.json", _SCORES, lambda file: llama.read_scores(str(file), 3)),
  ("x.json", _MESSAGES, lambda file: generate.read_messages(str(file))),
  ("x.jsonl", _ROW, lambda file: text_files.Prompts(str(file))),
  ("m.safetensors.index.json", _INDEX, tensor_files.read_tensors),
  (
    "saved/state.json",
    _STATE,
    lambda file: input_files.list_files([str(file.parent)]),
  ),
  *(
    ("checkpoints/2/config/metadata", _stored(family), _read_stored)
    for family in _FAMILIES
  ),
)


def _read_tokens(folder):
  found = token_sets.TokenSet(folder)
  token_sets.set_tokenizer(found.folder, found.metadata)
  found.tokens(0, found.num_tokens)
  assert found.metadata["text_bytes"] >= 0


def _read_all(source):
  return [source[i] for i in range(len(source))]


# Folders of sets, and what reads them.
_SETS = {
  "tokens": _read_tokens,
  "images": lambda x: _read_all(ArrayRecordSource(str(x), "", 3)),
  "latents": lambda x: _read_all(LatentSource(str(x), "")),
}


class MetadataTest(hostile.ReaderTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny_text.write(cls.folder / "tokens", tiny_text.random_documents(2, 3, 9))
    notes = {"class_names": ["ant", "bee"], "image_size": 16}
    shape = {"latent_shape": [2, 2, 4], "latent_scale": 0.5}
    for kind in ("images", "latents"):
      writer = ShardSetWriter(
        cls.folder / kind,
        kind,
        items=2,
        shard_size=1,
        settings=shape if kind == "latents" else {"images": "x"},
        notes=notes,
      )
      for shard in writer.todo():
        with writer.open(shard) as target:
          moments = np.zeros((2, 2, 2, 2, 4), "<f2")
          target.add({"label": shard, "name": "x"}, moments.tobytes())
      writer.finish()

    # Beside the index of shards, and the state of a saved data set.
    tensors = {"a.weight": np.ones((3, 2), np.float32)}
    safetensors.numpy.save_file(tensors, cls.folder / "x.safetensors")
    (cls.folder / "saved").mkdir()
    table = pyarrow.table({"text": ["a house"]})
    pyarrow.feather.write_feather(table, cls.folder / "saved/data.arrow")

  def _draw(self, data, name, value):
    """Writes an altered or damaged JSON file."""
    return self.write(name, data.draw(hostile.json_files(value)))

  @hostile.examples(120)
  @given(st.sampled_from(sorted(_SETS)), st.booleans(), st.data())
  def test_set(self, kind, damage, data):
    folder = self.folder / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(self.folder / kind, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if damage:
      file = data.draw(st.sampled_from(files))
      file.write_bytes(data.draw(hostile.damaged(file.read_bytes()[:100_000])))
    else:
      file = folder / "metadata.json"
      self._draw(data, file, json.loads(file.read_text()))
    self.check(_SETS[kind], folder)

  @hostile.examples()
  @given(st.data())
  def test_unfinished_set(self, data):
    folder = self.folder / "unfinished_set"
    shutil.rmtree(folder, ignore_errors=True)
    sizes, settings = {"items": 2, "shard_size": 1}, {"images": "x"}
    entry = {"file": "00000-of-00002.array_record", "examples": 1, "bytes": 3}
    self._draw(data, folder / "unfinished/settings.json", settings | sizes)
    self._draw(data, folder / f"unfinished/{entry['file']}.json", entry)
    options = {**sizes, "settings": settings, "notes": {}}
    self.check(lambda: ShardSetWriter(folder, "images", **options).todo())

  @hostile.examples(330)
  @given(st.sampled_from(_FILES), st.data())
  def test_json_file(self, case, data):
    name, value, read = case
    self.check(read, self._draw(data, name, value))


_TEXTS = (
  *("inf", "nan", "1e30", "(1,", "((((", "-" * 3000, "1,2", "", "None", "[]"),
  *("9" * 5000, "{}", "lambda: 0", "\\x00", "1j", "b'x'", "...", "()"),
)
_EXTREMES = (float("inf"), float("nan"), 1e30, 10**30, -1e30)


def _numbers(values):
  """Sections and names of the leaves that are numbers, or tuples of numbers."""
  for name, value in values.items():
    if isinstance(value, dict):
      yield from _numbers(value)
      continue
    first = value[0] if isinstance(value, tuple) and value else value
    if isinstance(first, int | float) and not isinstance(first, bool):
      yield values, name


class ConfigTest(hostile.ReaderTest, parameterized.TestCase):
  @parameterized.product(family=_FAMILIES, value=_EXTREMES)
  def test_every_number_has_a_finite_range_and_a_name(self, family, value):
    values = _sections(family)
    for section, name in _numbers(values):
      old = section[name]
      section[name] = (value,) * len(old) if isinstance(old, tuple) else value
      with self.assertRaises(ValueError, msg=f"{name} = {value}") as context:
        parse.from_config_dict(values)
      self.assertIn(name, str(context.exception))
      section[name] = old

  @hostile.examples(150)
  @given(st.sampled_from(_FAMILIES), st.data())
  def test_altered_config(self, family, data):
    values = data.draw(hostile.altered(_sections(family)))
    if isinstance(values, dict):
      self.check(parse.from_config_dict, values)

  @hostile.examples(60)
  @given(st.sampled_from(_FAMILIES), st.data())
  def test_overrides(self, family, data):
    file = self.folder / "mine.py"
    file.write_text(
      f"def get_config(): return {{'model': {{'family': {family!r}}}}}\n"
    )
    names = [
      f"{section}.{field.name}"
      for section, kind in section_types(family).items()
      for field in dataclasses.fields(kind)
    ]
    override = st.tuples(st.sampled_from(names), st.sampled_from(_TEXTS))
    overrides = data.draw(st.lists(override, min_size=1, max_size=3))
    given_texts = [f"{name}={value}" for name, value in overrides]
    self.check(load_config, str(file), given_texts)
