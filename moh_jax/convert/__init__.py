"""Conversion of public checkpoints to ours and back.

The constants say where public weights come from that some commands need. They
stand here since help, which must not import JAX, prints them.
"""

INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
HOW_TO_GET_INCEPTION = (
  f"the FID metrics need the Inception weights {INCEPTION_FILE}: download "
  "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
  f"{INCEPTION_FILE} to any place and pass --inception PATH (a safetensors "
  "file of the same tensors will do)"
)
VAE_FILES = (
  "diffusion_pytorch_model.safetensors",
  "diffusion_pytorch_model.bin",
  "diffusion_pytorch_model.fp16.safetensors",
  "diffusion_pytorch_model.fp16.bin",
)
HOW_TO_GET_VAE = (
  f"latents need the Stable Diffusion autoencoder: put {VAE_FILES[0]} (or "
  f"{VAE_FILES[1]}) and config.json of stabilityai/sd-vae-ft-ema or "
  "stabilityai/sd-vae-ft-mse (https://huggingface.co/stabilityai/"
  "sd-vae-ft-ema) into one folder and pass --vae PATH, the folder or the file"
)
