"""Text: documents, tokenizers, token sets, packed sequences."""
