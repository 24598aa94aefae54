"""The options of each command; nothing here imports JAX.

A command NAME is two functions: here `NAME(parser)`, which declares its options
and whose docstring says what the command does, so that help and wrong options
answer at once; and in `cli/NAME.py` `run(args) -> exit status`, imported when
it runs.
"""

from moh_jax.cli.arguments import images, models, text

# Command -> the function that declares its options.
COMMANDS = {
  "evaluate": models.evaluate,
  "evaluate-lm": text.evaluate_lm,
  "fid": images.fid,
  "generate": text.generate,
  "sample": images.sample,
}
