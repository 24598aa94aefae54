"""What a run needs, told before there are devices to run it."""
