"""The cure: what becomes of an export on its way from its findings to OUT, step by step."""
