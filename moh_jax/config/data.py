"""The section `data`, and those of how its examples are used in training."""

import dataclasses
import re
from typing import Annotated, Literal

from moh_jax.config import base
from moh_jax.config.registry import SOURCES, get_source

_SUM_TOLERANCE = 0.05  # percent: published mixes are rounded


@dataclasses.dataclass(frozen=True)
class ExamplesConfig(base.Section):
  """What the sections `data` of all families have in common.

  Attributes:
    source: name of the source.
    path: directory of the source.
    batch_size: examples per optimizer step, over all devices and processes;
      for text an example is a sequence.
    num_threads: threads that read and transform examples.
    prefetch: batches prepared ahead.
    workers: processes that prepare batches, each with `num_threads`; 0 prepares
      them in this process, None is 0 for text, and for images one for each 16
      CPUs, at most 8, as far as shared memory has room. A program that starts
      them needs `if __name__ == "__main__":`.
    device_prefetch: batches that are on the devices before their step.
    fake_examples: examples in each split of "fake".
  """

  NAME = "data"

  source: str = "fake"
  path: str = ""
  batch_size: base.Count = 128
  num_threads: base.Count = 4
  prefetch: base.Count = 4
  workers: base.Natural | None = None
  device_prefetch: base.Count = 2
  fake_examples: base.Count = 1024

  def check(self) -> None:
    """The source has its path, and reads what is set."""
    source = f"data.source={self.source!r}"
    if get_source(self).has_path and not self.path:
      self.fail("path", f"must name the directory of {source}")
    kinds = SOURCES[self.reads].records()
    for field in dataclasses.fields(self):
      readers = tuple(k.name for k in kinds if field.name in k.options)
      is_read = not readers or self.source in readers
      if not is_read and getattr(self, field.name) != field.default:
        usual = f"must be {field.default!r} with {source}"
        self.fail(field.name, f"{usual}; it is for {readers}")


@dataclasses.dataclass(frozen=True)
class DataConfig(ExamplesConfig):
  """Where examples come from and how they become batches.

  Attributes:
    source: "digits" (scikit-learn's 1,797 scans), "image_folder"
      (path/train/CLASS/* and path/val/CLASS/*, or path/CLASS/* with
      `val_share`; images without class folders are one class),
      "array_record" (shards of encoded images, path/train/*.array_record and
      path/val/..., as `prepare pack-images` writes them), "parquet" (Parquet or
      Arrow files of the library `datasets` with image bytes,
      path/train-*.parquet or path/train/*), "latents" (what `prepare
      encode-latents` writes, in the same places) or "fake" (random).
    path: directory of the source; "digits" and "fake" have none.
    augment: change of training images: "none", "shift" (random crop after
      padding by one eighth), "crop_flip" (random resized crop and horizontal
      flip) or "center_flip" (the centre crop of ADM, arXiv:2105.05233, and
      horizontal flip).
    auto_augment: random operations after `augment`, as timm names: "" none,
      "rand-m9-mstd0.5-inc1" RandAugment (arXiv:1909.13719) with sections m
      (magnitude), n (operations), p (probability), mstd (spread of magnitudes),
      mmax (largest one) and inc1 (all are stronger with the magnitude).
    random_erasing: probability that a box of an image becomes noise
      (arXiv:1708.04896), in [0, 1].
    repeats: copies of an image in an epoch, one after the other and augmented
      apart (arXiv:1901.09335). An epoch has as many examples as without, down
      to a multiple of 256, so it holds a part of the images.
    val_share: share of an image folder, or of tables, without val/ that is held
      out, in [0, 1]. Hashes of names decide, so that further images move few.
    class_list: file that names a class on each line, whose order is that of the
      labels of "image_folder" and "parquet"; "" is alphabetical order (numbers
      by value), or that of the tables.
    label_column: column of the labels of "parquet"; "" finds it.
    bad_images: what a training image that cannot be read does: "raise" ends the
      run when it is reached, "skip" takes another image in its place and warns,
      "check" reads all images before the first step and names the bad ones.
    eval_resize: shorter side in pixels before the centre crop of evaluation; 0
      resizes straight to the model's image size, None is the largest centre
      crop of the images.
    mean: subtracted from pixels in [0, 1], one value per channel; None is 0.5
      for diffusion models, ImageNet's for classifiers of three channels, the
      training scans' for "digits", else 0.5. Latents are not normalized.
    std: divides after the mean, one value per channel; None as for `mean`.
  """

  reads = "images"

  source: Annotated[str, SOURCES["images"]] = "fake"
  augment: Literal["none", "shift", "crop_flip", "center_flip"] = "none"
  auto_augment: str = ""
  random_erasing: base.Share = 0.0
  repeats: base.Count = 1
  val_share: base.Share = 0.0
  class_list: str = ""
  label_column: str = ""
  bad_images: Literal["raise", "skip", "check"] = "raise"
  eval_resize: base.Natural | None = 0
  mean: tuple[Annotated[float, base.Range(-1e6, 1e6)], ...] | None = None
  std: tuple[Annotated[float, base.Range(0, 1e6, "(]")], ...] | None = None

  def check(self) -> None:
    """Paths and normalization fit the source and one another."""
    parse_policy(self.auto_augment)
    super().check()
    mean, std = self.mean, self.std
    fit = mean and std and len(mean) == len(std)
    if not fit and (mean, std) != (None, None):
      self.fail("mean", f"and data.std={std} must have one value per channel")


@dataclasses.dataclass(frozen=True)
class ClassifierConfig(base.Section):
  """Label smoothing (arXiv:1512.00567) and the mixing of whole images.

  Attributes:
    label_smoothing: share of the target that is spread over all classes, in
      [0, 1]; 0 is off. The loss of training then cannot reach 0: with 0.1 it is
      at least 0.29 for 3 classes, 0.50 for 10 and 1.01 for 1,000.
    mixup: alpha of the Beta distribution of mixup (arXiv:1710.09412), which
      blends two images; 0 is off.
    cutmix: alpha of the Beta distribution of CutMix (arXiv:1905.04899), which
      pastes a box of one image into another; 0 is off.
    cutmix_prob: probability of CutMix rather than mixup for a batch where both
      are on, in [0, 1].
  """

  NAME = "classifier"
  RUNTIME_FIELDS = ("label_smoothing", "mixup", "cutmix", "cutmix_prob")

  label_smoothing: base.Share = 0.0
  mixup: base.Amount = 0.0
  cutmix: base.Amount = 0.0
  cutmix_prob: base.Share = 0.5


@dataclasses.dataclass(frozen=True)
class TextDataConfig(ExamplesConfig):
  """Where text comes from and how it becomes batches of packed sequences.

  Attributes:
    source: "tokens" (what `prepare tokenize` writes), "chat" (conversations:
      only their answers are trained), "preference" (conversations with a better
      and a worse answer, see `tune.dpo`), "stdlib" (the sources of the running
      Python's standard library, tokenized on first use) or "fake" (random
      tokens).
    path: folder of the token sets, or of files of conversations that are named
      train and val; for "stdlib" where they are prepared; "fake" has none.
    mix: names of the sources, path/NAME/{train,val}; () is the one set
      path/{train,val}.
    ratios: percent of the sequences that each of `mix` gives, 100 together.
    sequence_length: N, tokens of a sequence.
    separate_documents: whether documents packed into one sequence do not see
      one another and count their positions from 0; False reads a sequence as
      one text.
    tokenizer: tokenizer of "stdlib": "bpe" (trained on it, model.vocab_size
      entries) or "bytes".
    tokenizer_path: folder of the tokenizer of conversations (tokenizer.json),
      with the chat template beside it; "" is that of `train.init_from`.
    template: name of the chat template where there are several; "" is
      "default"; "chatml" is ours where the tokenizer has none of this name.
    too_long: what becomes of a conversation of more than N + 1 tokens: "cut"
      keeps its beginning, "skip" leaves it out.
    on_error: what becomes of a row that is no conversation, or that the
      template cannot write: "stop" ends the run, "skip" leaves it out and
      counts it. A damaged file ends the run in any case.
  """

  reads = "text"

  source: Annotated[str, SOURCES["text"]] = "fake"
  batch_size: base.Count = 8
  mix: tuple[str, ...] = ()
  ratios: tuple[base.Positive, ...] = ()
  sequence_length: base.Count = 2048
  separate_documents: bool = True
  tokenizer: Literal["bpe", "bytes"] = "bpe"
  tokenizer_path: str = ""
  template: str = ""
  too_long: Literal["cut", "skip"] = "cut"
  on_error: Literal["stop", "skip"] = "stop"

  def check(self) -> None:
    """Path and mix fit the source; the shares of a mix are all of it."""
    super().check()
    if len(self.mix) != len(self.ratios):
      self.fail("ratios", f"must have one value for each of {self.mix}")
    if len(set(self.mix)) != len(self.mix):
      self.fail("mix", "must name each source once")
    if self.mix and abs(sum(self.ratios) - 100) > _SUM_TOLERANCE:
      self.fail("ratios", f"must sum to 100 (percent), not {sum(self.ratios)}")


_POLICY_KEYS = {
  "m": "magnitude",
  "n": "layers",
  "p": "probability",
  "mstd": "spread",
  "mmax": "limit",
}


@dataclasses.dataclass(frozen=True)
class RandAugmentPolicy(base.Section):
  """RandAugment (arXiv:1909.13719) with the options of timm.

  Attributes:
    magnitude: strength of an operation before the spread; at 10 its argument
      is at the end of its range.
    layers: operations that are sampled for an image, with replacement.
    probability: of each of them to be applied.
    spread: standard deviation of the magnitude.
    limit: largest magnitude after the spread; the smallest is 0.
  """

  NAME = "data.auto_augment"

  magnitude: Annotated[int, base.Range(0, 30)] = 10
  layers: Annotated[int, base.Range(1, 15)] = 2
  probability: base.Share = 0.5
  spread: Annotated[float, base.Range(0, 100)] = 0.0
  limit: Annotated[int, base.Range(1, 30)] = 10


def parse_policy(text: str) -> RandAugmentPolicy | None:
  """Parses the text of a policy; "" is none.

  Args:
    text: "rand" and sections "-KEYVALUE" in any order, "inc1" among them.

  Raises:
    ValueError: the text is no policy.
  """
  if not text:
    return None
  values = dict(re.findall(r"-([a-z]+)([0-9]+(?:\.[0-9]+)?)", text))
  again = "rand" + "".join(f"-{key}{value}" for key, value in values.items())
  increasing = values.pop("inc", "")
  if again != text or increasing != "1" or values.keys() - _POLICY_KEYS:
    raise ValueError(
      f"data.auto_augment={text!r} must be '', or 'rand' with sections "
      "-KEYVALUE, each key once, such as 'rand-m9-mstd0.5-inc1'; keys are "
      f"{', '.join(_POLICY_KEYS)} and inc, which must be 1"
    )
  given = {key: base.GivenText(value) for key, value in values.items()}
  return RandAugmentPolicy(**{_POLICY_KEYS[key]: given[key] for key in given})
