"""The built-in families: one record each, see `config.family.Family`."""
