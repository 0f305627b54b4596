"""The graph: types, ops, recipes, text, verifier, interpreter. Needs numpy only; knows nothing of the floors above."""
