"""Other runtimes than the one of this Python: where they are, and what a model does there."""
