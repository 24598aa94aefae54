"""Optimizer state and kept results in the memory of the host."""

from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from absl.testing import absltest

from moh_jax.runtime.sharding import HOST_MEMORY
from moh_jax.training import entrance
from moh_jax.training.train import train
from tests.training import tiny


class HostMemoryTest(absltest.TestCase):
  @pytest.mark.slow
  def test_a_run_is_the_same_and_resumes_on_a_mesh(self):
    """Its state is saved from the host and restored to it."""

    def config(memory, remat, steps):
      return tiny.llm_config(
        mesh=tiny.MESH,
        train={"steps": steps},
        optim={"lr": 1e-3, "warmup_steps": 0, "state_memory": memory},
        model={"remat": remat},
      )

    folders = [self.create_tempdir().full_path for _ in range(2)]
    device = train(config("device", "dots", 3), folders[0]).state
    for steps in (2, 3):
      host = train(config("host", "offload", steps), folders[1]).state
    moments = host.opt_state[1][0].mu["head"]["kernel"]
    self.assertEqual(moments.sharding.memory_kind, HOST_MEMORY)
    chex.assert_trees_all_close(
      jax.device_get(host),
      jax.device_get(device),
      rtol=1e-6,
      atol=1e-7,
    )

  def test_devices_without_it_are_refused_in_one_line(self):
    device = SimpleNamespace(
      device_kind="Abacus",
      addressable_memories=lambda: [SimpleNamespace(kind="beads")],
    )
    mesh = SimpleNamespace(devices=np.array([device]))
    with self.assertRaisesRegex(
      ValueError, r"^optim.state.* of the kind pinned_host; Abacus has .'beads'"
    ):
      config = tiny.llm_config(optim={"state_memory": "host"})
      entrance.check_host_memory(config, mesh)


if __name__ == "__main__":
  absltest.main()
