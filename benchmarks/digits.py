"""Scores samples of a diffusion model of digits, and compares its solvers.

  python -m benchmarks.digits --checkpoint runs/dit
  python -m benchmarks.digits --checkpoint runs/dit --solvers

A scikit-learn classifier, trained on the real training scans, classifies 500
guided samples, 50 of each digit. `accuracy` is the share of samples classified
as the digit that was asked for, `classifier_accuracy` the classifier's accuracy
on held-out real scans. `frechet` is the Frechet distance of the samples' pixels
(0 to 16) from those of held-out scans, as FID is of features.

--solvers samples from the same noise with several solvers and numbers of steps.
Errors are root mean squared differences of pixels in [-1, 1] from DDIM (flow
matching: Heun) with 1000 steps, which is close to the exact solution: `median`
is the median over images, and `rms` is over all images, dominated by the few
whose solution is unstable.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import svm

from benchmarks.common import finish, make_parser
from moh_jax.config.dit import FLOW
from moh_jax.data.stand_ins import DigitsSource
from moh_jax.evaluation.fid import frechet_distance, moments
from moh_jax.inference.restore import Restored, restore
from moh_jax.models.generation import make_sampler, to_pixels

_SAMPLES = 500
# Method and number of steps.
_SOLVERS = "ddpm 100, ddim 20, ddim 50, ddim 100, dpm 10, dpm 20"
_FLOW_SOLVERS = "euler 20, euler 50, euler 100, heun 10, heun 20"


def main() -> None:
  """Scores a checkpoint."""
  parser = make_parser(__doc__)
  parser.add_argument("--checkpoint", required=True, metavar="DIR")
  parser.add_argument("--seed", type=int, default=0, help="of the noise")
  parser.add_argument("--solvers", action="store_true", help="compare them")
  args = parser.parse_args()
  restored = restore(args.checkpoint)
  real = {split: _scans(split) for split in ("train", "val")}
  classifier = svm.SVC(gamma=0.001).fit(*real["train"])
  own = float(classifier.score(*real["val"]))
  rows, options = [], restored.config.sample
  solvers = [(options.method, options.steps)]
  reference = None
  if args.solvers:
    is_flow = restored.config.diffusion.schedule == FLOW
    named = _FLOW_SOLVERS if is_flow else _SOLVERS
    solvers = [name.split() for name in named.split(", ")]
    exact = "heun" if is_flow else "ddim"
    reference = _samples(restored, exact, "1000", args.seed)
  for method, steps in solvers:
    images = _samples(restored, method, steps, args.seed)
    features = _features(np.asarray(to_pixels(images)))
    labels = np.arange(len(images)) % len(classifier.classes_)
    row = {
      "method": method,
      "steps": steps,
      "cfg_scale": options.cfg_scale,
      "accuracy": float(classifier.score(features, labels)),
      "frechet": _distance(features, real["val"][0]),
    }
    if reference is not None:
      squares = np.square(images - reference).mean((1, 2, 3))
      row["median"] = float(np.median(np.sqrt(squares)))
      row["rms"] = float(np.sqrt(squares.mean()))
    rows.append(row)
  if args.json != "-":
    between = _distance(real["train"][0], real["val"][0])
    print(
      f"the classifier reads {own:.2%} of held-out real digits, whose distance "
      f"from those of training is {between:.2f}"
    )
  finish(args, rows, step=restored.step, classifier_accuracy=own)


def _scans(split: str) -> tuple[np.ndarray, np.ndarray]:
  """Features and labels of real digits."""
  source = DigitsSource(None, split)
  examples = [source[i] for i in range(len(source))]
  pixels = np.stack([e["image"] for e in examples])
  return _features(pixels), np.stack([e["label"] for e in examples])


def _distance(features: np.ndarray, others: np.ndarray) -> float:
  """Frechet distance of two sets of features, [N, D] and [M, D]."""
  a, b = (moments(x).gaussian() for x in (features, others))
  return frechet_distance(a, b)


def _features(pixels: np.ndarray) -> np.ndarray:
  """Flattens uint8 pixels and scales them to scikit-learn's 0 to 16."""
  return pixels.reshape(len(pixels), -1) * (16 / 255)


def _samples(
  restored: Restored, method: str, steps: str, seed: int
) -> np.ndarray:
  """Samples images [500, 8, 8, 1] float32; labels go 0 to 9 in turn."""
  config = restored.config
  options = dataclasses.replace(config.sample, method=method, steps=steps)
  config = dataclasses.replace(config, sample=options)
  draw = jax.jit(make_sampler(restored.model, config))
  index = jnp.arange(_SAMPLES, dtype=jnp.int32)
  labels = index % config.model.num_classes
  return np.asarray(draw(restored.params, seed, index, labels))


if __name__ == "__main__":
  main()
