"""The rooms behind the checks; see docs/architecture.md for what each one may import."""
