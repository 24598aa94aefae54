"""Random texts that are hard for tokenizers; without other libraries."""

import random

SPECIAL = (
  *("<s>", "</s>", "<unk>", "<|begin_of_text|>", "<|end_of_text|>"),
  *("<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
  *("<tool_call>", "<pad>", "[INST]", "<0x0A>", "<|", "|>", "<s", "▁", "Ġ"),
)
_WORDS = (
  *"the head of a layer def return import class self while for in not".split(),
  *"Hello world I'm you'll it's DON'T we'd don\u2019t naïve Grüße".split(),
  *"你好世界 привет мир こんにちは 안녕하세요 مرحبا".split(),
  *"שלום नमस्ते ไทย ﬁn ½ Å ǅ".split(),
)
_EMOJI = ("👩‍👩‍👧‍👦", "🇩🇪", "🤷🏽‍♀️", "😀", "❤️", "🏳️‍🌈", "1️⃣", "🫠")
_CODE = (
  "def f(x):\n\treturn x[0]  # why\n",
  'print(f"{a!r}: {b:>10.3f}")\n',
  "for (int i=0;i<n;++i){s+=a[i];}\r\n",
  "<div class='x'>&amp;</div>\n",
  "SELECT * FROM t WHERE a != 'b';",
  "    if x is None:\n        pass\n\n\n",
)
_SPACES = (" ", "  ", "\n", "\n\n", "\t", "   ", "\r\n", "\u00a0", "\u3000", "")
_MARKS = ("\u0301", "e\u0301", "\u200d", "\ufeff", "\u200b", "\ufffd", "\x7f")
_RANGES = (
  *((0x21, 0x7E), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF)),
  *((0x5D0, 0x5EA), (0x900, 0x97F), (0x1E00, 0x1EFF), (0x2000, 0x206F)),
  *((0x2190, 0x21FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF01, 0xFF5E)),
  *((0x1D400, 0x1D7FF), (0x1F300, 0x1F64F), (0x20000, 0x2A6DF)),
)


def random_texts(count: int = 1000, seed: int = 0) -> list[str]:
  """Returns texts of words, code, emoji, any characters and special tokens."""
  rng = random.Random(seed)

  def characters() -> str:
    low, high = rng.choice(_RANGES)
    count = rng.randint(1, 5)
    return "".join(chr(rng.randint(low, high)) for _ in range(count))

  pieces = (
    *[lambda: rng.choice(_WORDS)] * 4,
    *[lambda: rng.choice(_SPACES)] * 2,
    lambda: rng.choice(_EMOJI),
    lambda: rng.choice(_CODE),
    lambda: rng.choice(SPECIAL),
    lambda: str(rng.randrange(10 ** rng.randrange(1, 9))),
    lambda: rng.choice(_MARKS),
    characters,
  )

  def join() -> str:
    return " " if rng.random() < 0.4 else ""

  return [
    "".join(
      pieces[rng.randrange(12)]() + join() for _ in range(rng.randrange(1, 14))
    )
    for _ in range(count)
  ]
