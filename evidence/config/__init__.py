"""Values of config.json, changed one at a time on healthy exports."""
