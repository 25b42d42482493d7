"""The account of every token: step records, their writer, the meter and the DuckDB store; no torch here."""
