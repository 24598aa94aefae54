"""Networks, one file each, and the diffusion process."""
