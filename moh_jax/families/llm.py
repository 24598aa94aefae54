"""MoH-LLM: decoder-only language models of the LLaMA kind."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from moh_jax.config import Config, LLMConfig, TextDataConfig, TuneConfig
from moh_jax.config.family import Family
from moh_jax.config.registry import register_family

_BENCH_LENGTH = 512  # tokens, where `bench --lengths` is not given


class LLMFamily(Family):
  """MoH-LLM, MoH-LLaMA3 and LLaMA."""

  name = "llm"
  model = LLMConfig
  data = TextDataConfig
  sections = {"tune": TuneConfig}
  commands = frozenset({"evaluate-lm", "generate"})
  reads_text = True
  formats = {
    "llama": ("llama", "llm", "moh-llm"),
    "moh-llama3": ("moh-llama3",),
    "moh-hf": ("moh-",),
  }
  exports = ("hf", "released")

  def check(self, config: Config) -> None:
    """Sequences fit the positions; a schedule of top_k ends as the model is."""
    model, data = config.model, config.data
    if data.sequence_length > model.max_length:
      raise ValueError(
        f"data.sequence_length={data.sequence_length} must be at most "
        f"model.max_length={model.max_length}, the range of its positions"
      )
    _check_schedule(config)

  def with_model(self, config: Config, model: LLMConfig) -> Config:
    """A schedule of top_k keeps its steps and ends as that model is."""
    tune, values = config.tune, config.tune.top_k_values
    if model.router.kind == "none":
      tune = TuneConfig()
    elif values:
      # They lie between the last one and all routed heads as before.
      last, new_last = values[-1], max(model.top_k)
      most, new_most = (
        min(b.routed for b in one.budgets() if b.top_k)
        for one in (config.model, model)
      )
      scale = (new_most - new_last) / max(1, most - last)
      moved = (new_last + round((value - last) * scale) for value in values)
      tune = dataclasses.replace(
        tune, top_k_values=tuple(max(1, value) for value in moved)
      )
    return dataclasses.replace(config, model=model, tune=tune)

  def released(self) -> Mapping[str, LLMConfig]:
    """MoH-LLM, MoH-LLaMA3 and LLaMA by released name."""
    from moh_jax.config.sizes_llm import LLM_MODELS

    return LLM_MODELS

  def bench_run(self, model: LLMConfig, batch: int) -> Config:
    """Random tokens."""
    length = min(_BENCH_LENGTH, model.max_length)
    data = TextDataConfig(sequence_length=length, batch_size=batch)
    return Config(model=model, data=data)

  def with_length(self, config: Config, length: int) -> Config:
    """Sequences of another length, within the range of the positions."""
    if not 1 <= length <= config.model.max_length:
      raise ValueError(
        f"--lengths {length} must be in [1, {config.model.max_length}], the "
        "model's max_length"
      )
    data = dataclasses.replace(config.data, sequence_length=length)
    return dataclasses.replace(config, data=data)

  def data_at(self, config: Config, path: str) -> dict[str, Any]:
    """One token set in place of a mix."""
    return {"source": "tokens", "path": path, "mix": (), "ratios": ()}

  def make_model(self, config: Config) -> tuple:
    """Tokens [1, 1] int32."""
    import jax

    from moh_jax.models.llm import LLM

    return LLM(config.model), (jax.ShapeDtypeStruct((1, 1), "int32"),)

  def fit_params(self, params: Any, trained: Config, wanted: Config) -> Any:
    """Adds rows for new tokens, and stacks the layers as wanted."""
    from moh_jax.models.llm_params import grow_vocabulary
    from moh_jax.models.restack import restack

    ours, theirs = trained.model, wanted.model
    if theirs.vocab_size > ours.vocab_size:
      params = grow_vocabulary(params, theirs.vocab_size)
    return restack(params, ours, theirs)

  def serving_config(self, config: Config) -> Config:
    """Without the schedule of top_k: what it ended with is served."""
    return dataclasses.replace(config, tune=TuneConfig())

  def serving_dtypes(self, params: Any, config: Config) -> Any:
    """Matrices in the compute dtype; routers, norms and biases in float32."""
    from moh_jax.models.llm_params import compute_dtypes

    return compute_dtypes(params, config.model)

  def probe(self, model: Any, config: Config) -> Any:
    """Packed sequences by task."""
    from moh_jax.analysis.probe import Probe

    def apply(params: Any, batch: Any, **options: Any) -> Any:
      return model.apply(
        {"params": params},
        batch["inputs"],
        positions=batch["positions"],
        segments=batch["segments"],
        token_mask=batch["segments"] > 0,
        with_logits=False,
        **options,
      )

    def token_mask(batch: Any) -> Any:
      return batch["segments"] > 0

    return Probe(apply, shown="inputs", label="task", token_mask=token_mask)

  def head_importance(
    self, model: Any, config: Config, params: Any, batches: Iterable[Any]
  ) -> Any:
    """The change of the loss without a head, to first order.

    None where layers differ in their number of heads, which have no gates.
    """
    from moh_jax.analysis.importance import head_importance

    if len(set(config.model.num_heads)) > 1:
      return None
    return head_importance(model, config.model, params, batches)

  def tasks(self) -> Any:
    """Next-token prediction; bits per byte of held-out text."""
    from moh_jax.training import language_modeling

    return language_modeling

  def converter(self) -> Any:
    """Tensor names of transformers' LlamaForCausalLM and its relatives."""
    from moh_jax.convert.llama import CONVERTER

    return CONVERTER


def _check_schedule(config: Config) -> None:
  model, tune = config.model, config.tune
  if not tune.top_k_values:
    return
  routing = [k for k in model.top_k if k] if model.router.kind != "none" else []
  if not routing or set(routing) != {tune.top_k_values[-1]}:
    raise ValueError(
      f"tune.top_k_values={tune.top_k_values} must end with the model.top_k of "
      f"the layers that route, {tuple(sorted(set(routing)))}"
    )
  if tune.top_k_steps[-1] >= config.train.steps:
    raise ValueError(
      f"tune.top_k_steps={tune.top_k_steps} must end before train.steps="
      f"{config.train.steps}"
    )
  least = min(b.routed for b in model.budgets() if b.top_k)
  if max(tune.top_k_values) > least:
    raise ValueError(
      f"tune.top_k_values={tune.top_k_values} must be at most the {least} "
      "routed heads of a layer"
    )


register_family(LLMFamily())
