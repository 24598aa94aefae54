"""Trains a model: python train.py --config=FILE[:ARG] --workdir=DIR.

Every key of the config can be overridden (--config.optim.lr=3e-4). To
resume from the last checkpoint, run it again with the same arguments.
`python -m moh_jax train` is the same command.
"""

import sys

from moh_jax.__main__ import main

if __name__ == "__main__":
  main(["train", *sys.argv[1:]])
