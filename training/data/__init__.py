"""From preference files to shards, plans and packs; no torch here."""
