"""The SQLite file. Every SQL statement of the project is in this package, and nothing else is."""
