from unittest import mock

import tokenizers as hf
from absl.testing import parameterized
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moh_jax.data import tokenizers
from moh_jax.evaluation.harness import generation_options
from moh_jax.evaluation.harness_model import HarnessModel
from moh_jax.inference.score import Scorer
from tests.evaluation import tiny_harness


def _requests(kind, *arguments):
  return [
    Instance(kind, {}, args, i, ("a_task", i, 1))
    for i, args in enumerate(arguments)
  ]


def _bpe():
  text = "the cat sat on the mat, the cat said the the cat the mat sat at " * 9
  return tokenizers.JsonTokenizer(tokenizers.train_bpe([text], 300))


class HarnessModelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.scorer = tiny_harness.CountingScorer()
    self.generate = mock.Mock(
      side_effect=lambda prompts, **_: [f"ab {len(p)}\nQ: +" for p in prompts]
    )

  def _model(self, tokenizer=None, **options):
    tokenizer = tokenizer or tokenizers.BytesTokenizer()
    return HarnessModel(tokenizer, self.scorer, self.generate, **options)

  def _pairs(self, *arguments, **options):
    model = self._model(**options)
    scores = model.loglikelihood(_requests("loglikelihood", *arguments))
    self.assertEqual(
      scores, [(-len(p[1]), True) for p in self.scorer.calls[-1]]
    )
    return self.scorer.calls[-1]

  @parameterized.parameters((True, True), (False, True), (True, False))
  def test_pairs_are_encoded_as_the_harness_does(self, asked, begins):
    tokenizer = _bpe()
    tokenizer.add_bos, add_bos = begins, asked and begins

    class Theirs(TemplateLM):
      def tok_encode(self, string, add_special_tokens=None, **_):
        special = add_bos if add_special_tokens is None else add_special_tokens
        return [tokenizer.bos_id] * special + tokenizer.encode(string)

      def _loglikelihood_tokens(self, requests, **_):
        return [(context, scored) for _, context, scored in requests]

      def loglikelihood_rolling(self, requests):
        raise NotImplementedError

      generate_until = loglikelihood_rolling

      @property
      def eot_token_id(self):
        return tokenizer.bos_id

    texts = ("the cat", "the cat ", "the c", "", "the mat\n\n", "th  ")
    arguments = [(a, b) for a in texts for b in (" sat", "at", " the cat", "e")]
    # An answer that is a part of the only token; of the last one; none at all.
    arguments += [("th", "e"), ("the th", "e"), ("the the", "")]
    requests = _requests("loglikelihood", *arguments)
    theirs = Theirs().loglikelihood(requests, disable_tqdm=True)
    ours = self._pairs(*arguments, tokenizer=tokenizer, add_bos=asked)
    # Where theirs has no token to score of an answer, one is kept.
    kept = 0
    for i, (pair, (_, scored)) in enumerate(zip(arguments, theirs)):
      if pair[1] and not scored:
        whole, kept = tokenizer.encode("".join(pair)), kept + 1
        before = [tokenizer.bos_id] * add_bos + whole[:-1]
        theirs[i] = before or [tokenizer.bos_id], whole[-1:]
    self.assertEqual(kept, 3)
    self.assertEqual(ours, theirs)

  def test_what_a_task_asks_in_vain_is_named(self):
    made = hf.Tokenizer(hf.models.BPE({"a": 0}, []))  # knows nothing else
    made.add_special_tokens(["<s>"])
    tokenizer = tokenizers.JsonTokenizer(made.to_str().encode())
    with self.assertRaisesRegex(
      ValueError, "task 'a_task', document 0: no token stands for .* '---'"
    ):
      self._pairs(("", "---"), tokenizer=tokenizer)
    requests = _requests("generate_until", ("a", {"max_gen_toks": 40}))
    with self.assertRaisesRegex(
      ValueError, "max_gen_toks=40 of task 'a_task' must be less than .*=40"
    ):
      self._model().generate_until(requests)
    requests = _requests("generate_until", ("a", {"num_beams": 4}))
    with self.assertRaisesRegex(ValueError, "num_beams=4 must be one of"):
      self._model().generate_until(requests)

  @parameterized.parameters(1, 7, 8, 9, 16, 17, 40)
  def test_windows_of_the_scorer_are_the_harness_s(self, length):
    scorer = Scorer.__new__(Scorer)  # the rule needs nothing but the range
    scorer.max_length = 8
    tokens = list(range(100, 100 + length))
    theirs = get_rolling_token_windows(tokens, 1, 8, context_len=1)
    self.assertEqual(
      scorer.rolling(tokens, 1), list(map(make_disjoint_window, theirs))
    )

  def test_windows_of_a_text_are_summed(self):
    model = self._model()
    requests = _requests("loglikelihood_rolling", ("abcdef",), ("gh",))
    self.assertEqual(model.loglikelihood_rolling(requests), [-6, -2])
    self.assertEqual(self.scorer.calls[-1][0], ([256], list(b"ab")))

  def test_texts_end_at_the_first_stop_string(self):
    requests = _requests(
      "generate_until",
      ("abc", {"until": ["Q:", "\n"], "max_gen_toks": 3}),
      ("abcdef", {"until": "b", "max_gen_toks": 3}),
    )
    self.assertEqual(self._model().generate_until(requests), ["ab 4", "a"])

  def test_prompts_of_one_kind_share_a_call_and_leave_room(self):
    one, other = {"max_gen_toks": 30}, {"max_gen_toks": 30, "temperature": 0.5}
    requests = _requests(
      "generate_until", ("a", one), ("b" * 50, other), ("c" * 50, one)
    )
    made = self._model().generate_until(requests)
    first = [text.splitlines()[0] for text in made]
    self.assertEqual(first, ["ab 2", "ab 10", "ab 10"])
    self.assertEqual(
      [
        (*call.args, call.kwargs["temperature"], call.kwargs["seed"])
        for call in self.generate.call_args_list
      ],
      [
        ([[*b"cccccccccc"], [256, *b"a"]], 0.0, 0),
        ([[*b"bbbbbbbbbb"]], 0.5, 1),
      ],
    )


class GenerationOptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"do_sample": False, "temperature": 0.7}, {}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"until": ["a", ""], "max_tokens": 9},
     {"stop": ("a",), "max_new_tokens": 9}),
    ({"until": "ab", "top_k": 5, "max_gen_toks": 3, "top_p": 0.5},
     {"stop": ("ab",), "top_k": 5, "max_new_tokens": 3, "top_p": 0.5}),
  )  # fmt: skip
  def test_options_have_our_names(self, given, expected):
    plain = {"stop": (), "max_new_tokens": 256, "temperature": 0.0}
    plain |= {"top_k": 0, "top_p": 1.0}
    self.assertEqual(generation_options(given), plain | expected)
