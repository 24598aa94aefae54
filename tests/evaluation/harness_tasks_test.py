from absl.testing import absltest, parameterized

from moh_jax.evaluation.harness_tasks import (
  PRESETS,
  TaskChoice,
  choose_tasks,
  main_metric,
)

# Where the harness keeps the tasks of the presets: reading all takes long.
_FOLDERS = (
  *("arc", "ceval", "cmmlu", "gsm8k", "hellaswag", "lambada", "logiqa"),
  *("mmlu/default", "nq_open", "openbookqa", "piqa", "sciq"),
  *("super_glue/boolq", "truthfulqa", "winogrande"),
)


class ChooseTasksTest(parameterized.TestCase):
  def test_names_and_presets_go_together(self):
    chosen = choose_tasks("wikitext, paper-small")
    self.assertEqual(chosen[0], TaskChoice("wikitext"))
    self.assertEqual(chosen[1:], PRESETS["paper-small"])

  def test_shots_of_the_presets_are_the_paper_s(self):
    self.assertEqual({c.shots for c in choose_tasks("paper-small")}, {0})
    shots = {c.name: c.shots for c in choose_tasks("paper-llama3")}
    self.assertLen(shots, 16)
    self.assertContainsSubset(
      {"mmlu": 5, "hellaswag": 10, "arc_challenge": 25, "gsm8k": 8}, shots
    )

  def test_shots_that_are_given_hold_for_all(self):
    chosen = choose_tasks("paper-llama3,wikitext", 3)
    self.assertEqual({choice.shots for choice in chosen}, {3})

  @parameterized.parameters(
    ("", "tasks='' must be names"),
    ("a,,b", "tasks='a,,b' must be names"),
    ("paper-small,piqa", r"must name a task once, not \['piqa'\]"),
    ("paper-small,paper-llama3", "'logiqa'"),
  )
  def test_choice_without_sense_is_refused(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      choose_tasks(text)

  def test_negative_shots_are_refused(self):
    with self.assertRaisesRegex(ValueError, "num_fewshot=-1 must be at least"):
      choose_tasks("piqa", -1)


class MainMetricTest(parameterized.TestCase):
  @parameterized.parameters(
    ("acc", ("acc", "acc_norm"), "acc"),
    ("", ("acc", "acc_norm"), "acc_norm"),
    ("lost", ("perplexity", "acc"), "acc"),
    ("", ("exact_match,strict", "exact_match,loose"), "exact_match,strict"),
    ("", ("word_perplexity", "bits_per_byte"), ""),
  )
  def test_the_wanted_one_or_a_share_of_right_answers(
    self, wanted, metrics, expected
  ):
    self.assertEqual(main_metric(wanted, metrics), expected)


class PresetsNeedLmEvalTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    import pathlib

    import lm_eval.tasks

    root = pathlib.Path(lm_eval.tasks.__file__).parent
    cls.manager = lm_eval.tasks.TaskManager(
      include_path=[root / folder for folder in _FOLDERS],
      include_defaults=False,
    )

  @parameterized.parameters(*PRESETS)
  def test_the_harness_has_the_tasks_and_metrics(self, preset):
    for choice in PRESETS[preset]:
      with self.subTest(choice.name):
        self.assertIn(choice.name, self.manager.all_tasks)
        entry = self.manager.task_index[choice.name]
        listed = "metric_list"
        if choice.name in self.manager.all_groups:
          listed = "aggregate_metric_list"
        metric, _, kind = choice.metric.partition(",")
        names = {item["metric"] for item in entry.cfg[listed]}
        self.assertIn(metric, names)
        kinds = {item["name"] for item in entry.cfg.get("filter_list", ())}
        self.assertEqual(kinds and kind in kinds, kinds and True)


if __name__ == "__main__":
  absltest.main()
