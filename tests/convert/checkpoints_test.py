"""Whole checkpoints of images there and back again."""

import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
from typing import Any

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.config import (
  Config,
  DataConfig,
  DiffusionConfig,
  DiTConfig,
  released_model,
)
from moh_jax.config.heads import RouterConfig
from moh_jax.convert import checkpoints, rules
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.data.infer import resolve
from moh_jax.inference.restore import restore
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.parameters import abstract_params, unbox
from tests.convert.stored import save_tensors
from tests.folders import FolderTest
from tests.models import small
from tests.training import tiny

_VIT = resolve(Config(model=small.TWO_STAGES, data=DataConfig(eval_resize=20)))
_DIT = resolve(
  tiny.dit_config(
    model={"channels": 4, "num_heads": (2, 4, 4), "shared_heads": (2, 2, 2),
           "top_k": (0, 1, 1)},
    data={"source": "latents", "path": "some/latents"},
    diffusion={"space": "latent", "prediction": "v"},
    sample={"cfg_scale": 4.0},
  )
)  # fmt: skip
_RUNS = {"moh-vit": _VIT, "moh-dit": _DIT}
_FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends


@functools.cache
def _made(kind: str):
  """A public file, its tensors, our checkpoint, and what `convert` said."""
  folder = pathlib.Path(_FOLDER.name, kind)
  folder.mkdir()
  config, source = _RUNS[kind], folder / "public.safetensors"
  table = checkpoints.model_rules(config.model)
  tensors = rules.dump_params(table, tiny.random_params(config))
  save_tensors(source, tensors)
  out = str(folder / "ours")
  return source, tensors, out, convert(kind, str(source), out, config=config)


class CheckpointTest(parameterized.TestCase):
  def target(self) -> str:
    return self.create_tempdir().full_path

  @parameterized.parameters(*_RUNS)
  def test_there_and_back(self, kind):
    source, tensors, out, said = _made(kind)
    count = sum(x.size for n, x in tensors.items() if n != "pos_embed")
    self.assertEqual(said, ("the given config", count))
    again = source.with_name("again.safetensors")
    self.assertEqual(export(out, str(again)), count)
    chex.assert_trees_all_equal(read_tensors(again), tensors)
    restored = restore(out)
    self.assertEqual((restored.config, restored.step), (_RUNS[kind], 0))

  @parameterized.parameters(
    ("vit", {}, "'vit' .*moh-vit.*transnext"),
    ("moh-vit", {"model": "moh-vit-s81"}, "'moh-vit-s81' .*moh-vit-s80"),
    ("moh-vit", {}, "shapes of none of .*moh-vit-b50"),
    # Candidates are those of the kind, though others' names start alike.
    ("dit", {}, r"of none of \['dit-s2', ((?!moh-dit).)*\Z"),
    ("moh-vit", {"model": "moh-vit-s80"},
     r"public\.safetensors: .*missing: .*shape: "),
    ("dit", {"config": _VIT}, "makes a model of 'dit'.* 'vit'"),
  )  # fmt: skip
  @pytest.mark.integration
  def test_other_formats_and_models_are_refused(self, kind, options, regex):
    source = _made("moh-dit" if "dit" in kind else "moh-vit")[0]
    with self.assertRaisesRegex(ValueError, regex):
      convert(kind, str(source), self.target(), **options)

  @pytest.mark.integration
  def test_exported_file_says_itself_what_it_is(self):
    params = restore(_made("moh-vit")[2]).params
    names = ("ant", "bee", "cat", "dog", "eel")
    ours, exported = self.target(), f"{self.target()}/exported.safetensors"
    checkpoint.save_params(ours, params, checkpoint.Metadata(_VIT, names))
    export(ours, exported)
    # A config that is given comes before that of the file.
    other = resolve(dataclasses.replace(_VIT, data=DataConfig(eval_resize=24)))
    for given, config, known in ((None, _VIT, names), (other, other, ())):
      out = self.target()
      name, _ = convert("moh-vit", exported, out, config=given)
      self.assertEqual(name == "the exported model", given is None)
      restored = restore(out)
      self.assertEqual((restored.config, restored.class_names), (config, known))
      chex.assert_trees_all_equal(restored.params, params)


class ReleasedRunTest(parameterized.TestCase):
  """What a released model stands for; shapes only."""

  @parameterized.parameters(
    ("dit", "dit-s2", 64), ("moh-dit", "moh-dit-s2-75", 16)
  )
  def test_position_table_says_the_input_size(self, kind, name, side):
    model = dataclasses.replace(released_model(name), input_size=(side, side))
    network, inputs = make_model(dataclasses.replace(_DIT, model=model))
    tensors = rules.expected_tensors(
      checkpoints.model_rules(model), unbox(abstract_params(network, inputs))
    )
    run = checkpoints.released_run(released_model(name), tensors)
    self.assertEqual((run.model, run.data.source), (model, "latents"))
    self.assertEqual(run.diffusion, DiffusionConfig(latent_scale=0.18215))
    self.assertEqual(checkpoints._find_model(kind, tensors, "a.pt"), name)


_GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "diffusers_dit.npz"
_MODEL = DiTConfig(
  channels=4,
  input_size=(8, 8),
  num_classes=5,
  width=16,
  num_heads=(2, 2),
  head_dim=8,
  shared_heads=(2, 2),
  top_k=(0, 0),
  router=RouterConfig("none"),
)
_ENTRIES = {
  "_class_name": "DiTTransformer2DModel",
  "norm_type": "ada_norm_zero",
  "norm_eps": 1e-6,
  "num_attention_heads": 2,
  "attention_head_dim": 8,
  "num_layers": 2,
  "sample_size": 8,
  "patch_size": 2,
  "num_embeds_ada_norm": 5,
  "in_channels": 4,
  "out_channels": 8,
}


def _write_theirs(folder: pathlib.Path, changes: Any = ()) -> Any:
  """Writes a DiT as diffusers does; returns our parameters and its tensors."""
  params = tiny.random_params(checkpoints.released_run(_MODEL, {}))
  table = checkpoints.model_rules(_MODEL, "diffusers")
  tensors = rules.dump_params(table, params)
  entries = dict(_ENTRIES)
  if isinstance(changes, str):
    name = f"transformer_blocks.1.norm1.emb.{changes}"
    tensors[name] = tensors[name] + 1
  else:
    entries |= dict(changes)
  (folder / "config.json").write_text(json.dumps(entries))
  save_tensors(folder / "diffusion_pytorch_model.safetensors", tensors)
  return params, tensors


class DiffusersTest(FolderTest):
  """Plain DiT in diffusers' layout; what diffusers makes of it was recorded."""

  def test_comes_in_with_the_outputs_of_diffusers(self):
    params, tensors = _write_theirs(self.root)
    with np.load(_GOLDEN) as stored:
      golden = dict(stored)
    found = {name: str(tensor.shape) for name, tensor in tensors.items()}
    shapes = zip(golden["names"], golden["shapes"])
    self.assertEqual(found, {str(n): str(s) for n, s in shapes})
    name, _ = convert(None, str(self.root), out := str(self.root / "ours"))
    self.assertEqual(name, "the model of config.json")
    restored = restore(out)
    chex.assert_trees_all_equal(restored.params, params)
    self.assertEqual(restored.config.model, _MODEL)
    x = golden["x"].transpose(0, 2, 3, 1)
    outputs, _ = jax.jit(restored.model.apply)(
      {"params": restored.params},
      *(x, golden["t"], golden["labels"].astype(np.int32)),
    )
    expected = golden["out"].transpose(0, 2, 3, 1)
    atol = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=atol)

  @parameterized.parameters(
    ({"norm_type": "ada_norm"}, "config.json: norm_type='ada_norm' must be"),
    ({"out_channels": 5}, r"out_channels=5 must be one of \(None, 4, 8\)"),
    ({"attention_head_dim": 3}, "config.json: model.width=6"),
    # A tensor that must be the same in all blocks.
    ("timestep_embedder.linear_2.bias", r"blocks\.1.*linear_2.bias must"),
  )
  def test_other_folders_are_refused_by_name(self, changed, message):
    _write_theirs(self.root, changed)
    with self.assertRaisesRegex(ValueError, message):
      convert("diffusers", str(self.root), str(self.root / "ours"))
    self.assertFalse((self.root / "ours").exists())


if __name__ == "__main__":
  _write_theirs(pathlib.Path(sys.argv[1]))
