"""Options of the commands for text and language models."""

import argparse

from moh_jax.cli import common, fields, text_files
from moh_jax.config import CACHE_DTYPES
from moh_jax.config.llm import Sampling


def evaluate_lm(parser: argparse.ArgumentParser) -> None:
  """Score a language model on the harness's tasks or on text."""
  common.add_checkpoint(parser, "; given several times, a column for each")
  parser.add_argument(
    "--tasks",
    metavar="T,T,...",
    help="tasks, groups or tags of lm-eval (the extra moh_jax[llm]), or a "
    "preset: paper-small, paper-llama3",
  )
  text_files.add_texts(parser, required=False, note="; scored without lm-eval")
  parser.add_argument(
    "--num-fewshot",
    type=fields.integer,
    metavar="N",
    help="examples before each question, instead of the preset's or the "
    "task's; tasks whose prompt has none keep it so",
  )
  text = "documents of each task at most"
  common.add_count(parser, "--limit", metavar="N", help=text)
  parser.add_argument(
    "--include-path", default="", metavar="DIR", help="folder of more tasks"
  )
  common.add_count(parser, "--batch-size", 8, help="texts at a time")
  parser.add_argument(
    "--no-bos",
    action="store_true",
    help="tasks: contexts do not begin with the begin of text, for models that "
    "were trained without",
  )
  common.add_mesh(parser)
  common.add_json(parser)


def generate(parser: argparse.ArgumentParser) -> None:
  """Write on from prompts with a language model."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  prompts = parser.add_mutually_exclusive_group()
  prompts.add_argument(
    "--prompt",
    action="append",
    default=[],
    metavar="TEXT",
    help="text to write on from; several times for several texts",
  )
  prompts.add_argument(
    "--messages",
    metavar="FILE",
    help="conversation to answer: a JSON list of objects with 'role' and "
    "'content'",
  )
  prompts.add_argument(
    "--prompt-file",
    metavar="FILE",
    help='JSON lines such as {"prompt": "TEXT"}; needs --out',
  )
  prompts.add_argument(
    "--interactive",
    action="store_true",
    help="read prompts from the terminal, one a line; the default there",
  )
  parser.add_argument(
    "--out",
    metavar="FILE",
    help="of --prompt-file: JSON lines in the same order; a second run "
    "continues the first",
  )
  parser.add_argument(
    "--chat",
    action="store_true",
    help="each prompt is a user's message, and the model's chat template makes "
    "the text from it (the extra moh_jax[llm])",
  )
  parser.add_argument(
    "--system", metavar="TEXT", help="first message of each --chat"
  )
  parser.add_argument(
    "--chat-template",
    metavar="NAME",
    help="where the model has several (default: default)",
  )
  parser.add_argument(
    "--no-bos",
    action="store_true",
    help="prompts do not begin with the begin of text, whatever the tokenizer "
    "says",
  )
  parser.add_argument(
    "--parse-special",
    action="store_true",
    help="names of special tokens in a prompt are these tokens, not text",
  )
  fields.add_fields(
    parser, Sampling, "max_new_tokens", "temperature", "top_p", "seed"
  )
  parser.add_argument(
    "--sample-top-k",
    type=fields.integer,
    default=0,
    metavar="N",
    help="sample from the N best tokens (--top-k is of the heads)",
  )
  parser.add_argument(
    "--stop", action="append", default=[], metavar="TEXT", help="ends a text"
  )
  parser.add_argument(
    "--batch-size",
    type=fields.integer,
    default=8,
    help="texts at a time (default: 8)",
  )
  parser.add_argument(
    "--cache-dtype", choices=CACHE_DTYPES, help="of keys and values"
  )
  common.add_json(parser)
