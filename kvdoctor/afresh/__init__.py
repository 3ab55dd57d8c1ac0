"""An export made afresh from a checkpoint: what is known of the sick one, what is chosen, made, kept and proved."""
