"""Options of `python -m moh_jax evaluate-lm`."""

import argparse

from moh_jax.cli import common
from moh_jax.evaluation.harness_tasks import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(
    parser,
    top_k="routed heads per token in every layer, instead of the trained ones: "
    "one run for each number, side by side",
  )
  parser.add_argument(
    "--tasks",
    metavar="T,T,...",
    help="tasks, groups or tags of lm-eval (the extra moh_jax[llm]), or a "
    f"preset: {', '.join(PRESETS)}",
  )
  common.add_texts(parser, required=False, note="; scored without lm-eval")
  parser.add_argument(
    "--num-fewshot",
    type=int,
    metavar="N",
    help="examples before each question, instead of the preset's or the "
    "task's; tasks whose prompt has none keep it so",
  )
  text = "documents of each task at most"
  common.add_count(parser, "--limit", metavar="N", help=text)
  parser.add_argument(
    "--include-path", default="", metavar="DIR", help="folder of more tasks"
  )
  common.add_count(parser, "--batch-size", 8)
  parser.add_argument(
    "--no-bos",
    action="store_true",
    help="tasks: contexts do not begin with the begin of text, for models that "
    "were trained without",
  )
  common.add_mesh(parser)
  common.add_json(parser)
