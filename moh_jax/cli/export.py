"""`python -m moh_jax export`."""

import dataclasses

from moh_jax.cli import command
from moh_jax.config.base import Dtype
from moh_jax.config.registry import export_forms
from moh_jax.runtime.alive import alive

_KEYS = "eval.use_ema", "train.init_from"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Stored):
  """Turn a checkpoint into public tensor names.

  Averaged parameters are taken where there are some;
  --config.eval.use_ema=false takes the raw ones. --config.train.init_from says
  where the model that adapters were trained on is now.

  Attributes:
    out: safetensors file to write; for a language model a folder, new or empty.
    to: form of a language model's folder: hf (default) is what transformers
      loads, with our code where it has none for the model; released is what
      the modeling file of the MoH-LLaMA3 release runs; peft has the adapters of
      a run alone, as PEFT loads them, and base the model that they are trained
      on, as the run computes with it.
    dtype: of the stored weights.
    license: licence that the model card states, such as apache-2.0.
    overwrite: replace a folder that holds something; one that is as
      export left it is replaced in any case.
  """

  out: command.OutPath
  to: str | None = None
  dtype: Dtype = "float32"
  license: str = ""
  overwrite: bool = False

  CHANGES = (f"{_KEYS[0]}=true",)

  def check(self) -> None:
    """The form is known, and no other key is changed."""
    super().check()
    if self.to is not None and self.to not in export_forms():
      self.fail("to", f"must be one of {export_forms()}")
    for change in self.changes:
      if change.partition("=")[0] not in _KEYS:
        raise ValueError(
          f"--config.{change}: export writes what is stored; only "
          f"{' and '.join(_KEYS)} can be changed"
        )


@alive("exporting")
def run(options: Options) -> int:
  """Writes the weights under their public names."""
  from moh_jax.convert.checkpoints import export, written_over

  metadata, step = options.stored()
  config = metadata.config
  reads = options.checkpoint, config.train.init_from
  with written_over(options.out, reads, options.overwrite) as out:
    count = export(
      options.checkpoint,
      out,
      to=options.to,
      step=step,
      use_ema=config.eval.use_ema,
      base=config.train.init_from,
      dtype=options.dtype,
      license=options.license,
    )
  print(f"{count:,} parameters written to {options.out}")
  return 0
