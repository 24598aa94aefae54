"""The options of each command; nothing here imports JAX.

A command NAME is two modules: `cli/arguments/NAME.py` with
`add_arguments(parser)`, so that help and wrong options answer at once, and
`cli/NAME.py` with `run(args) -> exit status`, imported when it runs.
"""
