"""Text: documents, tokenizers, sets of tokens, and packed sequences."""
