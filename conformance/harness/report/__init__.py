"""Results as data, and their forms: JSON, JUnit and a table in the terminal. Reads results, never an engine."""
