"""Labelled images and latents: sources, transforms, shards."""
