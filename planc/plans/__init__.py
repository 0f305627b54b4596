"""The plan as an artifact: schema, store, check, diff, show. Standard library and numpy only."""
