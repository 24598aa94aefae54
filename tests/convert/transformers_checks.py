"""What transformers makes of exported folders: a program without JAX.

`python transformers_checks.py FOLDER` measures every case of FOLDER, as
`transformers_cases.write` made them, and prints one JSON object: for each case
its measurements. Errors are the largest absolute ones, of gradients relative to
the largest of the parameter; `transformers_test.py` says what is allowed.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

PROMPT = 8
# Attention -> caches that greedy tokens are written with.
_DYNAMIC = {"dynamic": {"use_cache": True}}
_CACHES = {
  "eager": _DYNAMIC,
  "sdpa": {
    **_DYNAMIC,
    "none": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
  },
}


def measure(case: pathlib.Path) -> dict:
  """Measures a case."""
  stored = dict(np.load(case / "io.npz"))
  found = {"version": transformers.__version__}
  for form, caches in _CACHES.items():
    model = _load(case / "hf", attn_implementation=form)
    found |= {
      f"{form}/{name}": value
      for name, value in {
        **outputs(model, stored),
        **gradients(model, stored),
        **written(model, stored, caches),
      }.items()
    }
  found["bfloat16"] = bfloat16(case / "hf", stored)
  found["again"] = again(case, stored)
  return found


def outputs(model, stored) -> dict[str, float]:
  """Logits and balance loss, whole and padded, and without a dict."""
  tokens, mask = _tensor(stored["tokens"]), _tensor(stored["mask"])
  routed = _router(model)
  more = {"output_router_logits": True} if routed else {}
  with torch.no_grad():
    plain = model(tokens, **more)
    padded = model(tokens, attention_mask=mask, **more)
    last = model(tokens, logits_to_keep=1, return_dict=False)[0]
  at = stored["mask"]
  found = {
    "logits": _error(plain.logits, stored["logits"]),
    "logits_padded": _error(padded.logits[at], stored["logits_padded"][at]),
    "logits_last": _error(last, stored["logits"][:, -1:]),
  }
  if routed:
    found["balance"] = _error(plain.aux_loss, stored["balance"])
    found["balance_padded"] = _error(padded.aux_loss, stored["balance_padded"])
  return found


def gradients(model, stored) -> dict[str, float]:
  """Loss with labels and its gradients, also with layers computed again."""
  tokens = _tensor(stored["tokens"])
  more = {"output_router_logits": True} if _router(model) else {}
  found = {}
  for name, kwargs in {
    "gradients": None,
    "gradients_again": {"use_reentrant": False},
  }.items():
    model.train().zero_grad()
    model.gradient_checkpointing_disable()
    calls = []
    hook = model.model.layers[0].input_layernorm.register_forward_hook(
      lambda *_: calls.append(1)  # noqa: B023
    )
    if kwargs is not None:
      model.gradient_checkpointing_enable(kwargs)
    loss = model(tokens, labels=tokens, **more).loss
    loss.backward()
    hook.remove()
    worst = [_error(loss, stored["loss"])]
    for parameter, value in model.named_parameters():
      want = stored[f"gradients/{parameter}"]
      got = torch.zeros(1) if value.grad is None else value.grad
      worst.append(_error(got, want) / max(np.abs(want).max(), 1e-3))
    found[name] = float(max(worst))
    found[f"{name}_calls"] = len(calls)
  model.gradient_checkpointing_disable()
  model.eval()
  items = tokens[:, 1:].numel()
  with torch.no_grad():
    whole = model(tokens, labels=tokens).loss
    parts = [
      model(row, labels=row, num_items_in_batch=items, **more)
      for row in tokens[:, None]
    ]
  for part in parts:
    if more:
      weight = model.config.router_aux_loss_coef
      whole = whole + weight * part.aux_loss / len(parts)
  found["accumulated"] = _error(sum(part.loss for part in parts), whole.numpy())
  return found


def written(model, stored, caches) -> dict[str, bool]:
  """Whether greedy tokens are ours, with each cache and with padding."""
  prompt, want = _tensor(stored["tokens"])[:, :PROMPT], stored["greedy"]
  padded = torch.cat((torch.zeros_like(prompt[:, :3]), prompt), 1)
  mask = torch.ones_like(padded)
  mask[:, :3] = 0
  tokens = {
    name: _greedy(model, prompt, stored, **cache)
    for name, cache in caches.items()
  }
  tokens["left_padded"] = _greedy(model, padded, stored, attention_mask=mask)
  return {f"greedy_{n}": bool((x == want).all()) for n, x in tokens.items()}


def bfloat16(folder: pathlib.Path, stored) -> dict:
  """In bfloat16: error of the logits, and the dtypes of the routers."""
  model = _load(folder, dtype=torch.bfloat16, device_map="auto")
  with torch.no_grad():
    logits = model(_tensor(stored["tokens"])).logits
  return {
    "logits": _error(logits.float(), stored["logits"]),
    "routers": sorted(
      {str(x.dtype) for n, x in model.named_parameters() if ".router." in n}
    ),
    "projections": str(model.model.layers[0].mlp.up_proj.weight.dtype),
  }


def again(case: pathlib.Path, stored) -> float:
  """Error of the logits after `save_pretrained` in shards."""
  _load(case / "hf").save_pretrained(case / "again", max_shard_size="20KB")
  model = _load(case / "again")
  with torch.no_grad():
    return _error(model(_tensor(stored["tokens"])).logits, stored["logits"])


def _greedy(model, prompt, stored, **options) -> np.ndarray:
  """Greedy tokens after a prompt, as many as stored."""
  count = stored["greedy"].shape[1]
  options = {"attention_mask": torch.ones_like(prompt), **options}
  tokens = model.generate(
    prompt,
    do_sample=False,
    pad_token_id=0,
    max_new_tokens=count,
    min_new_tokens=count,
    **options,
  )
  return tokens[:, prompt.shape[1] :].numpy()


def _load(folder: pathlib.Path, **options):
  options = {"dtype": torch.float32, **options}
  return AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, **options
  ).eval()


def _router(model) -> bool:
  return getattr(model.config, "router", {"kind": "none"})["kind"] != "none"


def _tensor(array) -> torch.Tensor:
  return torch.tensor(array).long()


def _error(got: torch.Tensor, want: np.ndarray) -> float:
  return float(np.abs(got.detach().numpy() - want).max())


if __name__ == "__main__":
  torch.set_num_threads(1)  # the models are too small for more
  torch.manual_seed(0)
  results = {}
  for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    results[path.name] = measure(path)
  print(json.dumps(results))
