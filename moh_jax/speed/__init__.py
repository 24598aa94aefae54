"""Speed, memory and exactness, measured side by side in one process."""
