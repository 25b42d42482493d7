"""The demonstration: a task that a tiny model learns in seconds, its base model, and what both models answer."""
