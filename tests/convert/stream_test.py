"""Checkpoints written in pieces: ordinary to Orbax, whole or absent."""

import dataclasses
import textwrap
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from moh_jax.config import MeshConfig
from moh_jax.convert import stream
from moh_jax.convert.llama import model_rules, released_run
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.mesh import make_mesh
from moh_jax.runtime.parameters import abstract_on
from tests.convert import tiny_llm
from tests.folders import FolderTest
from tests.two_processes import python

_RUN = released_run(tiny_llm.MOH, {})
_MESH = MeshConfig(data=2, fsdp=2, tensor=2)


def _save(directory, tensors=None):
  model = tiny_llm.MOH
  params = stream.source_params(
    model_rules(model),
    tensors or tiny_llm.tensors(model),
    tiny_llm.abstract(model),
    source="some.file",
  )
  stream.save_params(directory, params, checkpoint.Metadata(_RUN))


class WriteTest(FolderTest):
  """With blocks of a few rows, so that every leaf has several."""

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(stream, "BLOCK_BYTES", 300))

  @pytest.mark.integration
  def test_standard_restore_reads_it_onto_any_mesh(self):
    dtype = "bfloat16"
    _save(self.root, tiny_llm.tensors(tiny_llm.MOH, dtype))
    expected = tiny_llm.random_params(tiny_llm.MOH, dtype)
    for mesh in (None, make_mesh(_MESH)):
      abstract = abstract_on(*make_model(_RUN), mesh)
      params = checkpoint.restore_params(self.root, 0, abstract, use_ema=True)
      chex.assert_trees_all_equal(params, expected)
      chex.assert_type(jax.tree.leaves(params), np.float32)
      if mesh:
        kernel = params["blocks0"]["mlp"]["up"]["kernel"]
        self.assertEqual(kernel.sharding.mesh.shape, mesh.shape)
        self.assertLess(kernel.addressable_shards[0].data.size, kernel.size)

  def test_tensors_that_are_not_finite_leave_no_checkpoint(self):
    tensors, name = tiny_llm.tensors(tiny_llm.MOH), "model.norm.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    with self.assertRaisesRegex(FloatingPointError, name):
      _save(self.root, tensors)
    with self.assertRaises(FileNotFoundError):
      steps.find_step(self.root, None)

  def test_kill_in_the_middle_leaves_no_checkpoint(self):
    program = textwrap.dedent(f"""
      import os
      from tests.convert import stream_test as t
      from moh_jax.convert import stream
      blocks = stream.SourceLeaf.blocks
      def killed(leaf):
        if leaf.rules[0][0].theirs[0].endswith("down_proj.weight"):
          os.kill(os.getpid(), 9)
        return blocks(leaf)
      stream.SourceLeaf.blocks = killed
      t._save({str(self.root)!r})
    """)
    self.assertEqual(python("-c", program)[0], -9)
    self.assertNotEmpty(list((self.root / "checkpoints").iterdir()))
    with self.assertRaises(FileNotFoundError):
      steps.find_step(self.root, None)
    _save(self.root)
    self.assertEqual(steps.find_step(self.root, None), 0)


class MemoryTest(FolderTest):
  @pytest.mark.integration
  def test_peak_is_far_below_a_stacked_leaf(self):
    # Three MLP leaves of 64 MiB in float32, their tensors of 4 MiB.
    big = dataclasses.replace(
      tiny_llm.MHA,
      **{"width": 480, "mlp_dim": 4096, "num_heads": (6,) * 8},
      **{"shared_heads": (6,) * 8, "top_k": (0,) * 8},
    )
    tiny_llm.write_folder(self.root / "big", big, "bfloat16", shards=2)
    tiny_llm.write_folder(self.root / "tiny", tiny_llm.MHA, "bfloat16")
    program = textwrap.dedent(f"""
      import resource
      from moh_jax.convert import checkpoints, stream
      stream.BLOCK_BYTES = 2**21
      peaks = []
      for name in ("tiny", "big"):
        folder = f"{self.root}/{{name}}"
        checkpoints.convert("llama", folder, f"{{folder}}_ours")
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
      print(peaks[1] - peaks[0])
    """)
    self.assertLess(int(python("-c", program)[1]), 48 * 1024)  # KiB
