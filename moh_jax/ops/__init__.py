"""Pure array functions: no Flax modules, no configuration."""
