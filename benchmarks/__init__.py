"""Speed and memory, each result written as JSON beside a table."""
