"""Mixture-of-Head attention (MoH, arXiv:2410.11842) in JAX and Flax.

The names in `__all__` are the public interface; every other module and name is
internal and may change in any release. They are imported when they are first
used, so `import moh_jax` alone loads neither JAX nor Flax.

The package's families, routers and data sources are registered here, the one
file that stands above every module that their records name.
"""

import dataclasses as _dataclasses
import importlib as _importlib
import typing as _typing

from moh_jax._version import __version__ as __version__
from moh_jax.config.registry import Family as Family
from moh_jax.config.registry import MissingSplitError as MissingSplitError
from moh_jax.config.registry import get_family as get_family
from moh_jax.config.registry import register_family as register_family
from moh_jax.config.registry import register_router as register_router
from moh_jax.config.registry import register_source as register_source

if _typing.TYPE_CHECKING:
  from moh_jax import nnx as nnx
  from moh_jax.config.heads import HeadBudget as HeadBudget
  from moh_jax.config.heads import RouterConfig as RouterConfig
  from moh_jax.config.llm import Sampling as Sampling
  from moh_jax.data.sources import ImageSource as ImageSource
  from moh_jax.inference.generate import Generator as Generator
  from moh_jax.inference.restore import Restored as Restored
  from moh_jax.inference.restore import restore as restore
  from moh_jax.inference.sample import Sampler as Sampler
  from moh_jax.layers.heads import HeadMix as HeadMix
  from moh_jax.layers.moh import MoHAttention as MoHAttention
  from moh_jax.layers.router import HeadRouter as HeadRouter
  from moh_jax.layers.router import Router as Router
  from moh_jax.layers.stack import collect_aux as collect_aux
  from moh_jax.models.dit import DiT as DiT
  from moh_jax.models.llm import LLM as LLM
  from moh_jax.models.registry import get_model as get_model
  from moh_jax.models.registry import list_models as list_models
  from moh_jax.models.vit import ViT as ViT
  from moh_jax.ops.attention import attention as attention
  from moh_jax.ops.routing import Routing as Routing
  from moh_jax.runtime.steps import load_config as load_config
  from moh_jax.training.train import train as train

# Public names that are imported when they are first used, by module.
_LAZY = {
  "config.heads": ("HeadBudget", "RouterConfig"),
  "config.llm": ("Sampling",),
  "data.sources": ("ImageSource",),
  "inference.generate": ("Generator",),
  "inference.restore": ("Restored", "restore"),
  "inference.sample": ("Sampler",),
  "layers.heads": ("HeadMix",),
  "layers.moh": ("MoHAttention",),
  "layers.router": ("HeadRouter", "Router"),
  "layers.stack": ("collect_aux",),
  "models.dit": ("DiT",),
  "models.llm": ("LLM",),
  "models.registry": ("get_model", "list_models"),
  "models.vit": ("ViT",),
  "ops.attention": ("attention",),
  "ops.routing": ("Routing",),
  "runtime.steps": ("load_config",),
  "training.train": ("train",),
}

__all__ = [  # noqa: PLE0604 (all are text)
  "Family",
  "ImageClassifierFamily",
  "MissingSplitError",
  "__version__",
  "get_family",
  "nnx",
  "register_family",
  "register_router",
  "register_source",
  *(name for names in _LAZY.values() for name in names),
]


def __getattr__(name: str) -> _typing.Any:
  """Imports a public name."""
  if name == "nnx":
    return _importlib.import_module("moh_jax.nnx")
  for module, names in _LAZY.items():
    if name in names:
      found = getattr(_importlib.import_module(f"moh_jax.{module}"), name)
      globals()[name] = found
      return found
  raise AttributeError(f"module 'moh_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
  """The names of the module, those that are not imported yet among them."""
  return sorted({*globals(), *__all__})


@_dataclasses.dataclass(frozen=True)
class ImageClassifierFamily(Family):
  """A family of image classifiers: the model section and the network suffice.

  The section is a subclass of `moh_jax.config.ImageClassifier`. The network
  maps images [B, X, Y, channels] to (logits [B, num_classes], ModelAux) and
  takes the keyword `train`.
  """

  task: _typing.Any = "moh_jax.training.classification"
  probe: _typing.Any = "moh_jax.evaluation.probe:image_probe"
  commands: frozenset[str] = frozenset({"classify"})


register_family(
  ImageClassifierFamily(
    "vit",
    model="moh_jax.config.vit:ViTConfig",
    network="moh_jax.models.vit:ViT",
    converter="moh_jax.convert.vit:CONVERTER",
    released="moh_jax.config.released:VIT_MODELS",
    formats={
      "moh-vit": ("moh-vit", "moh-transnext"),
      "transnext": ("transnext",),
    },
  )
)
register_family(
  Family(
    "dit",
    model="moh_jax.config.dit:DiTConfig",
    network="moh_jax.models.dit:DiT",
    task="moh_jax.training.denoising",
    converter="moh_jax.convert.dit:CONVERTER",
    probe="moh_jax.evaluation.probe:diffusion_probe",
    released="moh_jax.config.released:DIT_MODELS",
    commands=frozenset({"sample"}),
    formats={
      "moh-dit": ("moh-dit",),
      "diffusers": ("dittransformer",),
      "dit": ("dit",),
    },
  )
)
register_family(
  Family(
    "llm",
    model="moh_jax.config.llm:LLMConfig",
    network="moh_jax.models.llm:LLM",
    task="moh_jax.training.language_modeling",
    converter="moh_jax.convert.llama:CONVERTER",
    probe="moh_jax.evaluation.probe:text_probe",
    released="moh_jax.config.released:LLM_MODELS",
    commands=frozenset({"generate"}),
    formats={
      "llama": ("llama", "llm", "moh-llm", "meta-llama", "mistral", "qwen"),
      "moh-llama3": ("moh-llama3",),
      "moh-hf": ("moh-",),
      "peft": (),
    },
    exports=("hf", "released", "peft", "base"),
  )
)
register_router("two_stage", "moh_jax.layers.router:TwoStageRouter")
register_router(
  "query_norm",
  "moh_jax.layers.router:QueryNormRouter",
  reads_norms=True,
  straight_through=True,
)
register_router(
  "timestep",
  "moh_jax.layers.router:TimestepRouter",
  reads_time=True,
  straight_through=True,
)
register_router("gate", "moh_jax.layers.router:GateRouter", selects=False)
register_router("none", None)


def _source(name: str, code: str, **properties: _typing.Any) -> None:
  register_source(name, f"moh_jax.data.{code}", **properties)


_LIST = ("class_list",)
_source("digits", "stand_ins:DigitsSource", has_path=False)
_source("image_folder", "sources:ImageFolderSource", options=_LIST)
_source("array_record", "packed:PackedImages")
_TABLES = (*_LIST, "label_column")
_source("parquet", "tables:TableSource", options=_TABLES)
_source("latents", "packed:LatentSource", holds=("latents",))
_BOTH = ("images", "latents")
_source("fake", "stand_ins:FakeSource", holds=_BOTH, has_path=False)


def _text(name: str, code: str, *options: str, **properties: bool) -> None:
  _source(name, code, reads="text", options=options, **properties)


_text("tokens", "sequences:PackedSource", "separate_documents", "mix", "ratios")
_text("stdlib", "stdlib:StdlibSource", "separate_documents", "tokenizer")
_FITTED = ("template", "too_long", "on_error")
_text("chat", "conversations:ChatSource", "tokenizer_path", *_FITTED)
_PAIRS = "conversations:PreferenceSource"
_text("preference", _PAIRS, "tokenizer_path", *_FITTED, pairs=True)
_text("fake", "sequences:FakeSequences", "separate_documents", has_path=False)
