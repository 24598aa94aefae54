"""`python -m moh_jax export`."""

import dataclasses

from moh_jax.cli.options import PREFIX, InPath, OutPath, Stored
from moh_jax.config import export_forms
from moh_jax.config.base import Dtype

_UNITS = {"GB": 10**9, "MB": 10**6}
_EMA = "eval.use_ema"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Stored):
  """Turn a checkpoint into public tensor names.

  Averaged parameters are taken where there are some;
  --config.eval.use_ema=false takes the raw ones.

  Attributes:
    out: safetensors file to write; for a language model, and with --to, a
      folder, new or empty.
    to: form of the folder. Of a language model: hf (default) is what
      transformers loads, with our code where it has none for the model;
      released is what the modeling file of the MoH-LLaMA3 release runs. Of a
      plain DiT: diffusers is what DiTTransformer2DModel loads.
    dtype: of the stored weights.
    shard_size: largest file of a folder, as 5GB or 500MB.
    license: licence that the model card states, such as apache-2.0.
    scores: scores for the model card, as `evaluate --json` writes them.
  """

  out: OutPath
  to: str | None = None
  dtype: Dtype = "float32"
  shard_size: str = "5GB"
  license: str = ""
  scores: InPath | None = None

  def check(self) -> None:
    """The form is known, the size a number, and no other key is changed."""
    super().check()
    if self.to is not None and self.to not in export_forms():
      self.fail("to", f"must be one of {export_forms()}")
    if not self.shard_bytes:
      self.fail(
        "shard_size", f"must be a whole number and one of {', '.join(_UNITS)}"
      )
    for change in self.changes:
      if change.partition("=")[0] != _EMA:
        raise ValueError(
          f"{PREFIX}{change}: export writes what is stored; only {_EMA} can "
          "be changed"
        )

  @property
  def shard_bytes(self) -> int:
    """Bytes of --shard-size; 0 where it is no size."""
    number, unit = self.shard_size[:-2], self.shard_size[-2:].upper()
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    return int(number) * _UNITS.get(unit, 0) if is_number else 0


def run(options: Options) -> int:
  """Writes the weights under their public names."""
  from moh_jax.config.parse import changed
  from moh_jax.convert.checkpoints import export

  metadata, step = options.stored()
  config = changed(metadata.config, (f"{_EMA}=true", *options.changes))
  count = export(
    options.checkpoint,
    options.out,
    to=options.to,
    step=step,
    use_ema=config.eval.use_ema,
    dtype=options.dtype,
    shard_size=options.shard_bytes,
    license=options.license,
    scores=options.scores or "",
    verify=not options.no_verify,
  )
  print(f"{count:,} parameters written to {options.out}")
  return 0
