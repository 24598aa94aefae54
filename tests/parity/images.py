"""Recorded cases of the autoencoder, of image metrics and their network."""

import functools
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moh_jax.convert.inception import convert_inception
from moh_jax.convert.vae import convert_vae, public_config
from moh_jax.data.transforms import sample_posterior
from moh_jax.evaluation import fid
from moh_jax.layers.linear import add_bias
from moh_jax.models.inception import InceptionV3, prepare
from moh_jax.models.vae import VAE
from tests.parity.case import Case, apply, channels_first


def autoencoder(case: Case) -> dict[str, Any]:
  """Results of a case of the Stable Diffusion autoencoder.

  Returns:
    Mean and log-variance of the encoder's Gaussian, a sample from it, and the
    images decoded from recorded latents and from the mean.
  """
  config = public_config(case.hyper)
  params = {"params": convert_vae(case.weights, config, source="weights")}
  run = jax.jit(VAE(config).apply, static_argnames="method")
  mean, logvar = run(params, case.images("image"), method="encode")
  noise = np.asarray(case.images("sample_eps"))
  results = {
    "mean": mean,
    "logvar": logvar,
    "sample": sample_posterior(np.asarray(mean), np.asarray(logvar), noise),
    "decoded": run(params, case.images("z"), method="decode"),
    "mode_reconstruction": run(params, mean, method="decode"),
  }
  return {name: channels_first(x) for name, x in results.items()}


def metrics(case: Case) -> dict[str, Any]:
  """The metrics of recorded features; the case has no network."""
  arrays = case.arrays
  channels = case.hyper["spatial_channels"]
  gaussians = {}
  for name in ("real", "gen"):
    maps = arrays[f"{name}_maps"][..., :channels]
    gaussians[name] = _gaussian(arrays[f"{name}_features"])
    gaussians[f"{name}_s"] = _gaussian(maps.reshape(len(maps), -1))
  results = {}
  for name, gaussian in gaussians.items():
    results[f"mu_{name}"] = gaussian.mean
    results[f"sigma_{name}"] = gaussian.covariance
  references = gaussians["real"], gaussians["real_s"]
  if "adm_reference.npz" in case.meta["files"]:  # as `fid` reads them
    samples = fid.open_images(case.directory / "adm_samples.npz")
    assert samples.count == sum(map(len, samples.batches(2)))
    dims = [gaussian.mean.size for gaussian in references]
    read = fid.read_statistics(case.directory / "adm_reference.npz", *dims)
    references = read.pool3, read.spatial
  constant = [
    _gaussian(np.repeat(arrays[f"{name}_features"][:1], count, axis=0))
    for name, count in (("real", 6), ("gen", 9))
  ]
  for name, a, b in (
    ("fid", gaussians["gen"], references[0]),
    ("sfid", gaussians["gen_s"], references[1]),
    ("deg_fid", _gaussian(arrays["deg_gen"]), _gaussian(arrays["deg_real"])),
    ("fid_self", gaussians["real"], gaussians["real"]),
    ("const_fid", *constant),
  ):
    results[name] = fid.frechet_distance(a, b)
    results[f"{name}_parts"] = np.array(fid.frechet_terms(a, b))
  return results | _scores(case) | _manifolds(case)


def _gaussian(features: np.ndarray) -> fid.Gaussian:
  return fid.moments(features).gaussian()


def _scores(case: Case) -> dict[str, Any]:
  """Inception Scores of blocks, of parts and of extreme logits."""
  logits, hyper = case.arrays["gen_logits"], case.hyper
  block, small, parts = (
    hyper[f"is_{name}"] for name in ("block", "small_block", "parts")
  )
  count = len(logits)

  def scores(*bounds: int) -> np.ndarray:
    pairs = itertools.pairwise(bounds)
    return np.array([fid.block_score(logits[a:b]) for a, b in pairs])

  tenths = scores(*(i * count // parts for i in range(parts + 1)))
  large, few = (scores(*range(0, count, n), count) for n in (block, small))
  return {
    "gen_probs": np.exp(fid.log_softmax(logits)),
    "is_one_block": large,
    f"is_blocks_{small}": few,
    "is_tenths": tenths,
    "inception_score": large.mean(),
    f"inception_score_blocks_{small}": few.mean(),
    "inception_score_tenths": np.array([tenths.mean(), tenths.std()]),
    "extreme_inception_score": fid.block_score(case.arrays["extreme_logits"]),
  }


def _manifolds(case: Case) -> dict[str, Any]:
  """Radii, membership, precision and recall, with and without ties."""
  arrays, hyper = case.arrays, case.hyper
  real, gen = arrays["real_features"], arrays["gen_features"]
  results = {}
  for prefix, a, b in (
    ("", real, gen),
    ("tie_", arrays["tie_real"], arrays["tie_gen"]),
  ):
    radii_a, radii_b = (
      fid.knn_radii(features, hyper["pr_k_default"]) for features in (a, b)
    )
    inside = fid.in_manifold(b, a, radii_a)
    covered = fid.in_manifold(a, b, radii_b)
    results |= {
      f"{prefix}radii_real": radii_a,
      f"{prefix}radii_gen": radii_b,
      f"{prefix}gen_in_real": inside,
      f"{prefix}real_in_gen": covered,
      f"{prefix}precision": inside.mean(),
      f"{prefix}recall": covered.mean(),
    }
  pairs = [fid.precision_recall(gen, real, k) for k in hyper["pr_k"]]
  results["precision"], results["recall"] = map(np.array, zip(*pairs))
  return results


def inception(case: Case) -> dict[str, Any]:
  """The feature network on every recorded set of pictures, in one batch."""
  hyper, arrays = case.hyper, case.arrays
  model = InceptionV3()
  tensors = regenerate(case.meta, case.weights)
  params = convert_inception(tensors, source="weights")
  grid = arrays["input_grid_index"]
  results, inputs = {}, {}
  for name, images in sorted(arrays.items()):
    if not name.startswith("images_"):
      continue
    for resize in ("tf1", "ptfid"):
      resized = jax.jit(prepare, static_argnums=(1, 2))
      x = np.asarray(resized(images, resize, hyper["input_size"]))
      prefix = f"{name.removeprefix('images_')}_{resize}"
      results[f"{prefix}_input_stats"] = _input_stats(x)
      results[f"{prefix}_input_grid"] = x[:, grid][:, :, grid]
      inputs[prefix] = x
  outputs = jax.jit(functools.partial(_features, model))(
    params, np.concatenate([*inputs.values()]), tensors["fc.bias"]
  )
  ends = np.cumsum([len(x) for x in inputs.values()])[:-1]
  for name, values in outputs.items():
    for prefix, part in zip(inputs, np.split(np.asarray(values), ends)):
      results[f"{prefix}_{name}"] = part
  return results


def _features(
  model: InceptionV3, params: Any, x: jax.Array, bias: jax.Array
) -> dict[str, Any]:
  features, recorded = apply(model, params, x)
  means = {
    f"mean_{name.removesuffix('_out')}": block.mean((1, 2))
    for name, (block,) in recorded.items()
  }
  return means | {
    "pool3": features.pool3,
    "spatial": features.spatial,
    "logits_unbiased": features.logits,
    "logits": add_bias(features.logits, bias),
    "probs": jax.nn.softmax(features.logits),
  }


def _input_stats(x: np.ndarray) -> np.ndarray:
  """Mean, deviation, minimum, maximum per image and channel, [N, 3, 4]."""
  x, axes = x.astype(np.float64), (1, 2)
  return np.stack([x.mean(axes), x.std(axes), x.min(axes), x.max(axes)], -1)


def regenerate(
  meta: Mapping[str, Any], stored: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Weights of a case that stores a seed: its recipe, exact on any machine.

  Args:
    meta: of the case; "recipe" explains the steps that are taken here.
    stored: the tensors that the case holds itself.

  Raises:
    ValueError: a tensor is not the recorded one.
  """
  seed = meta["hyper_parameters"]["weight_seed"]
  tensors = {}
  for entry in meta["state_dict"]:
    name, shape = entry["name"], tuple(entry["shape"])
    if entry["source"] == "recipe":
      digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
      key = np.frombuffer(digest[:16], "<u8").astype(np.uint64)
      raw = np.random.Philox(key=key).random_raw(int(np.prod(shape)))
      unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1
      value = np.float32(entry["offset"] + entry["scale"] * unit)
      tensors[name] = value.reshape(shape)
    elif entry["source"] == "weights.safetensors":
      tensors[name] = stored[name]
    else:  # BatchNorm's counters
      continue
    found = hashlib.sha256(tensors[name].astype("<f4").tobytes()).hexdigest()
    if found != entry["sha256"]:
      raise ValueError(f"{name}: not the recorded tensor (SHA-256 {found})")
  return tensors
