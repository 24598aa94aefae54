"""The formats of public checkpoints, by name; importable without JAX."""

# Format -> how the names of the released models that have it begin.
RELEASED = {
  "moh-vit": ("moh-vit",),
  "transnext": ("transnext",),
  "moh-dit": ("moh-dit",),
  "dit": ("dit",),
  "llama": ("llama", "llm", "moh-llm"),
  "moh-llama3": ("moh-llama3",),
}
FORMATS = tuple(RELEASED)
# Formats whose sources say in a config.json what model they are.
SELF_DESCRIBED = ("llama", "moh-llama3")
