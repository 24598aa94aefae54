"""Trains a model: python train.py --config=FILE[:ARG] --workdir=DIR.

Every key of the config can be overridden (--config.optim.lr=3e-4). Run again
with the same arguments, it resumes from the last checkpoint. The same command
is `python -m moh_jax train`.
"""

import sys

from moh_jax.__main__ import main

if __name__ == "__main__":
  main(["train", *sys.argv[1:]])
