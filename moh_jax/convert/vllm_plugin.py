"""The plug-in of vLLM that serves exported Mixture-of-Head language models.

vLLM finds `register` by its entry point, in every process, and imports neither
JAX nor Flax. Models without a router have architectures that vLLM knows.
"""

from transformers import AutoConfig
from vllm import ModelRegistry

from moh_jax.convert.transformers_code import configuration_moh


def register() -> None:
  """Makes the model and its config known; may be called again."""
  config = configuration_moh.MoHLlamaConfig
  AutoConfig.register(config.model_type, config, exist_ok=True)
  ModelRegistry.register_model(
    # By name: a process that imports the model could not fork.
    "MoHLlamaForCausalLM",
    "moh_jax.convert.vllm_model:MoHLlamaForCausalLM",
  )
