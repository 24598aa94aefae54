"""Records what diffusers makes of a small DiT in its layout.

Needs torch and diffusers, and nothing of this project. FOLDER is what
tests/convert/checkpoints_test.py writes:

  python -m tests.convert.checkpoints_test FOLDER
  python tests/tools/record_diffusers.py FOLDER tests/goldens
"""

import pathlib
import sys

import diffusers
import numpy as np
import torch


def main(folder: str, out: str) -> None:
  """Loads the folder, runs the model, and writes one npz file."""
  model, report = diffusers.DiTTransformer2DModel.from_pretrained(
    folder, output_loading_info=True
  )
  assert not any(report.values()), report
  generator = torch.Generator().manual_seed(0)
  x = torch.randn(3, 4, 8, 8, generator=generator)
  t = torch.tensor([0.0, 417.0, 999.0])
  labels = torch.tensor([0, 4, 5])  # the last one stands for no label
  # The release, whose weights people have, trained with other frequencies of
  # the timesteps than diffusers computes.
  for block in model.transformer_blocks:
    block.norm1.emb.time_proj.downscale_freq_shift = 0
  with torch.no_grad():
    out_of_model = model.eval()(x, t, labels).sample
  tensors = model.state_dict()
  np.savez(
    pathlib.Path(out) / "diffusers_dit.npz",
    version=diffusers.__version__,
    names=list(tensors),
    shapes=[str(tuple(tensor.shape)) for tensor in tensors.values()],
    x=x.numpy(),
    t=t.numpy(),
    labels=labels.numpy(),
    out=out_of_model.numpy(),
  )


main(*sys.argv[1:])
