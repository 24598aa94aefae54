"""Labelled images and latents: sources, transforms, and their shards."""
