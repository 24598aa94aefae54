"""Inference: classes, images, latents, text, and how likely text is."""
