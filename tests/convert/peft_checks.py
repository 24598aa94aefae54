"""What PEFT computes with exported adapters; run without JAX.

  python peft_checks.py FOLDER

measures every case of `peft_cases.write` in FOLDER, has Trainer train its
adapters further into CASE/trained, and prints the figures as JSON.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file


def measure(case: pathlib.Path) -> dict:
  """The figures of one case."""
  stored = np.load(case / "io.npz")
  tokens, want = (torch.tensor(stored[n]) for n in ("tokens", "logits"))
  model = peft.PeftModel.from_pretrained(
    _load(case / "hf_base"), case / "peft_lora", is_trainable=True
  ).eval()
  logits = model(tokens).logits
  torch.log_softmax(logits, -1)[..., 3].sum().backward()
  grads = load_file(case / "peft_grads" / "adapter_model.safetensors")
  found = {
    name.replace(".default", "").replace("modules_to_save.", ""): p.grad
    for name, p in model.named_parameters(remove_duplicate=False)
    if p.grad is not None
  }
  scale = max(float(x.abs().max()) for x in grads.values())
  error = max(float((found[n] - x).abs().max()) for n, x in grads.items())
  merged = _load(case / "hf_lora").eval()
  model.zero_grad()
  trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
      str(case / "run"),
      max_steps=2,
      learning_rate=1e-2,
      report_to=[],
      save_strategy="no",
      use_cpu=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
  )
  trainer.train()
  model.save_pretrained(case / "trained")
  after = model.eval()(tokens).logits
  np.save(case / "trained.npy", after.detach().numpy())
  return {
    "logits": float((logits - want).abs().max()),
    "gradients": error / scale,
    "names": sorted(found.keys() ^ grads.keys()),
    "merged": float((merged(tokens).logits - want).abs().max()),
    "moved": float((after - want).abs().max()),
  }


def _load(folder: pathlib.Path):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, dtype=torch.float32
  )


if __name__ == "__main__":
  root = pathlib.Path(sys.argv[1])
  cases = sorted(path for path in root.iterdir() if path.is_dir())
  print(json.dumps({case.name: measure(case) for case in cases}))
