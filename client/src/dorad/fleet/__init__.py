"""Many servers as one: one truth about versions, and adapters that servers pass to each other."""
