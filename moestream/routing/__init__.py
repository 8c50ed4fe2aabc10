"""Which experts a model chooses: traces of it, their replay, and maps made of them. Formats: docs/traces.md."""
